"""What a submission may hold (cases C12-C14, C22, C39-C42), and when two are the same."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.refusals import Refused
from scheduler.strict_json import NotAcceptable, check_json
from scheduler.submission import Submission, parse_item, parse_submission, parse_update, split_bulk, validated
from schemas.limits import BULK_MAX, JSON_DEPTH_MAX, JSON_INTEGER_DIGITS_MAX
from schemas.messages import Backoff, Jitter, Priority, RetryPolicy, TaskSpec

NOW = 1_780_315_200_000_000  # 2026-06-01T12:00:00Z
DAY_S = 86_400


def parsed(**fields: Any) -> Submission:
    return parse_submission(json.dumps({"task_type": "a", **fields}).encode())


def fields_refused(body: bytes) -> set[str]:
    with pytest.raises(Refused) as caught:
        parse_submission(body).spec(NOW)
    json.loads(json.dumps([error.message for error in caught.value.refusal.errors]))
    return {error.field for error in caught.value.refusal.errors}


def test_what_is_not_given_is_the_default_of_the_vocabulary() -> None:
    assert parsed().spec(NOW) == TaskSpec(task_type="a")
    everything = dict.fromkeys(set(Submission.model_fields) - {"task_type"})
    assert parsed(**everything).spec(NOW) == TaskSpec(task_type="a")


def test_every_field_reaches_the_task() -> None:
    spec = parsed(
        payload={"n": 1},
        priority="high",
        queue="mail",
        scheduled_at="2026-06-01T15:00:00+02:00",
        start_deadline="2026-06-02T00:00:00Z",
        timeout_seconds=1.1,
        total_timeout_seconds=60,
        lease_seconds=5,
        max_retries=2,
        max_crashes=5,
        retry_backoff="linear",
        retry_jitter="none",
        retry_delay_seconds=0.0001,
        retry_factor=1.5,
        retry_cap_seconds=0,
        retry_on=["IOError"],
        give_up_on=["KeyError"],
        idempotency_key="käse 17",
        metadata={"tenant_id": "acme", "correlation_id": "c"},
    ).spec(NOW)
    assert spec == TaskSpec(
        task_type="a",
        payload=b'{"n": 1}',
        priority=Priority.HIGH,
        queue="mail",
        tenant_id="acme",
        metadata={"tenant_id": "acme", "correlation_id": "c"},
        scheduled_at=NOW + DAY_S * 1_000_000 // 24,
        start_deadline_at=NOW + DAY_S * 1_000_000 // 2,
        timeout_ms=1_100,
        total_timeout_ms=60_000,
        lease_ms=5_000,
        idempotency_key="käse 17",
        retry=RetryPolicy(
            max_attempts=3,
            max_crashes=5,
            backoff=Backoff.LINEAR,
            jitter=Jitter.NONE,
            delay_ms=1,
            factor=1.5,
            cap_ms=0,
            retry_on=("IOError",),
            give_up_on=("KeyError",),
        ),
    )


@pytest.mark.parametrize(("retries", "attempts", "expected"), [(0, None, 1), (3, None, 4), (None, 1, 1), (2, 3, 3)])
def test_retries_and_attempts_differ_by_one(retries: int | None, attempts: int | None, expected: int) -> None:
    assert parsed(max_retries=retries, max_attempts=attempts).spec(NOW).retry.max_attempts == expected


@pytest.mark.parametrize("delay_ms", [2_147_483_647, 2_147_483_648, 26_430_043_528, 10 * 366 * DAY_S * 1000])
def test_a_long_delay_is_kept_to_the_millisecond(delay_ms: int) -> None:
    assert parsed(delay_seconds=delay_ms / 1000).spec(NOW).scheduled_at == NOW + delay_ms * 1000


def test_a_delay_is_never_shortened() -> None:
    assert parsed(delay_seconds=0.0000001).spec(NOW).scheduled_at == NOW + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduled_at", "2026-06-01T12:00:00"),
        ("scheduled_at", 1_780_315_200),
        ("scheduled_at", 1_780_315_200_000),
        ("scheduled_at", "9999-12-31T23:59:59Z"),
        ("scheduled_at", "10000-01-01T00:00:00Z"),
        ("scheduled_at", "1969-12-31T23:59:59Z"),
        ("start_deadline", "2026-06-01T12:00:00Z"),
        ("delay_seconds", -1),
        ("delay_seconds", 101 * 366 * DAY_S),
        ("timeout_seconds", 0),
        ("lease_seconds", 1),
        ("max_retries", -1),
        ("max_retries", 1.0),
        ("max_attempts", 0),
        ("max_attempts", 2**63),
        ("max_crashes", 0),
        ("retry_factor", 0.5),
        ("retry_backoff", "quadratic"),
        ("priority", 1),
        ("retry_on", "IOError"),
        ("retry_on.0", [""]),
        ("task_type", ""),
        ("task_type", "a b"),
        ("queue", "a:b"),
        ("queue", "../x"),
        ("idempotency_key", ""),
        ("idempotency_key", "x" * 256),
        ("idempotency_key", "a\0b"),
        ("idempotency_key", "a\u202eb"),
        ("metadata.a", {"a": 1}),
        ("metadata", {"a": "x" * 4096}),
        ("metadata", {"a": "\0"}),
        ("metadata.tenant_id", {"tenant_id": "a/b"}),
        ("payload_base64", "aGk"),
        ("payload_base64", 1),
        ("content_type", "text/plain"),
        ("typo", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    assert fields_refused(json.dumps({"task_type": "a", field.partition(".")[0]: value}).encode()) == {field}


NUMBERS = [
    "delay_seconds",
    "timeout_seconds",
    "total_timeout_seconds",
    "lease_seconds",
    "max_retries",
    "max_attempts",
    "max_crashes",
    "retry_delay_seconds",
    "retry_factor",
    "retry_cap_seconds",
]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(
    "text",
    ['"NaN"', '"inf"', '"1"', "true", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "[]", str(2**64), "9" * 999],
)
def test_no_option_holds_what_is_no_finite_number(field: str, text: str) -> None:
    assert fields_refused(f'{{"task_type":"a","{field}":{text}}}'.encode()) <= {field, "body"}


@pytest.mark.parametrize(
    "pair",
    [
        {"scheduled_at": "2026-06-01T13:00:00Z", "delay_seconds": 1},
        {"max_retries": 3, "max_attempts": 3},
        {"task_id": "x", "idempotency_key": "x"},
        {"payload": 1, "payload_base64": "aGk="},
    ],
)
def test_two_ways_to_say_one_thing_must_not_disagree(pair: dict[str, Any]) -> None:
    assert fields_refused(json.dumps({"task_type": "a", **pair}).encode()) <= set(pair)


# --- ids (C42) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task_id",
    [
        "kg/s",
        "foo/cancel",
        "a%2Fb",
        "..",
        ".",
        "a b",
        "a+b",
        "é",
        "e\u0301",
        "a;b",
        "a?b",
        "x" * 129,
        "",
        "a\0",
        "key-1",
    ],
)
def test_an_id_outside_of_the_documented_characters_is_refused(task_id: str) -> None:
    assert fields_refused(json.dumps({"task_type": "a", "task_id": task_id}).encode()) == {"task_id"}


# --- payloads (C39-C41) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        "9007199254740993",
        str(2**63),
        str(2**64),
        str(-(2**63) - 1),
        "9" * JSON_INTEGER_DIGITS_MAX,
        "1.10",
        "-0",
        '"\\u0000"',
        '"\\uffff"',
        '"\\ud83e\\udd89"',
        '"\\\\u0000"',
        '"🦉 \u202e"',
        '{"a\\u0000": [ 1,2 ]}',
        '"' + "0" * 5000 + '"',
        "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX,
        '"' + "[" * 5000 + '"',
        "[" + "[],{}," * 500 + "0]",
    ],
)
def test_a_payload_is_kept_as_it_was_written(payload: str) -> None:
    body = f'{{"task_type":"a","payload":{payload}}}'.encode()
    assert parse_submission(body).spec(NOW).payload == payload.encode()


@pytest.mark.parametrize(
    "payload",
    [
        "NaN",
        "[Infinity]",
        '{"a":-Infinity}',
        "1e999",
        "[[-1e999]]",
        "9" * (JSON_INTEGER_DIGITS_MAX + 1),
        "9" * 4301,
        '"\\ud800"',
        '"\\udc00"',
        '"\\ud800\\u0041"',
        '{"\\ud800":1}',
        '"\\ud800" ',
        "[" * (JSON_DEPTH_MAX + 1) + "]" * (JSON_DEPTH_MAX + 1),
        '{"a":' * (JSON_DEPTH_MAX + 1) + "1" + "}" * (JSON_DEPTH_MAX + 1),
        "[" * 900 + "]" * 900,
        "[" * 20_000 + "]" * 20_000,
        "[" * 20_000,
        "01",
        "'a'",
        "",
    ],
)
def test_a_payload_that_not_every_reader_could_read_is_refused(payload: str) -> None:
    assert fields_refused(f'{{"task_type":"a","payload":{payload}}}'.encode()) <= {"payload", "body"}


def test_a_payload_of_invalid_utf8_is_refused() -> None:
    assert fields_refused(b'{"task_type":"a","payload":"\xff"}') == {"payload"}
    assert fields_refused(b'{"task_type":"a","payload":"\xed\xa0\x80"}') == {"payload"}


def test_bytes_travel_in_base64() -> None:
    spec = parsed(payload_base64="AP8=", content_type="image/png").spec(NOW)
    assert (spec.payload, spec.content_type) == (b"\x00\xff", "image/png")
    assert fields_refused(b'{"task_type":"a","payload_base64":"TmFO","content_type":"application/json"}') == {
        "payload_base64"
    }


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(_json_values)
def test_all_ordinary_json_is_accepted(value: Any) -> None:
    assert check_json(json.dumps(value).encode()) == value
    assert check_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\0123456789eE.-+nulNaN ud8', max_size=200).map(str.encode))
def test_any_bytes_are_accepted_or_refused_but_nothing_else(raw: bytes) -> None:
    try:
        value = check_json(raw)
    except NotAcceptable:
        return
    assert json.loads(raw) == value


# --- fingerprints (C22) -----------------------------------------------------------------------------------------------


def test_the_same_content_has_the_same_fingerprint() -> None:
    one = b'{"task_type":"a","payload":{"b":[1,{"y":2,"x":1}],"a":"\\u00e9"},"idempotency_key":"k"}'
    two = '{ "idempotency_key": "k", "payload": { "a": "é",\n "b": [1, {"x":1,"y":2}] }, "task_type": "a" }'.encode()
    assert parse_submission(one).fingerprint() == parse_submission(two).fingerprint()
    assert parsed(max_retries=3).fingerprint() == parsed(max_attempts=4).fingerprint() == parsed().fingerprint()
    assert parsed(priority="medium", payload=None).fingerprint() == parsed().fingerprint()
    offset = "2026-06-01T15:00:00+02:00"
    assert parsed(scheduled_at=offset).fingerprint() == parsed(scheduled_at="2026-06-01T13:00:00Z").fingerprint()


def test_other_content_has_another_fingerprint() -> None:
    submissions = [
        parsed(),
        parsed(payload=0),
        parsed(payload=False),
        parsed(payload=""),
        parsed(payload=[1, 2]),
        parsed(payload=[2, 1]),
        parsed(payload=9007199254740992),
        parsed(payload=9007199254740993),
        parsed(payload="bnVsbA=="),
        parsed(payload_base64="bnVsbA=="),
        parsed(delay_seconds=1),
        parsed(delay_seconds=0),
        parsed(scheduled_at="2026-06-01T13:00:00Z"),
        parsed(priority="low"),
        parsed(queue="q"),
        parsed(max_retries=1),
        parsed(retry_on=["A"]),
        parsed(give_up_on=["A"]),
        parsed(metadata={"a": "b"}),
    ]
    assert len({submission.fingerprint() for submission in submissions}) == len(submissions)


def test_a_fingerprint_stays_what_it_was() -> None:
    """Repeats come from clients that outlive a release; a change here makes conflicts of them."""
    assert parsed().fingerprint() == "e37a3313e039e283c4aa3ee318e168ae341877c64e29ae9c5bfb89fc9cf481bd"
    given = parsed(payload={"n": 1.5}, queue="mail", max_retries=1, delay_seconds=2, metadata={"tenant_id": "t"})
    assert given.fingerprint() == "b80a65a6dce1a1fbb23c164c71debaadbb24d7e3014d52ce57c49293a245c738"


# --- python, bulk, updates --------------------------------------------------------------------------------------------


def test_python_callers_meet_the_same_rules() -> None:
    at = datetime(2026, 6, 1, 13, tzinfo=UTC)
    submission = validated(Submission, {"task_type": "a", "payload": b"[1]", "scheduled_at": at})
    assert submission.spec(NOW).scheduled_at == NOW + 3_600_000_000
    for wrong in (
        {"scheduled_at": at.replace(tzinfo=None)},
        {"payload": b"NaN"},
        {"payload": [1]},
        {"delay_seconds": float("nan")},
        {"timeout_seconds": float("inf")},
        {"metadata": {"a": "\ud800"}},
        {"idempotency_key": "\ud800"},
    ):
        with pytest.raises(Refused):
            validated(Submission, {"task_type": "a", **wrong})


def test_a_bulk_body_is_refused_whole_or_item_by_item() -> None:
    items = split_bulk(b'{"tasks":[{"task_type":"a"},{"task_type":7},{}]}')
    assert [isinstance(parse_item(item), Submission) for item in items] == [True, False, False]
    too_many = b",".join([b"{}"] * (BULK_MAX + 1))
    for body in (
        b"[]",
        b'{"tasks":[]}',
        b'{"tasks":[1]}',
        b'{"tasks":{}}',
        b'{"tasks":[' + too_many + b"]}",
        b'{"x":1}',
    ):
        with pytest.raises(Refused):
            split_bulk(body)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"expected_version":1}',
        b'{"enabled":false,"priority":"low"}',
        b'{"priority":null}',
        b'{"metadata":null}',
        b'{"content_type":"text/plain"}',
        b'{"priority":"low","expected_version":true}',
        b'{"priority":"low","expected_version":0}',
        b'{"payload":1,"payload_base64":"aGk="}',
        b'{"task_type":"b"}',
    ],
)
def test_an_update_that_cannot_be_made_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        parse_update(body)


def test_an_update_tells_absent_from_null() -> None:
    assert not parse_update(b'{"priority":"low"}').is_rescheduled
    assert parse_update(b'{"scheduled_at":null}').is_rescheduled
    assert parse_update(b'{"priority":"low"}').new_payload is None
    assert parse_update(b'{"payload":null}').new_payload == (b"null", "application/json")
