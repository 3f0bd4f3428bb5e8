"""The client commands as a user types them, against an engine in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scheduler.ports import AttemptOutcome
from scheduler.task_view import AttemptView, ErrorView, TaskView
from schemas.messages import ErrorKind, Priority, Status
from tests.harness import eventually, running
from tidewheel import App, Engine, PermanentError
from tidewheel.cli import cli
from tidewheel.cli.arguments import LIST_DEFAULT
from tidewheel.http import HttpBackend
from tidewheel.settings import ClientSettings
from tidewheel.terminal import Card, TaskTable, about, plain, relative, short_span, span

app = App()
_released = threading.Event()


@app.task(name="shop.greet")
async def greet(name: str = "you") -> dict[str, str]:
    return {"hello": name}


@app.task(name="shop.again", queue="again")
async def again() -> None:
    """Makes the worker listen to a queue of its own for dead letters that are counted."""


@app.task(name="shop.refuse")
async def refuse(row: int = 7) -> None:
    raise PermanentError(f"row {row} has \x1b[31mno date")


@app.task(name="shop.fail")
async def fail() -> None:
    raise ConnectionError("smtp.example.org:25 refused the connection")


@app.task(name="shop.hold")
def hold() -> None:
    _released.wait(30)


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout, which must be one JSON document in one line."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """Stderr, which must be one JSON document in one line."""
        assert self.err.count("\n") == 1, self.err
        return json.loads(self.err)


class CommandLine:
    """Runs commands against an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.environment = {"TIDEWHEEL_SERVER": engine.address, "COLUMNS": "80", "TIDEWHEEL_DEBUG": ""}

    def __call__(self, *arguments: str, stdin: str | bytes = "", **environment: str | None) -> Ran:
        result = CliRunner().invoke(cli, list(arguments), stdin, env={**self.environment, **environment})
        assert isinstance(result.exception, SystemExit | None), result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    def catch_up(self) -> None:
        """Wait until lists show all that was accepted: the view may lag a little."""
        eventually(lambda: self.engine.view_lag() == 0, "the view caught up")

    def submitted(self, *arguments: str) -> str:
        """The id of a task that was submitted."""
        task_id = self("submit", *arguments, "--json").document["task_id"]
        assert isinstance(task_id, str)
        return task_id

    def dead(self, queue: str) -> str:
        """The id of a task that is in the dead-letter queue."""
        ran = self("submit", "shop.fail", "--queue", queue, "--max-retries", "0", "--wait", "20", "--json")
        assert (ran.code, ran.document["status"]) == (1, "DEAD")
        task_id = ran.document["task_id"]
        assert isinstance(task_id, str)
        return task_id


@pytest.fixture(scope="module")
def tw() -> Iterator[CommandLine]:
    _released.clear()
    with running(app, port=0) as engine:
        yield CommandLine(engine)
        _released.set()


# --- submit and status ------------------------------------------------------------------------------------------------


def test_a_task_is_submitted_waited_for_and_shown(tw: CommandLine) -> None:
    ran = tw("submit", "shop.greet", '{"name": "Ada"}', "--wait", "20", "--metadata", "order=42", "--tenant", "acme")
    assert (ran.code, ran.err) == (0, "")
    for said in ("✔ SUCCEEDED  shop.greet", "tenant acme", "order=42", '{"hello":"Ada"}', "1 of 4", "just now"):
        assert said in ran.out
    assert "\x1b" not in ran.out  # no colours where there is no terminal


def test_submitting_tells_the_id_and_what_to_do_next(tw: CommandLine) -> None:
    ran = tw("submit", "shop.greet", "--id", "order-1")
    assert ran.code == 0
    assert ran.out.startswith("✔ submitted order-1 ")
    assert "tidewheel status order-1 --wait 60" in ran.err
    assert tw("status", "order-1", "--wait", "20").code == 0


def test_the_next_command_names_the_server_if_this_one_did(tw: CommandLine) -> None:
    ran = tw("submit", "shop.greet", "--server", tw.engine.address, TIDEWHEEL_SERVER=None)
    assert ran.err.rstrip().endswith(f"--server {tw.engine.address}")


