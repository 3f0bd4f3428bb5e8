"""Real services for tests: started when a test first asks for them, once per run, gone when the run is.

    TIDEWHEEL_TEST_KAFKA=host:port   TIDEWHEEL_TEST_CASSANDRA=host:port   TIDEWHEEL_TEST_REGISTRY=URL

name services to use instead. Where none can be had (no Java, no Maven, no network) the test is skipped; with CI=true
it fails.

All processes of a run (pytest, or the workers of pytest-xdist) share a lock on a file in a folder of the run. A
**reaper**, a process of its own, waits until it has that lock alone: then the run is over, in whatever way it ended. It
kills every service in the folder, and removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

import pytest

from infra.services import BASE_PORT, PORTS_TAKEN, Cluster, Security, ServiceError, ServiceMissing, is_taken, locked

BASE_PORTS = range(19_100, 28_000, PORTS_TAKEN)  # apart from the default of `tidewheel services`
REAPER_S = 30.0  # from its start until it watches
WATCHES = b"watches\n"  # its first line
_ROOT = Path(__file__).resolve().parents[1]
_HELD: list[IO[str]] = []  # locks of this process, for as long as it lives


def kafka_bootstrap() -> str:
    """host:port of a broker of Kafka that all tests of this run share."""
    return os.environ.get("TIDEWHEEL_TEST_KAFKA") or _shared("kafka").kafka.bootstrap


def cassandra_address() -> tuple[str, int]:
    """Host and port of a node of Cassandra that all tests of this run share."""
    given = os.environ.get("TIDEWHEEL_TEST_CASSANDRA")
    if given:
        host, _, port = given.rpartition(":")
        return host, int(port)
    cassandra = _shared("cassandra").cassandra
    return cassandra.hosts[0], cassandra.port


def registry_url() -> str:
    """The URL of a schema registry that all tests of this run share."""
    given = os.environ.get("TIDEWHEEL_TEST_REGISTRY")
    return given or str(_shared("registry").addresses()["registry"])


@contextlib.contextmanager
def own_cluster(
    *,
    kafka: int = 0,
    cassandra: int = 0,
    registry: bool = False,
    security: Security | None = None,
    is_up: bool = True,
) -> Iterator[Cluster]:
    """Services for one test, which may start, kill, pause and stop them; gone at the end."""
    folder = _run_folder() / f"own-{uuid.uuid4().hex[:8]}"
    with reserved_ports() as base_port:
        cluster = Cluster(
            folder, kafka=kafka, cassandra=cassandra, registry=registry, base_port=base_port, security=security
        )
        require(cluster)
        try:
            if is_up:
                cluster.up()
            yield cluster
        finally:
            cluster.down(within_s=0)
            cluster.purge()


@contextlib.contextmanager
def reserved_ports() -> Iterator[int]:
    """From where on ports are free; no other run of this user takes them until the end of the block."""
    base_port, reservation = _reserved_ports()
    with reservation:
        yield base_port


def require(cluster: Cluster) -> None:
    """Skip the test, or let it fail in CI, if this machine cannot run the services of a cluster. Starts nothing."""
    try:
        cluster.fetch()
    except ServiceMissing as error:
        _give_up(str(error))


@functools.cache
def _shared(service: str) -> Cluster:
    """The cluster of one service; started by whichever process of the run comes first."""
    folder = _run_folder() / service
    with locked(folder.with_suffix(".lock")):
        cluster = Cluster.recorded(folder) or _new(folder, service)
        missing, failed = folder.with_suffix(".missing"), folder.with_suffix(".failed")
        if missing.exists():  # tried already: the others need not find out for themselves
            _give_up(missing.read_text("utf-8"))
        if failed.exists():
            pytest.fail(failed.read_text("utf-8"), pytrace=False)
        try:
            cluster.up()
        except ServiceMissing as error:
            missing.write_text(str(error), "utf-8")
            _give_up(str(error))
        except ServiceError as error:
            failed.write_text(str(error), "utf-8")
            raise
        return cluster


def _new(folder: Path, service: str) -> Cluster:
    base_port, reservation = _reserved_ports()
    _HELD.append(reservation)
    return _alone(service, folder, base_port)


def _alone(service: str, folder: Path, base_port: int = BASE_PORT) -> Cluster:
    """One node of one service."""
    return Cluster(
        folder,
        kafka=int(service == "kafka"),
        cassandra=int(service == "cassandra"),
        registry=service == "registry",
        base_port=base_port,
    )


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _reserved_ports() -> tuple[int, IO[str]]:
    for base_port in BASE_PORTS:
        reservation = open(Path(tempfile.gettempdir()) / f"tidewheel-{os.getuid()}-{base_port}.lock", "a")  # noqa: SIM115
        if _is_locked(reservation) and not any(is_taken("", base_port + n) for n in range(PORTS_TAKEN)):
            return base_port, reservation
        reservation.close()
    pytest.fail(f"no ports are free from {BASE_PORTS.start} to {BASE_PORTS.stop}")


def _is_locked(file: IO[str]) -> bool:
    """Whether we have the lock of a file now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the run and its reaper -------------------------------------------------------------------------------------------


