"""C42: an id in a path is that task, and never another one; over a real server, which sees the path as it was sent.

Chosen: ids of A-Z a-z 0-9 _ . : - only, 1 to 128 characters, not `.` and `..`; every other one is refused at creation
(422), and unknown (404) wherever it is looked up.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.harness import TASKS, Api, running
from tidewheel import App, NotSubmitted, TaskNotFound
from tidewheel.http import HttpBackend
from tidewheel.settings import ClientSettings

STRANGE = [
    "kg/s",
    "foo/cancel",
    "foo/result",
    "a%2Fb",
    "a/b",
    ".",
    "..",
    "a b",
    "a+b",
    "\u00e9",
    "e\u0301",
    "a;b",
    "a?b",
    "a#b",
    "x" * 300,
    "",
]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running(local, port=0) as engine, Api(engine.address) as api:
        api.submit("t", task_id="foo", delay_seconds=3600)
        yield api


local = App()


@pytest.fixture(scope="module")
def callers(api: Api) -> Iterator[list[App]]:
    """In this process, and over HTTP."""
    remote = App()
    backend = HttpBackend(ClientSettings(server=str(api.client.base_url).rstrip("/"), timeout_s=15))
    remote.use(backend)
    yield [local, remote]
    backend.close()


def sent(api: Api, method: str, path: str) -> int:
    """The status of a request whose path no library has touched."""
    connection = http.client.HTTPConnection(api.client.base_url.host, api.client.base_url.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("content-length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("task_id", STRANGE, ids=ascii)
def test_a_strange_id_is_refused_at_creation_and_finds_no_task(api: Api, callers: list[App], task_id: str) -> None:
    answer = api("POST", TASKS, json={"task_type": "t", "task_id": task_id})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "task_id")
    encoded = quote(task_id, safe="")
    for method, path in (("GET", ""), ("POST", "/cancel"), ("PATCH", ""), ("GET", "/result")):
        assert sent(api, method, f"{TASKS}/{encoded}{path}") in (404, 405, 415, 422)
    for caller in callers:
        with pytest.raises(NotSubmitted, match="task_id"):
            caller.task(name=f"t{len(caller.registry)}")(_nothing).options(task_id=task_id).submit()
        for call in (caller.handle(task_id).info, caller.handle(task_id).cancel, caller.handle(task_id).status):
            with pytest.raises((TaskNotFound, NotSubmitted)):
                call()
    assert api.task("foo")["status"] == "SCHEDULED"


def _nothing() -> None: ...


@pytest.mark.parametrize(
    "path",
    [
        *("foo%2Fcancel", "foo%2fcancel", "foo%252Fcancel", "foo%3Fx", "foo%00", "foo;x/cancel", "foo%20/cancel"),
        *("foo//cancel", "./foo/cancel", "x/../foo/cancel", "foo%2E%2E/cancel", "%2E%2E/tasks/foo/cancel"),
        *("foo/cancel/", "f%6f%6f%2Fcancel"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH"])
def test_an_encoded_path_never_reaches_another_task(api: Api, method: str, path: str) -> None:
    assert sent(api, method, f"{TASKS}/{path}") in (404, 405, 415, 422)
    assert api.task("foo")["status"] == "SCHEDULED"


def test_an_id_is_the_same_however_it_is_encoded(api: Api) -> None:
    api.submit("t", task_id="a.b:c", delay_seconds=3600)
    assert sent(api, "GET", f"{TASKS}/a.b:c") == sent(api, "GET", f"{TASKS}/a%2Eb%3Ac") == 200
    assert sent(api, "POST", f"{TASKS}/a%2Eb%3Ac/cancel") == 200
    assert api.task("a.b:c")["status"] == "CANCELLED"


@pytest.mark.parametrize("value", STRANGE, ids=ascii)
def test_a_strange_filter_matches_nothing(api: Api, value: str) -> None:
    for name in ("queue", "task_type", "tenant_id"):
        answer = api("GET", TASKS, params={name: value})
        assert answer.status_code in (200, 422)
        assert not answer.json().get("tasks")