def test_every_option_of_submit_reaches_the_task(tw: CommandLine) -> None:
    task_id = tw.submitted(
        "shop.greet",
        '{"name": "Ada"}',
        *("--queue", "later", "--priority", "high", "--delay", "1h30m", "--key", "k1", "--timeout", "2.5s"),
        *("--max-retries", "6", "--metadata", "a=b=c", "--metadata", "d="),
    )
    task = tw("status", task_id, "--json").document
    assert (task["queue"], task["priority"], task["status"], task["payload"]) == (
        "later",
        "high",
        "SCHEDULED",
        {"name": "Ada"},
    )
    assert (task["idempotency_key"], task["max_attempts"]) == ("k1", 7)
    assert task["metadata"] == {"a": "b=c", "d": ""}


def test_the_payload_comes_from_stdin(tw: CommandLine) -> None:
    ran = tw("submit", "shop.greet", "-", "--wait", "20", "--json", stdin='{"name": "Zoë"}\n')
    assert ran.document["result"] == {"hello": "Zoë"}


def test_the_same_id_is_the_same_task_and_other_content_a_conflict(tw: CommandLine) -> None:
    first = tw("submit", "shop.greet", '{"name": "a"}', "--id", "once", "--json")
    assert tw("submit", "shop.greet", '{"name":"a"}', "--id", "once", "--json").document["task_id"] == "once"
    other = tw("submit", "shop.greet", '{"name": "b"}', "--id", "once")
    assert (first.code, other.code) == (0, 1)
    assert other.err.startswith("error: ")
    assert "choose another --id" in other.err


def test_waiting_for_what_fails_or_does_not_end_is_no_success(tw: CommandLine) -> None:
    failed = tw("submit", "shop.refuse", '{"row": 3}', "--wait", "20")
    assert failed.code == 1
    assert "✘ FAILED" in failed.out
    assert r"row 3 has \x1b[31mno date" in failed.out  # what a handler says cannot paint the terminal
    held = tw("submit", "shop.hold", "--wait", "50ms", "--json")
    assert (held.code, held.error["kind"]) == (1, "not-ended")
    assert held.document["task_id"] == held.error["task_id"]
    assert tw("status", failed.out.split("\n")[1]).code == 0  # only looking is


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_lists_and_cards_fit_the_terminal_and_show_ids_whole(tw: CommandLine, columns: int) -> None:
    task_id = tw.submitted("shop.greet", json.dumps({"name": "long " * 60}), "--tenant", "acme")
    dead = tw.dead("default")
    tw.catch_up()
    lines = (
        tw("list", COLUMNS=str(columns)).out.splitlines()
        + tw("dlq", "list", COLUMNS=str(columns)).out.splitlines()
        + tw("status", dead, COLUMNS=str(columns)).out.splitlines()
        + tw("status", task_id, COLUMNS=str(columns)).out.splitlines()
    )
    assert [line for line in lines if len(line) > columns and "→" not in line] == []
    assert [line for line in lines if line.startswith(task_id)]
    assert [line for line in lines if line.startswith(dead)]


def test_a_list_is_filtered_and_goes_on_at_its_cursor(tw: CommandLine) -> None:
    ids = [tw.submitted("shop.greet", "--queue", "paged", "--delay", "1h") for _ in range(3)]
    tw.catch_up()
    first = tw("list", "--queue", "paged", "--status", "scheduled", "--limit", "2", "--json").document
    rest = tw("list", "--queue", "paged", "--limit", "2", "--cursor", first["cursor"], "--json").document
    assert [task["task_id"] for task in first["tasks"] + rest["tasks"]] == ids[::-1]
    assert rest["cursor"] is None
    assert first["cursor"] in tw("list", "--queue", "paged", "--limit", "2").err
    assert tw("list", "--queue", "paged", "--type", "other").err == "no tasks that match\n"


def test_all_pages_are_one_document_and_one_table(tw: CommandLine) -> None:
    count = 503
    backend = HttpBackend(ClientSettings(server=tw.engine.address))
    backend.submit_many([{"task_type": "shop.greet", "queue": "many", "delay_seconds": 3600.0}] * count).run()
    backend.close()
    tw.catch_up()
    everything = tw("list", "--queue", "many", "--all", "--json").document
    assert len({task["task_id"] for task in everything["tasks"]}) == count
    assert everything["cursor"] is None
    assert len(tw("list", "--queue", "many", "--all").out.splitlines()) == count + 1
    assert len(tw("list", "--queue", "many").out.splitlines()) == LIST_DEFAULT + 1


def test_nothing_is_cut_where_there_is_no_terminal(tw: CommandLine) -> None:
    kind = "a.rather.long.name.of.a.task.type.that.would.not.fit.into.eighty.columns"
    tw.submitted(kind, "--queue", "piped", "--delay", "1h")
    tw.catch_up()
    assert kind in tw("list", "--queue", "piped", COLUMNS=None).out
    assert "…" in tw("list", "--queue", "piped").out


