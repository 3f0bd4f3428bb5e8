"""The commands for queues, tenants and limits as an operator types them, against an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import eventually, running
from tests.integration.test_cli import CommandLine
from tests.unit.surface import fresh_name
from tidewheel import App

app = App()
app.limit("declared", 7, key="{tenant_id}")
LONG = "a-queue-with-a-rather-long-name-for-all-mail"


@pytest.fixture(scope="module")
def tw() -> Iterator[CommandLine]:
    with running(App(), port=0) as engine:
        yield CommandLine(engine)


def waiting(tw: CommandLine, queue: str) -> int:
    found = tw("queues", "list", "--json").document["queues"]
    return int(next((one["pending"] for one in found if one["queue"] == queue), 0))


def test_a_paused_queue_tells_why_below_the_table(tw: CommandLine) -> None:
    ran = tw("queues", "pause", LONG, "--reason", "the mail server of the provider is down")
    assert (ran.code, "‖ paused" in ran.out) == (0, True)
    ran = tw("queues", "list")
    assert "a-queue-with" in ran.out
    assert f"{LONG} is paused: the mail server of the provider is down" in ran.err
    assert "● open" in tw("queues", "resume", LONG).out


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_no_figure_is_cut_and_no_line_is_longer_than_the_terminal(tw: CommandLine, columns: int) -> None:
    tw("queues", "pause", LONG)
    tw("queues", "drain", LONG)
    tw("tenants", "set", "a-tenant-with-a-rather-long-name", "--weight", "1000", "--pending-max", "1000000000")
    tw(
        "limits",
        "set",
        "a-limit-with-a-rather-long-name",
        "--count",
        "1000000",
        "--per",
        "1m",
        "--where",
        f"queue={LONG}",
    )
    ran = {name: tw(name, "list", COLUMNS=str(columns)) for name in ("queues", "tenants", "limits")}
    for one in ran.values():
        assert all(len(line) <= columns for line in one.out.splitlines()), one.out
        assert "…" not in one.out
    assert "HIGH/MEDIUM/LOW" in ran["queues"].out
    assert "≤ 1,000,000,000" in ran["tenants"].out
    tw("queues", "open", LONG)
    tw("queues", "resume", LONG)


def test_a_queue_is_drained_purged_and_opened_again(tw: CommandLine) -> None:
    queue = fresh_name("q")
    tw.submitted("work", "--queue", queue)
    tw.catch_up()
    assert "◌ drained" in tw("queues", "drain", queue).out
    refused = tw("submit", "work", "--queue", queue)
    assert refused.code == 1
    assert f"queue {queue} takes no new tasks: it is drained" in refused.err
    assert "cancelled in" in tw("queues", "purge", queue, "--confirm", queue).out
    eventually(lambda: waiting(tw, queue) == 0, "an empty queue")
    assert tw("queues", "open", queue).code == 0
    assert tw("submit", "work", "--queue", queue).code == 0


def test_a_tenant_gets_bounds_and_loses_them_again(tw: CommandLine) -> None:
    ran = tw("tenants", "set", "acme", "--weight", "3", "--submits-per-s", "10")
    assert ran.out.startswith("✔ acme: weight 3, submits/s at most 10, waiting as the settings say")
    found = tw("tenants", "set", "acme", "--weight", "default", "--submits-per-s", "default", "--json").document
    assert (found["weight"], found["submits_per_s"]) == (1, None)


def test_limits_are_set_shown_and_removed(tw: CommandLine) -> None:
    ran = tw("limits", "set", "mails", "--count", "100", "--per", "1s", "--key", "{tenant_id}", "--where", "queue=mail")
    assert ran.out == "✔ mails: 100 in 1 s, at most 10 at once\n"
    assert "mails" in tw("limits", "list").out
    (found,) = [one for one in tw("limits", "list", "--json").document["limits"] if one["name"] == "mails"]
    assert (found["count"], found["period_seconds"], found["where"]) == (100, 1.0, {"queue": "mail"})
    assert tw("limits", "remove", "mails").out == "✔ mails holds no more\n"
    ran = tw("limits", "remove", "mails")
    assert (ran.code, "tidewheel limits list" in ran.err) == (1, True)


def test_a_limit_is_shown_by_key(tw: CommandLine) -> None:
    tw("limits", "set", "one-each", "--count", "1", "--key", "{tenant_id}", "--where", "queue=shown")
    for _ in range(2):
        tw.submitted("work", "--queue", "shown", "--tenant", "acme")
    eventually(lambda: counts(tw, "one-each") == (1, 1), "one that waits, and one that may go")
    shown = tw("limits", "show", "one-each").out.splitlines()
    assert [line.split() for line in shown[-2:]] == [["KEY", "WAIT", "HELD"], ["acme", "1", "1"]]
    tw("limits", "remove", "one-each")
    gone = tw("limits", "show", "one-each")
    assert (gone.code, "tidewheel limits list" in gone.err) == (1, True)


def counts(tw: CommandLine, limit: str) -> tuple[int, int]:
    found = tw("limits", "show", limit, "--json").document
    return found["waiting"], found["held"]


def test_a_queue_gets_defaults_and_loses_them_again(tw: CommandLine) -> None:
    ran = tw("queues", "set", "slow", "--priority", "low", "--timeout", "5m", "--max-attempts", "3")
    said = " ".join(ran.out.split())
    assert said == "✔ slow: waiting as the settings say; by default priority low, timeout 300 s, attempts 3"
    ran = tw("queues", "set", "slow", "--priority", "default", "--timeout", "default")
    assert ran.out == "✔ slow: waiting as the settings say; by default attempts 3\n"


def test_a_wide_terminal_shows_what_is_due_soon(tw: CommandLine) -> None:
    tw("submit", "work", "--queue", "soon", "--delay", "50s")
    eventually(lambda: soon(tw) == 1, "one that is due soon")
    assert "SOON" in tw("queues", "list", COLUMNS="120").out
    assert "SOON" not in tw("queues", "list", COLUMNS="80").out


def soon(tw: CommandLine) -> int:
    found = tw("queues", "list", "--json").document["queues"]
    return sum(one["due_soon"] for one in found if one["queue"] == "soon")


def test_what_an_application_declares_is_synchronised(tw: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    reports = [tw("limits", "sync", f"{__name__}:app", "--json").document for _ in range(2)]
    assert [report["created"] for report in reports] == [["declared"], []]
    assert reports[1]["unchanged"] == ["declared"]


def test_unique_and_debounced_submissions(tw: CommandLine) -> None:
    key = fresh_name("key")
    same = {tw.submitted("work", "--queue", "shut", "--unique", key) for _ in range(2)}
    assert len(same) == 1
    late = tw("submit", "work", "--debounce", key, "--quiet", "1h", "--at-latest", "2h", "--json").document
    assert late["status"] == "SCHEDULED"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("queues", "pause", "a b"), "QUEUE"),
        (("queues", "purge", "mail", "--confirm", "male"), "--confirm 'male' is not the name of the queue"),
        (("queues", "set", "mail", "--pending-max", "many"), "--pending-max 'many' is no number"),
        (("queues", "set", "mail", "--pending-max", "0"), "--pending-max"),
        (("tenants", "set", "acme"), "at least one of --weight"),
        (("tenants", "set", "acme", "--weight", "1001"), "--weight"),
        (("limits", "set", "a b", "--count", "1"), "NAME"),
        (("limits", "set", "a", "--count", "0"), "--count is 0: 1 to 5,000"),
        (("limits", "set", "a", "--count", "1", "--per", "soon"), "--per"),
        (("limits", "set", "a", "--count", "1", "--key", "{payload}"), "task_type, queue, tenant_id, priority"),
        (("limits", "set", "a", "--count", "1", "--where", "queue"), "--where 'queue' has no name and value"),
        (("limits", "set", "a", "--count", "1", "--strategy", "drop"), "--strategy"),
        (("submit", "a", "--unique-for", "live"), "--unique KEY"),
        (("submit", "a", "--unique", "k", "--unique-for", "later"), "--unique-for"),
        (("submit", "a", "--debounce", "k"), "--quiet DURATION"),
        (("submit", "a", "--at-latest", "1h"), "with --debounce KEY"),
        (("submit", "a", "--debounce", "k", "--quiet", "1h", "--at-latest", "1m"), "--at-latest"),
        (("queues", "set", "mail", "--priority", "urgent"), "--priority"),
        (("queues", "set", "mail", "--timeout", "soon"), "--timeout"),
        (("queues", "set", "mail", "--max-attempts", "0"), "--max-attempts"),
        (("submit", "a", "--unique", "k", "--key", "i"), "unique"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(tw: CommandLine, arguments: tuple[str, ...], said: str) -> None:
    ran = tw(*arguments)
    assert ran.code in (1, 2)
    assert said in ran.err


@pytest.mark.parametrize(
    "arguments", [("queues", "list"), ("tenants", "list"), ("limits", "list"), ("limits", "set", "a", "--count", "1")]
)
def test_where_no_server_is_it_is_said(tw: CommandLine, arguments: tuple[str, ...]) -> None:
    ran = tw(*arguments, TIDEWHEEL_SERVER="http://127.0.0.1:9")
    assert ran.code == 3
    assert "there is no server at http://127.0.0.1:9" in ran.err