@functools.cache
def _run_folder() -> Path:
    """The folder of all services of this run, which lasts until all processes of the run have ended."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder = Path(tempfile.gettempdir()) / f"tidewheel-tests-{run}"
    while not _joined(folder):
        pass  # a reaper was removing it, for all others had ended: begin anew
    with locked(folder / "start.lock"):
        if not _is_watched(folder):
            _start_reaper(folder)
    return folder


def _joined(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    users = open(folder / "users", "a")  # noqa: SIM115
    fcntl.flock(users, fcntl.LOCK_SH)
    try:
        is_there = os.path.samestat(os.fstat(users.fileno()), os.stat(folder / "users"))
    except FileNotFoundError:
        is_there = False
    if is_there:
        _HELD.append(users)
    else:
        users.close()
    return is_there


def _is_watched(folder: Path) -> bool:
    with open(folder / "reaper", "a") as reaper:
        return not _is_locked(reaper)


def _start_reaper(folder: Path) -> None:
    """It inherits nothing and is nobody's child for long: no signal to the run or its terminal reaches it."""
    command = [sys.executable, "-m", "tests.services", str(folder)]
    hears, says = os.pipe()
    with open(folder / "reaper.log", "a") as log, open(hears, "rb") as heard:
        try:
            os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, "PYTHONPATH": str(_ROOT)},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, says, 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )
        finally:
            os.close(says)  # the reaper alone has it now: if that dies, the pipe ends
        is_told = bool(select.select([heard], [], [], REAPER_S)[0]) and heard.readline() == WATCHES
    assert is_told, (folder / "reaper.log").read_text("utf-8")


def reap(folder: Path) -> None:
    """Wait until nobody uses the folder; then leave nothing of it."""
    with open(folder / "reaper", "a") as reaper, open(folder / "users", "a") as users:
        fcntl.flock(reaper, fcntl.LOCK_EX)
        os.write(1, WATCHES)
        fcntl.flock(users, fcntl.LOCK_EX)
        for record in folder.glob("*/services.json"):
            cluster = Cluster.recorded(record.parent)
            with contextlib.suppress(ServiceError):  # the others must end as well
                if cluster is not None:
                    cluster.down(within_s=0)
        shutil.rmtree(folder)


def fetch() -> None:
    """Fetch what the services need before the tests begin, which have deadlines; say what cannot be had."""
    for service in ("kafka", "cassandra", "registry"):
        cluster = _alone(service, Path(tempfile.gettempdir()) / "tidewheel-fetch")
        try:
            cluster.fetch(lambda name, step: print(f"{step} {name} …", flush=True))  # noqa: T201 (for whoever waits)
        except ServiceError as error:  # the tests that need it say the same, and fail or are skipped
            print(f"{service}: {error}")  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:] == ["fetch"]:
        fetch()
    else:
        reap(Path(sys.argv[1]))