# --- cancel and dead letters ------------------------------------------------------------------------------------------


def test_cancelling_goes_on_after_a_refusal(tw: CommandLine) -> None:
    waiting = tw.submitted("shop.greet", "--delay", "1h")
    ran = tw("cancel", "no-such-task", waiting, "--reason", "not needed", "--json")
    assert ran.code == 1
    assert [result["status"] for result in ran.document["results"]] == ["CANCELLED"]
    assert (ran.error["kind"], ran.error["task_id"]) == ("not-found", "no-such-task")
    assert "not needed" in tw("status", waiting).out


def test_dead_letters_are_listed_sent_back_and_discarded(tw: CommandLine) -> None:
    first, second = tw.dead("again"), tw.dead("again")
    tw.catch_up()
    listed = tw("dlq", "list", "--queue", "again")
    assert "ConnectionError: smtp.example.org:25 refused the connection" in listed.out
    assert "tidewheel dlq retry" in tw("status", first).out
    assert tw("dlq", "retry", first).code == 0
    assert tw("status", first, "--wait", "20").code == 1
    assert tw("dlq", "discard", second).out == f"✔ discarded  {second}\n"
    refused = tw("dlq", "discard", second)
    assert (refused.code, refused.out) == (1, "")
    assert second in refused.err
    tw.catch_up()
    sent = tw("dlq", "retry-all", "again", "--json").document
    assert (sent["redriven"], sent["is_complete"]) == (1, True)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", "x", "photo.jpg"), ("PAYLOAD is not valid JSON", """'"photo.jpg"'""")),
        (("submit", "x", '{"a": NaN}'), ("PAYLOAD", "JSON")),
        (("submit", "x", "--delay", "soon"), ("--delay 'soon' is no duration", "1h30m")),
        (("submit", "x", "--at", "2026-06-01T12:00:00"), ("--at", "with its offset")),
        (("submit", "x", "--metadata", "a"), ("--metadata 'a'", "name=value")),
        (("submit", "x", "--tenant", "a", "--metadata", "tenant_id=b"), ("--tenant", "one of the two")),
        (("submit",), ("TASK_TYPE", "tidewheel submit --help")),
        (("status", "a/b"), ("TASK_ID 'a/b'", "A-Z a-z 0-9")),
        (("list", "--status", "done"), ("--status 'done'", "SUCCEEDED")),
        (("list", "--limit", "0"), ("--limit", "tidewheel list --help")),
        (("list", "--limit", "5", "--all"), ("--limit", "one of the two")),
        (("list", "--server", "localhost:8420"), ("--server 'localhost:8420'", "http://HOST:PORT")),
        (("list", "extra"), ("extra", "tidewheel list --help")),
        (("dev", "--grace", "9d"), ("--grace '9d'", "at most a day")),
        (("dev", "--port", "70000"), ("--port", "tidewheel dev --help")),
        (("lst",), ("lst", "tidewheel --help")),
    ],
    ids=" ".join,
)
def test_wrong_usage_names_the_argument_and_what_is_allowed(
    tw: CommandLine, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    ran = tw(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert all(part in ran.err for part in said), ran.err
    as_json = tw(*arguments, "--json")
    assert (as_json.code, as_json.out, as_json.error["exit_code"]) == (2, "", 2)


def test_what_the_server_refuses_is_told_by_the_option(tw: CommandLine) -> None:
    ran = tw("submit", "x", "--priority", "urgent", "--max-retries", "-1", "--queue", "a b")
    assert ran.code == 1
    assert all(option in ran.err for option in ("--priority", "--max-retries", "--queue"))
    document = tw("submit", "x", "--delay", "-1", "--json")
    assert document.code == 2
    assert tw("submit", "x", "--priority", "urgent", "--json").error["errors"][0]["field"] == "priority"


def test_an_unknown_task_is_said_to_be_unknown(tw: CommandLine) -> None:
    ran = tw("status", "nope")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: there is no task 'nope'\n   → tidewheel list shows the tasks there are\n"


def test_a_server_that_is_not_there_has_its_own_exit_code(tw: CommandLine) -> None:
    ran = tw("cancel", "a", "b", "--server", "http://127.0.0.1:9")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count("error: ") == 1
    assert "tidewheel dev" in ran.err
    assert tw("list", "--server", "http://127.0.0.1:9", "--json").error["kind"] == "unreachable"


def test_a_traceback_is_shown_only_if_it_is_asked_for(tw: CommandLine) -> None:
    assert "Traceback" not in tw("list", "--server", "http://127.0.0.1:9").err
    assert "Traceback" in tw("list", "--server", "http://127.0.0.1:9", "--debug").err


def test_a_payload_that_is_too_large_is_not_sent(tw: CommandLine) -> None:
    ran = tw("submit", "x", "-", stdin='"' + "a" * 600_000 + '"')
    assert ran.code == 1
    assert "PAYLOAD has more than" in ran.err


def test_the_version_is_told(tw: CommandLine) -> None:
    assert tw("version").out.startswith("tidewheel ")
    assert set(tw("version", "--json").document) == {"version", "python"}


# --- the look ---------------------------------------------------------------------------------------------------------


def test_durations_are_readable() -> None:
    assert [span(us) for us in (0, 12_000, 3_200_000, 63_000_000, 7_500_000_000, 86_400_000_000)] == [
        "0 ms",
        "12 ms",
        "3.2 s",
        "1 min 3 s",
        "2 h 5 min",
        "1 d",
    ]
    assert [about(us) for us in (900_000, 59_900_000, 60_000_000)] == ["0 s", "59 s", "1 min"]
    assert [short_span(s * 1_000_000) for s in (59, 3_599, 7_199, 36_000, 86_400 * 45)] == [
        "59 s",
        "59 min",
        "2 h",
        "10 h",
        "45 d",
    ]
    now = 1_000_000_000
    assert relative("1970-01-01T00:16:39.500000Z", now) == "just now"
    assert relative("1970-01-01T00:16:00.000000Z", now) == "40 s ago"
    assert relative("1970-01-01T00:17:40.000000Z", now) == "in 1 min"


def test_text_from_tasks_cannot_command_the_terminal() -> None:
    assert plain("a\x1b]0;x\x07\r\nb\tc\u202e") == "a\\x1b]0;x\\x07\nb    c\\u202e"


def _view(**fields: Any) -> TaskView:
    error = ErrorView(kind=ErrorKind.RAISED, type="builtins.OSError", message="no", traceback="line\n" * 40)
    attempt = AttemptView(
        attempt=1,
        worker_id="w",
        started_at="2026-06-01T12:00:00.000000Z",
        finished_at="2026-06-01T12:00:01.000000Z",
        outcome=AttemptOutcome.FAILED,
        error=error,
    )
    given: dict[str, Any] = dict.fromkeys(TaskView.__struct_fields__)
    given |= {
        "task_id": "t",
        "task_type": "shop.send",
        "status": Status.DEAD,
        "priority": Priority.LOW,
        "created_at": "2026-06-01T12:00:00.000000Z",
        "attempts": 30,
        "metadata": {},
        "payload": b"null",
        "result": b"null",
        "error": error,
        "attempt_history": tuple(attempt for _ in range(30)),
    }
    return TaskView(**{**given, **fields})


def _drawn(card: Card) -> str:
    out = Console(width=80, color_system=None, file=None)
    with out.capture() as capture:
        out.print(card)
    return capture.get()


def test_a_card_is_short_unless_all_is_asked_for() -> None:
    card = Card(task=_view(payload=b'"' + b"x" * 5_000 + b'"'), now=1_800_000_000_000_000)
    short = _drawn(card)
    full = _drawn(Card(task=card.task, now=card.now, is_full=True))
    assert len(short.splitlines()) < 60
    assert "20 earlier attempts are left out" in short
    assert full.count("failed") == 30
    assert full.count("x") == 5_000
    assert full.count("the same error") == 29


@pytest.mark.parametrize("status", list(Status))
def test_every_status_can_be_drawn(status: Status) -> None:
    task = _view(status=status, next_run_at="2030-01-01T00:00:00.000000Z", has_result=False, is_partial=True)
    assert str(status) in _drawn(Card(task=task, now=1_800_000_000_000_000))
    table = TaskTable(80, [task])
    assert all(str(status) in line.plain for line in table.rows([task], 1_800_000_000_000_000))


def test_an_id_that_is_too_long_has_a_line_of_its_own() -> None:
    task = _view(task_id="i" * 128)
    (row,) = TaskTable(80, [task]).rows([task], 1_800_000_000_000_000)
    first, second = row.plain.split("\n")
    assert first == "i" * 128
    assert second.startswith(" " * 36)
