"""Limits over REST and in code, over running engines: what is declared holds, and what is wrong is named."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas.messages import Status, Task
from tests.cases.test_surface import fields_of, problem
from tests.harness import Served, eventually, notes
from tests.unit.surface import Caller, Surface, fresh_name, is_out, ok
from tidewheel import App
from workers.errors import RegistrationError

LIMITS, TASKS, QUEUES = "/api/v1/limits", "/api/v1/tasks", "/api/v1/queues"


def submit(call: Caller, queue: str, **fields: Any) -> str:
    response = call("POST", TASKS, json={"task_type": "a", "queue": queue, **fields})
    assert response.status_code == 202, response.text
    return str(response.json()["task_id"])


def status(surface: Surface, task_id: str) -> Status | None:
    known = surface.runtime.live(task_id)
    return known.status if known is not None else None


def test_one_at_a_time_means_that_the_next_goes_when_the_first_has_ended(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 1, "where": {"queue": queue}})
    tasks = [submit(call, queue) for _ in range(3)]
    done: list[str] = []
    for _ in tasks:
        surface.until(lambda: any(is_out(surface, task_id) for task_id in tasks))
        (out,) = [task_id for task_id in tasks if is_out(surface, task_id)]
        surface.until(lambda: ok(call, "GET", f"{QUEUES}/{queue}")["throttled"] == 2 - len(done))
        surface.succeed(out)
        done.append(out)
    assert sorted(done) == sorted(tasks)


def test_a_limit_that_is_removed_lets_all_go(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 1, "period_seconds": 3600, "where": {"queue": queue}})
    tasks = [submit(call, queue) for _ in range(5)]
    surface.until(lambda: sum(is_out(surface, task_id) for task_id in tasks) == 1)
    view = ok(call, "GET", f"{QUEUES}/{queue}")
    assert call("DELETE", f"{LIMITS}/{name}").status_code == 204
    surface.until(lambda: all(is_out(surface, task_id) for task_id in tasks))
    assert view["backlog"] <= view["pending"]
    assert call("GET", f"{LIMITS}/{name}").status_code == 404


def test_a_limit_that_is_made_holds_for_what_waits_already(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    ok(call, "POST", f"{QUEUES}/{queue}/pause")
    surface.until(lambda: surface.runtime.policies.is_paused(queue))
    tasks = [submit(call, queue) for _ in range(5)]
    ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 2, "where": {"queue": queue}})
    surface.until(lambda: surface.runtime.policies.limit(name) is not None)
    ok(call, "POST", f"{QUEUES}/{queue}/resume")
    surface.until(lambda: ok(call, "GET", f"{QUEUES}/{queue}")["throttled"] == 3)
    assert sum(is_out(surface, task_id) for task_id in tasks) == 2


@pytest.mark.parametrize(("strategy", "loser"), [("reject", 1), ("cancel_oldest", 0)])
def test_where_nobody_waits_one_of_two_is_cancelled(surface: Surface, call: Caller, strategy: str, loser: int) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 1, "where": {"queue": queue}, "strategy": strategy})
    tasks = [submit(call, queue)]
    surface.until(lambda: is_out(surface, tasks[0]))
    tasks.append(submit(call, queue))
    surface.until(lambda: status(surface, tasks[loser]) is Status.CANCELLED)
    surface.until(lambda: is_out(surface, tasks[1 - loser]))
    view = call("GET", f"{TASKS}/{tasks[loser]}").json()
    assert f"no room under the limit {name}/" in str(view)


def test_a_task_that_a_limit_does_not_concern_is_not_held_up(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    body = {"count": 1, "key": "{metadata.account}", "where": {"queue": queue}}
    ok(call, "PUT", f"{LIMITS}/{name}", json=body)
    first, second = (submit(call, queue, metadata={"account": "a"}) for _ in range(2))
    other, without = submit(call, queue, metadata={"account": "b"}), submit(call, queue)
    surface.until(lambda: all(is_out(surface, task_id) for task_id in (other, without)))
    surface.until(lambda: is_out(surface, first) or is_out(surface, second))
    assert not (is_out(surface, first) and is_out(surface, second))


def test_a_limit_is_shown_as_it_was_set_and_the_same_again_changes_nothing(call: Caller) -> None:
    name = fresh_name("limit")
    body = {"count": 100, "period_seconds": 1, "key": "{tenant_id}", "where": {"task_type": "mail"}}
    made = ok(call, "PUT", f"{LIMITS}/{name}", json=body)
    assert made["burst"] == 10
    assert {field: made[field] for field in body} == body
    assert ok(call, "PUT", f"{LIMITS}/{name}", json=body | {"strategy": None}) == made
    assert made in ok(call, "GET", LIMITS)["limits"]
    assert ok(call, "GET", f"{LIMITS}/{name}") == made
    assert call("DELETE", f"{LIMITS}/{name}").status_code == 204
    assert call("DELETE", f"{LIMITS}/{name}").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "count"),
        ({"count": 0}, "count"),
        ({"count": "5"}, "count"),
        ({"count": True}, "count"),
        ({"count": 10**30}, "count"),
        ({"count": 1, "period_seconds": 0}, "period_seconds"),
        ({"count": 1, "period_seconds": 1e9}, "period_seconds"),
        ({"count": 1, "burst": 2}, "burst"),
        ({"count": 1, "key": "{payload}"}, "key"),
        ({"count": 1, "key": 5}, "key"),
        ({"count": 1, "where": {"payload": "x"}}, "where"),
        ({"count": 1, "where": {"queue": 5}}, "where.queue"),
        ({"count": 1, "strategy": "unknown"}, "strategy"),
        ({"count": 1, "strategy": "drop"}, "strategy"),
        ({"count": 1, "strategy": "reject", "period_seconds": 1}, "strategy"),
        ({"count": 1, "rate": 1}, "rate"),
    ],
)
def test_what_is_wrong_is_named(call: Caller, body: dict[str, Any], field: str) -> None:
    told = problem(call("PUT", f"{LIMITS}/l", json=body), 422)
    assert fields_of(told) == {field}


def test_a_name_that_is_none_is_refused(call: Caller) -> None:
    for method, path in (("GET", "a%20b"), ("DELETE", "a%20b"), ("PUT", "x" * 129)):
        assert fields_of(problem(call(method, f"{LIMITS}/{path}", json={"count": 1}), 422)) == {"name"}


# --- in code ----------------------------------------------------------------------------------------------------------


def test_handlers_of_one_key_never_run_at_once() -> None:
    """Of five accounts one attempt each at a time, with slots for all, through an engine's whole way."""
    app = App()
    app.limit("one-an-account", 1, key="{metadata.account}")
    lock, now, most = threading.Lock(), Counter[str](), Counter[str]()
    met = threading.Barrier(5, timeout=30)  # attempts of all accounts run together, so that slots are no limit

    @app.task(name="work")
    def work(account: str, is_first: bool) -> None:
        with lock:
            now[account] += 1
            most[account] = max(most[account], now[account])
        if is_first:
            met.wait()
        with lock:
            now[account] -= 1

    with app.embedded(slots=32):
        handles = [
            work.options(metadata={"account": f"a{number % 5}"}).submit(f"a{number % 5}", number < 5)
            for number in range(60)
        ]
        for handle in handles:
            handle.result(timeout=60)
    assert most == {f"a{number}": 1 for number in range(5)}


