"""From an outcome to a report: total, bounded and always encodable. Cases C39, C40, C41, C43, C44."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Codec
from schemas.limits import JSON_DEPTH_MAX, JSON_INTEGER_DIGITS_MAX, RESULT_MAX
from schemas.messages import AttemptFailed, AttemptSucceeded, ErrorKind, ReadyTask, Verdict
from tests.samples import minimal
from workers import execution
from workers.errors import ArgumentError, PermanentError, RetryableError, Snooze
from workers.execution import Cancelled, Crashed, Failed, GivenBack, Snoozed, Succeeded

NOW = 1_764_547_200_000_000  # 2025-12-01T00:00:00Z
READY = minimal(ReadyTask, task_id="t", attempt=2)
CODEC = Codec.builtin()


def failed(error: BaseException) -> Failed:
    """The outcome of a handler that raises `error`; its report can be written to the log and read back."""
    try:
        raise error
    except BaseException as raised:
        outcome = execution.failed(raised, NOW)
    assert isinstance(outcome, Failed)
    report = execution.report(READY, outcome, "w", NOW)
    assert CODEC.decode(CODEC.encode(report)) == report
    assert len(outcome.error.message.encode()) <= execution.MESSAGE_MAX
    assert len((outcome.error.traceback or "").encode()) <= execution.TRACEBACK_MAX
    return outcome


# --- results ----------------------------------------------------------------------------------------------------------


class Model(pydantic.BaseModel):
    x: float
    where: Path = Path("/tmp")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"null"),
        (0, b"0"),
        ("", b'""'),
        ([], b"[]"),
        ({}, b"{}"),
        (False, b"false"),
        ([None, {"a": None}], b'[null,{"a":null}]'),
        (9007199254740993, b"9007199254740993"),
        (2**64, b"18446744073709551616"),
        (Model(x=1.5), b'{"x":1.5,"where":"/tmp"}'),
        ([Model(x=1.5)], b'[{"x":1.5,"where":"/tmp"}]'),
        (Path("/x"), b'"/x"'),
        ("\\u0000", rb'"\\u0000"'),
        ("a\x00b\uffff\U0001f989", '"a\\u0000b\uffff\U0001f989"'.encode()),
    ],
)
def test_results_are_stored_as_they_are(value: Any, expected: bytes) -> None:
    assert execution.succeeded(value) == Succeeded(expected)


class Rude:
    """Fails in every way that a returned value can."""

    @property
    def model_dump(self) -> Any:
        raise KeyError("rude")


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: float("nan"), "NaN"),
        (lambda: [1, {"a": float("-inf")}], "NaN or Infinity"),
        (lambda: Model(x=float("inf")), "NaN"),
        (lambda: "\ud800", "surrogate"),
        (lambda: {"\ud800": 1}, "surrogate"),
        (lambda: object(), "object"),
        (lambda: 1 + 2j, "complex"),
        (lambda: {(1, 2): 3}, "tuple"),
        (lambda: Rude(), "KeyError"),
        (lambda: recursive(), "itself"),
        (lambda: "x" * RESULT_MAX, str(RESULT_MAX)),
        (lambda: eval("[" * (JSON_DEPTH_MAX + 1) + "]" * (JSON_DEPTH_MAX + 1)), "nested deeper"),
        (lambda: 10**JSON_INTEGER_DIGITS_MAX, "digits"),
        (lambda: 10**5000, "digits"),
    ],
)
def test_a_result_that_cannot_be_stored_fails_for_good(make: Callable[[], Any], reason: str) -> None:
    outcome = execution.succeeded(make())
    assert isinstance(outcome, Failed)
    assert outcome.error.kind is ErrorKind.RESULT
    assert outcome.error.verdict is Verdict.PERMANENT
    assert "not serialisable" in outcome.error.message
    assert reason in outcome.error.message


def test_limits_of_results_are_reached_exactly() -> None:
    at_depth = eval("[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX)
    brackets_in_text = ["[" * 500 + '\\"{' * 100]
    for value in ("x" * (RESULT_MAX - 2), at_depth, 10 ** (JSON_INTEGER_DIGITS_MAX - 1), brackets_in_text):
        assert isinstance(execution.succeeded(value), Succeeded)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON_VALUES)
def test_what_succeeds_is_json_that_reads_back_the_same(value: Any) -> None:
    outcome = execution.succeeded(value)
    if isinstance(outcome, Succeeded):
        assert msgspec.json.decode(outcome.result) == value


# --- exceptions -------------------------------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class NotText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Saboteur(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no")

    @property
    def response(self) -> Any:
        raise SystemExit

    def __str__(self) -> str:
        raise KeyboardInterrupt


def holding_a_lock() -> Exception:
    with socket.socket() as held:
        return ValueError(threading.Lock(), held)


def fifty_causes() -> Exception:
    error = Exception("the first")
    for depth in range(50):
        following = Exception(f"number {depth}")
        following.__cause__ = error
        error = following
    return error


@pytest.mark.parametrize(
    ("make", "type_name", "message"),
    [
        (lambda: TwoArguments(3, "sold out"), "tests.unit.test_execution.TwoArguments", "sold out"),
        (lambda: holding_a_lock(), "ValueError", "lock"),
        (lambda: Unprintable(), "tests.unit.test_execution.Unprintable", "__str__ raised ValueError"),
        (lambda: NotText(), "tests.unit.test_execution.NotText", "__str__ raised TypeError"),
        (lambda: Saboteur(), "tests.unit.test_execution.Saboteur", ""),
        (lambda: fifty_causes(), "Exception", "number 49"),
        (lambda: Exception("x" * 10_000_000), "Exception", "xxx"),
        (lambda: Exception("\ud800\x00 and \\u0000 and \U0001f989"), "Exception", "�� and \\u0000 and \U0001f989"),
        (lambda: SystemExit(3), "SystemExit", "3"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (lambda: GeneratorExit(), "GeneratorExit", ""),
        (lambda: ExceptionGroup("many", [ValueError("a"), TypeError("b")]), "ExceptionGroup", "many"),
        (lambda: type("É" * 1000, (Exception,), {})("x"), "tests.unit.test_execution.ÉÉ", "x"),
        (lambda: PermanentError("no"), "tidewheel.PermanentError", "no"),
    ],
)
def test_any_exception_becomes_a_bounded_report(
    make: Callable[[], BaseException], type_name: str, message: str
) -> None:
    recorded = failed(make()).error
    assert recorded.kind is ErrorKind.RAISED
    assert recorded.type.startswith(type_name)
    assert message in recorded.message


def test_a_class_of_the_handlers_module_is_known_by_its_bases() -> None:
    class Local(LookupError):
        pass

    recorded = failed(Local("x")).error
    assert recorded.type.endswith("<locals>.Local")
    assert recorded.bases == ("LookupError", "Exception", "BaseException")


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    recorded = failed(Exception("begin " + "é" * 100_000 + " end")).error
    traceback = recorded.traceback or ""
    assert traceback.startswith("Traceback") or "begin" in traceback
    assert traceback.rstrip().endswith("end")
    assert "\n…\n" in traceback


@given(st.text(st.characters()), st.integers(16, 200), st.none() | st.integers(1, 10))
def test_storable_text_is_bounded_and_encodable(text: str, size_max: int, head: int | None) -> None:
    stored = execution.storable(text, size_max, head)
    assert len(stored.encode()) <= size_max
    assert "\x00" not in stored
    if len(text.encode(errors="surrogatepass")) <= size_max and text.isprintable():
        assert stored == text


# --- what the handler's side knows of an error ------------------------------------------------------------------------


class Response:
    def __init__(self, status_code: Any, headers: Any = None) -> None:
        self.status_code = status_code
        self.headers = headers


class HttpError(Exception):
    def __init__(self, status: Any, headers: Any = None) -> None:
        super().__init__(f"status {status}")
        self.response = Response(status, headers)


class StatusError(Exception):
    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


def invalid(model: Any, value: Any) -> Exception:
    try:
        model(value)
    except Exception as error:
        return error
    raise AssertionError("it is valid")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (PermanentError("no"), Verdict.PERMANENT),
        (RetryableError("later"), Verdict.RETRYABLE),
        (ArgumentError("n"), Verdict.PERMANENT),
        (HttpError(503), Verdict.LIKELY_RETRYABLE),
        (HttpError(500), Verdict.LIKELY_RETRYABLE),
        (HttpError(429), Verdict.LIKELY_RETRYABLE),
        (HttpError(425), Verdict.LIKELY_RETRYABLE),
        (HttpError(408), Verdict.LIKELY_RETRYABLE),
        (HttpError(404), Verdict.LIKELY_PERMANENT),
        (HttpError(422), Verdict.LIKELY_PERMANENT),
        (HttpError(302), Verdict.UNKNOWN),
        (HttpError("503"), Verdict.UNKNOWN),
        (HttpError(True), Verdict.UNKNOWN),
        (StatusError(500), Verdict.LIKELY_RETRYABLE),
        (StatusError(400), Verdict.LIKELY_PERMANENT),
        (StatusError("running"), Verdict.UNKNOWN),
        (invalid(Model.model_validate, {}), Verdict.LIKELY_PERMANENT),
        (invalid(lambda value: msgspec.convert(value, int), "x"), Verdict.LIKELY_PERMANENT),
        (TimeoutError(), Verdict.LIKELY_RETRYABLE),
        (ConnectionResetError(), Verdict.LIKELY_RETRYABLE),
        (ValueError("x"), Verdict.UNKNOWN),
        (SystemExit(1), Verdict.UNKNOWN),
    ],
)
def test_the_verdict(error: BaseException, verdict: Verdict) -> None:
    assert failed(error).error.verdict is verdict


@pytest.mark.parametrize(
    ("error", "retry_after_ms"),
    [
        (RetryableError("later"), None),
        (RetryableError("later", after=1.5), 1500),
        (RetryableError("later", after=timedelta(minutes=1)), 60_000),
        (HttpError(429, {"Retry-After": "120"}), 120_000),
        (HttpError(503, {"retry-after": " 3 "}), 3_000),
        (HttpError(503, {"Retry-After": "Mon, 01 Dec 2025 00:01:00 GMT"}), 60_000),
        (HttpError(503, {"Retry-After": "Mon, 01 Dec 2020 00:01:00 GMT"}), 0),
        (HttpError(503, {"Retry-After": "soon"}), None),
        (HttpError(503, {"Retry-After": "9" * 40}), None),
        (HttpError(503, "no mapping"), None),
        (HttpError(404, {"Retry-After": "120"}), None),
    ],
)
def test_a_retry_may_be_asked_for_later(error: BaseException, retry_after_ms: int | None) -> None:
    assert failed(error).retry_after_ms == retry_after_ms


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e12])
def test_durations_of_nonsense_are_refused_where_they_are_made(delay: float) -> None:
    with pytest.raises(ValueError, match="delay"):
        Snooze(delay)
    with pytest.raises(ValueError, match="after"):
        RetryableError("later", after=delay)


def test_a_snooze_is_no_failure() -> None:
    outcome = execution.failed(Snooze(timedelta(seconds=2), "not \x00 yet"), NOW)
    assert outcome == Snoozed(2000, "not � yet")


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded(b"1"),
        execution.timed_out(2000),
        execution.deadline_passed(),
        execution.unknown_type("x", [f"type-{n}" for n in range(500)]),
        Snoozed(5, "later"),
        Cancelled(),
        Crashed("process 7 was killed by SIGKILL"),
        GivenBack("shutdown"),
    ],
)
def test_every_outcome_has_a_report_that_names_the_attempt(outcome: execution.Outcome) -> None:
    report = execution.report(READY, outcome, "w", NOW)
    assert (report.task_id, report.attempt, report.worker_id) == ("t", 2, "w")
    assert CODEC.decode(CODEC.encode(report)) == report
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=execution.Outcome) == outcome


def test_an_unknown_type_lists_the_known_ones() -> None:
    assert "known are: a, b" in execution.unknown_type("x", ["b", "a"]).error.message
    assert "and 480 more" in execution.unknown_type("x", [f"type-{n}" for n in range(500)]).error.message


def test_success_and_failure_carry_their_content() -> None:
    success = execution.report(READY, Succeeded(b"[1]"), "w", NOW)
    failure = execution.report(READY, failed(ValueError("x")), "w", NOW)
    assert isinstance(success, AttemptSucceeded) and success.result == b"[1]"
    assert isinstance(failure, AttemptFailed) and failure.error.message == "x"
