"""What a process answers its operators, and how it hears of parts that die or stand still."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.api.health import Health, PartHealth
from schemas.errors import Fatal
from tests.harness import eventually
from tidewheel.operating import OperatingServer
from tidewheel.parts import Parts
from tidewheel.watched import WatchedLog

GOOD, BAD = PartHealth(name="a", is_ok=True), PartHealth(name="b", is_ok=False, detail="it stands still")


@dataclass
class Asked:
    """A process whose health the tests set."""

    liveness: Health = field(default_factory=lambda: Health(parts=(GOOD,)))
    readiness: Health = field(default_factory=lambda: Health(parts=(GOOD,)))
    address: str = ""

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=10)


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    server = OperatingServer(
        "127.0.0.1", 0, liveness=lambda: made.liveness, readiness=lambda: made.readiness, metrics=lambda: b"some 1.0\n"
    )
    made.address = f"http://{server.host}:{server.port}"
    yield made
    server.stop()


def test_alive_and_ready_are_two_things(asked: Asked) -> None:
    assert asked.get("/healthz").status_code == asked.get("/readyz").status_code == 200
    asked.readiness = Health(parts=(GOOD, BAD))
    answer = asked.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["b: it stands still"]
    assert asked.get("/healthz").json()["status"] == "ok"
    asked.liveness = Health(parts=(BAD,))
    assert asked.get("/healthz").status_code == 503


def test_metrics_are_text_and_other_paths_are_not_there(asked: Asked) -> None:
    answer = asked.get("/metrics?name=some")
    assert (answer.status_code, answer.text) == (200, "some 1.0\n")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert asked.get("/").status_code == 404


def test_a_port_that_is_taken_is_named(asked: Asked) -> None:
    port = int(asked.address.rpartition(":")[2])
    healthy = Health(parts=())
    with pytest.raises(Fatal, match=rf"port {port} .* choose another health\.port"):
        OperatingServer("127.0.0.1", port, liveness=lambda: healthy, readiness=lambda: healthy, metrics=lambda: b"")


def test_a_part_that_dies_is_the_failure_of_all_and_the_first_one_counts() -> None:
    parts = Parts("test")
    parts.run("well", lambda: None)
    parts.join("well", 10)
    assert not parts.wait(0)

    def fail() -> None:
        raise Fatal("the disk is full")

    parts.run("sick", fail)
    assert parts.wait(10)
    parts.run("sicker", lambda: [][0])
    parts.join_all(10)
    assert str(parts.failure) == "the disk is full"


def test_what_ends_in_the_end_has_not_failed() -> None:
    parts = Parts("test")
    parts.stopping.set()
    parts.run("sick", lambda: [][0])
    parts.join("sick", 10)
    assert not parts.wait(0)


def test_a_loop_that_does_not_poll_is_seen_from_outside() -> None:
    broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(1))
    log = WatchedLog(broker.connect())
    release = threading.Event()

    def loop() -> None:
        log.poll(0)
        release.wait(30)
        log.poll(0)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(loop)
        eventually(lambda: log.turned_s() > 0.05, "the loop stands still")
        release.set()
        eventually(lambda: log.turned_s() < 0.05, "the loop goes on")
    log.close()
    broker.close()