def test_an_app_declares_its_limits_and_the_engine_has_them() -> None:
    app = App()
    app.limit("mails", 100, per=1.0, key="{tenant_id}", where={"task_type": "mail"})
    app.limit("exports", 3, strategy="cancel_oldest")
    with app.embedded():
        assert [one.name for one in app.limits.all()] == ["exports", "mails"]
        assert app.limits.sync().unchanged == ("mails", "exports")
        app.limits.set("exports", count=5)
        assert app.limits.sync().changed == ("exports",)
        app.limits.remove("mails")
        assert app.limits.get("mails") is None
        assert app.limits.sync().created == ("mails",)


def test_a_declaration_that_is_wrong_is_told_where_it_stands() -> None:
    app = App()
    with pytest.raises(RegistrationError, match=r"limit 'mails': count is 0|count is 0"):
        app.limit("mails", 0)
    with pytest.raises(RegistrationError, match="key names the field 'payload'"):
        app.limit("mails", 1, key="{payload}")
    app.limit("mails", 1)
    with pytest.raises(RegistrationError, match="declared twice"):
        app.limit("mails", 2)


def test_tasks_are_not_lost_when_a_limited_one_is_cancelled(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 1, "where": {"queue": queue}})
    tasks = [submit(call, queue) for _ in range(3)]
    surface.until(lambda: sum(is_out(surface, task_id) for task_id in tasks) == 1)
    surface.until(lambda: ok(call, "GET", f"{QUEUES}/{queue}")["throttled"] == 2)
    (out,) = [task_id for task_id in tasks if is_out(surface, task_id)]
    waiting = [task_id for task_id in tasks if task_id != out]
    call("POST", f"{TASKS}/{waiting[0]}/cancel")
    surface.succeed(out)
    surface.until(lambda: is_out(surface, waiting[1]))
    known = surface.runtime.live(waiting[0])
    assert not isinstance(known, Task)


def test_a_limit_shows_what_waits_and_is_held_by_key(surface: Surface, call: Caller) -> None:
    queue, name = fresh_name("q"), fresh_name("limit")
    made = ok(call, "PUT", f"{LIMITS}/{name}", json={"count": 1, "key": "{metadata.to}", "where": {"queue": queue}})
    assert (made["waiting"], made["held"], made["keys"]) == (0, 0, [])
    for to in ("a", "a", "a", "b"):
        submit(call, queue, metadata={"to": to})
    wanted = [{"key": "a", "waiting": 2, "held": 1}, {"key": "b", "waiting": 0, "held": 1}]
    surface.until(lambda: ok(call, "GET", f"{LIMITS}/{name}")["keys"] == wanted)
    shown = ok(call, "GET", f"{LIMITS}/{name}")
    assert (shown["waiting"], shown["held"]) == (2, 2)


# --- over restarts ----------------------------------------------------------------------------------------------------


def test_a_pause_a_limit_and_who_holds_it_outlive_a_kill(tmp_path: Path) -> None:
    """One of two runs when all is killed: it holds its permit until its loss is known, and one begins again."""
    journal, gate = tmp_path / "journal.txt", tmp_path / "gate"
    with Served(tmp_path / "data", "tests.process_app:app", shard={"worker_timeout_us": 3_000_000}) as served:
        assert served.api("POST", f"{QUEUES}/closed/pause").status_code == 200
        assert served.api("PUT", f"{LIMITS}/one", json={"count": 1, "where": {"task_type": "hold"}}).status_code == 200
        payload = {"journal": str(journal), "gate": str(gate)}
        both = [served.api.submit("hold", payload) for _ in range(2)]
        eventually(lambda: notes(journal), "the start of one")
        served.send(signal.SIGKILL)
        served.ended()
        served.start()
        assert served.api("GET", f"{QUEUES}/closed").json()["is_paused"]
        assert [one["name"] for one in served.api("GET", LIMITS).json()["limits"]] == ["one"]
        eventually(lambda: len(notes(journal)) == 2, "another start")
        eventually(lambda: served.api("GET", f"{QUEUES}/default").json()["throttled"] == 1, "one that waits")
        gate.touch()
        for task_id in both:
            assert served.api.until(task_id)["status"] == "SUCCEEDED"
    begun = [line.split()[0] for line in notes(journal)]
    assert begun == ["begin", "begin", "end", "begin", "end"], "of the first one no end is known"
