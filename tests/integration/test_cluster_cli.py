"""The processes of a cluster, as their commands run them, over real brokers and a real database."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import pytest

from infra.kafka.topics import TopicAdmin
from tests.cassandra_stage import TIMEOUT_S, session
from tests.harness import Api, Child, eventually
from tests.services import cassandra_address, kafka_bootstrap, own_cluster
from tidewheel.configuration import load_settings

pytestmark = [pytest.mark.service("kafka"), pytest.mark.service("cassandra")]

APP = "tests.integration.served_app:app"
CRON = "/api/v1/cron-tasks"
SHARDS = 4
SECRET = "7hard-to-guess"


class Done(NamedTuple):
    """A command that ended."""

    code: int
    out: str
    err: str


def tidewheel(*arguments: str, **environ: str) -> Done:
    """Run a command to its end."""
    command = [sys.executable, "-m", "tidewheel", *arguments]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=100)
    return Done(done.returncode, done.stdout, done.stderr)


class Process(Child):
    """A process of the cluster, with its health at a free port."""

    def __init__(self, folder: Path, *command: str) -> None:
        super().__init__(["tidewheel", *command, "--json"], folder / f"{command[0]}-{id(self)}.txt")
        self.facts: dict[str, Any] = {}

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def asked(self, path: str) -> httpx.Response:
        """What it answers its operators."""
        return httpx.get(f"{self.facts['health']}{path}", timeout=10)

    def is_ready(self) -> bool:
        """Whether it says so."""
        return self.asked("/readyz").status_code == 200

    def metric(self, name: str) -> float:
        """A metric without labels."""
        (line,) = [line for line in self.asked("/metrics").text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])

    def stop(self) -> None:
        """End it in order."""
        self.send(signal.SIGTERM)
        assert self.ended() == 0, self.errors()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables of a cluster of its own, with topics and schema; in force for all processes that tests start."""
    host, port = cassandra_address()
    name = uuid4().hex[:12]
    environ = {
        "TIDEWHEEL_KAFKA_BOOTSTRAP": kafka_bootstrap(),
        "TIDEWHEEL_KAFKA_PREFIX": f"test-{name}.",
        "TIDEWHEEL_CASSANDRA_HOSTS": host,
        "TIDEWHEEL_CASSANDRA_PORT": str(port),
        "TIDEWHEEL_CASSANDRA_KEYSPACE": f"test_{name}",
        "TIDEWHEEL_SHARDS": str(SHARDS),
        "TIDEWHEEL_HEALTH_PORT": "0",
        "TIDEWHEEL_API_PORT": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environ.items():
            patch.setenv(variable, value)
        for command in ("topics", "schema"):
            applied = tidewheel(command, "apply")
            assert applied.code == 0, applied.err
        yield environ
        _remove(environ)


def _remove(environ: dict[str, str]) -> None:
    settings = load_settings(environ=environ).settings
    TopicAdmin(settings.of_kafka()).remove_all()
    with session(settings.of_cassandra()) as opened:
        opened.run(f"DROP KEYSPACE {settings.cassandra.keyspace}", TIMEOUT_S)


def _started(files: ExitStack, folder: Path, commands: Sequence[Sequence[str]]) -> list[Process]:
    processes = [files.enter_context(Process(folder, *command)) for command in commands]
    for process in processes:
        eventually(process.is_ready, f"{process.facts['process']} is ready")
    return processes


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_four_processes_are_a_scheduler(tmp_path: Path) -> None:
    with ExitStack() as files:
        processes = _started(files, tmp_path, [["scheduler"], ["projector"], ["api"], ["worker", APP]])
        scheduler, projector, surface, worker = processes
        assert scheduler.metric("tidewheel_shards_hosted") == SHARDS
        with Api(surface.facts["api"]) as api:
            task_id = api.submit("served.double", {"n": 21})
            found = _done(api, task_id)
            assert (found["result"], found["worker_id"]) == (42, worker.facts["worker_id"])
            assert api("GET", "/healthz").status_code == api("GET", "/readyz").status_code == 200
        eventually(lambda: projector.metric("tidewheel_view_lag_events") == 0, "the view has caught up")
        for process in processes:
            assert process.asked("/healthz").status_code == 200
            process.stop()


def _shown(api: Api, task_id: str) -> dict[str, Any]:
    """The task as an API process without shards shows it: not at all until the view has it."""
    answer = api("GET", f"/api/v1/tasks/{task_id}")
    assert answer.status_code in (200, 404), answer.text
    return dict(answer.json()) if answer.status_code == 200 else {}


def _done(api: Api, task_id: str) -> dict[str, Any]:
    """The task once the view shows that it succeeded."""

    def found() -> dict[str, Any] | None:
        task = _shown(api, task_id)
        return task if task.get("status") == "SUCCEEDED" else None

    return eventually(found, f"the end of {task_id} in the view")


@pytest.mark.usefixtures("cluster")
def test_nothing_waits_behind_a_worker_that_is_busy_for_long(tmp_path: Path) -> None:
    """It has half of the ready partitions: what comes there goes back, and to the one that is free."""
    with ExitStack() as files:
        processes = _started(files, tmp_path, [["scheduler"], ["projector"], ["api"], ["worker", APP, "--slots", "1"]])
        busy = processes[-1]
        with Api(processes[2].facts["api"]) as api:
            long = api.submit("served.wait", {})
            eventually(lambda: _shown(api, long).get("status") == "RUNNING", "the only slot is taken")
            (free,) = _started(files, tmp_path, [["worker", APP]])
            quick = [api.submit("served.double", {"n": number}) for number in range(60)]
            assert {_done(api, task_id)["worker_id"] for task_id in quick} == {free.facts["worker_id"]}
            shown = _shown(api, long)
            assert (shown["status"], shown["worker_id"]) == ("RUNNING", busy.facts["worker_id"])
            api("POST", f"/api/v1/tasks/{long}/cancel")
            eventually(lambda: _shown(api, long)["status"] == "CANCELLED", "it is told to stop")
        for process in (*processes, free):
            process.stop()


@pytest.mark.usefixtures("cluster")
def test_schedulers_share_the_shards_and_hand_them_over(tmp_path: Path) -> None:
    with ExitStack() as files:
        first, second = _started(files, tmp_path, [["scheduler"], ["scheduler"]])

        def hosted() -> tuple[float, float]:
            return first.metric("tidewheel_shards_hosted"), second.metric("tidewheel_shards_hosted")

        eventually(lambda: hosted() == (SHARDS / 2, SHARDS / 2), "each has half of them")
        first.stop()
        eventually(lambda: second.metric("tidewheel_shards_hosted") == SHARDS, "the other has all")
        eventually(second.is_ready, "all are loaded")
        assert second.metric("tidewheel_shards_hosted") == SHARDS
        second.stop()


@pytest.mark.usefixtures("cluster")
def test_all_of_it_runs_in_one_process_with_the_projector_as_its_child(tmp_path: Path) -> None:
    with Process(tmp_path, "all", APP) as process, Api(process.facts["api"]) as api:
        task_id = api.submit("served.double", {"n": 4})
        assert api.until(task_id)["result"] == 8  # a task that lives here is known here
        eventually(process.is_ready, "the projector is ready")
        listed = eventually(lambda: _listed(api, task_id), "the view has it")
        assert listed["status"] in ("SUCCEEDED", "RUNNING", "PENDING")
        child = _projector_of(process)
        process.stop()
        assert not child.exists()


def _listed(api: Api, task_id: str) -> dict[str, Any] | None:
    tasks = api("GET", "/api/v1/tasks").json()["tasks"]
    return next((task for task in tasks if task["task_id"] == task_id), None)


def _projector_of(process: Process) -> Path:
    """The folder under /proc of the child that projects."""
    threads = Path(f"/proc/{process.process.pid}/task").glob("*/children")
    pids = [pid for thread in threads for pid in thread.read_text().split()]
    found = [Path("/proc", pid) for pid in pids if b"projector_child" in Path("/proc", pid, "cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


@pytest.mark.usefixtures("cluster")
def test_schedules_run_in_a_cluster_and_after_a_kill_none_runs_twice(tmp_path: Path) -> None:
    made = {"name": "ticking", "task_type": "served.double", "payload": {"n": 3}, "every_seconds": 1}
    with ExitStack() as files:
        surface, process, _ = _started(files, tmp_path, [["api"], ["scheduler"], ["projector"]])
        api = files.enter_context(Api(surface.facts["api"]))
        cron_id = _ok(api("POST", CRON, json=made | {"overlap_policy": "allow"}), 201)["cron_id"]
        past = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T00:00:02Z"}
        runs = _ok(api("POST", f"{CRON}/{cron_id}/backfill", json=past))["runs"]
        assert runs == [f"{cron_id}.2026-01-01T00:00:0{second}Z" for second in range(3)]
        runs.append(_ok(api("POST", f"{CRON}/{cron_id}/trigger"))["task_id"])
        eventually(lambda: _fired(api, cron_id) >= 6, "nominal times came, and the view shows them")
        process.kill()
        _started(files, tmp_path, [["scheduler"], ["worker", APP]])
        before = _fired(api, cron_id)
        eventually(lambda: _fired(api, cron_id) > before, "it goes on with another owner")
        paused = _ok(api("POST", f"{CRON}/{cron_id}/pause"))
        runs += [run["task_id"] for run in _ok(api("GET", f"{CRON}/{cron_id}/runs?limit=500"))["runs"] if run["status"]]
        for task_id in runs:
            found = _done(api, task_id)
            assert (found["result"], found["attempts"]) == (6, 1)
        assert len(set(runs)) == len(runs) == paused["counts"]["fired"]
        assert _ok(api("POST", f"{CRON}/{cron_id}/backfill", json=past)) == {"runs": []}
        assert api("DELETE", f"{CRON}/{cron_id}").status_code == 204
        eventually(lambda: api("GET", f"{CRON}/{cron_id}").status_code == 404, "the view has let go of it")


def _fired(api: Api, cron_id: str) -> int:
    """How many runs a schedule has, as an API process without shards shows it."""
    return int(_ok(api("GET", f"{CRON}/{cron_id}"))["counts"]["fired"])


def _ok(answer: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json())


@pytest.mark.usefixtures("cluster")
def test_the_death_of_its_projector_is_the_end_of_all(tmp_path: Path) -> None:
    with Process(tmp_path, "all") as process:
        os.kill(int(_projector_of(process).name), signal.SIGKILL)
        assert process.ended() == 1
        assert "it was killed by SIGKILL" in process.errors()


@pytest.mark.usefixtures("cluster")
def test_a_process_waits_for_its_topics_alive_and_not_ready(tmp_path: Path, cluster: dict[str, str]) -> None:
    port = _free_port()
    prefix = f"{cluster['TIDEWHEEL_KAFKA_PREFIX']}later."
    environ = {"TIDEWHEEL_KAFKA_PREFIX": prefix, "TIDEWHEEL_HEALTH_PORT": str(port)}
    errors = tmp_path / "errors.txt"
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidewheel", "scheduler"],
            env=os.environ | environ,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        reasons = eventually(lambda: _reasons(address, "topics are missing"), "it waits")
        assert "tidewheel topics apply" in reasons
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert tidewheel("topics", "apply", TIDEWHEEL_KAFKA_PREFIX=prefix).code == 0
        eventually(lambda: httpx.get(f"{address}/readyz").status_code == 200, "it is ready")
        assert "waiting for what it needs" in errors.read_text()
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0


def _reasons(address: str, said: str) -> str | None:
    try:
        reasons = " ".join(httpx.get(f"{address}/readyz").json()["reasons"])
    except httpx.TransportError:
        return None
    return reasons if said in reasons else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_without_brokers_a_process_is_alive_and_not_ready_until_they_are_back(tmp_path: Path) -> None:
    with own_cluster(kafka=1) as services, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEWHEEL_KAFKA_BOOTSTRAP", services.kafka.bootstrap)
        patch.setenv("TIDEWHEEL_HEALTH_PORT", "0")
        assert tidewheel("topics", "apply").code == 0
        with Process(tmp_path, "scheduler") as scheduler:
            eventually(scheduler.is_ready, "it is ready")
            services.down()
            eventually(lambda: "kafka: Kafka: no broker of" in scheduler.asked("/readyz").text, "it is not ready")
            assert scheduler.asked("/healthz").status_code == 200
            services.up()
            eventually(scheduler.is_ready, "it is ready again")
            scheduler.stop()


# --- what keeps them from starting ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("command", "environ", "code", "said"),
    [
        (["scheduler"], {"TIDEWHEEL_KAFKA_BOOTSTRAP": "127.0.0.1:1"}, 3, "no broker of 127.0.0.1:1 answers"),
        (["scheduler"], {"TIDEWHEEL_KAFKA_PREFIX": "nobody."}, 3, "run `tidewheel topics apply`"),
        (["scheduler"], {"TIDEWHEEL_SHARDS": "5"}, 1, "set shards=4"),
        (["projector"], {"TIDEWHEEL_CASSANDRA_KEYSPACE": "nobody"}, 1, "tidewheel schema apply"),
        (["api"], {"TIDEWHEEL_CASSANDRA_KEYSPACE": "nobody"}, 1, "tidewheel schema apply"),
        (["api"], {"TIDEWHEEL_CASSANDRA_HOSTS": ""}, 2, "cassandra.hosts (TIDEWHEEL_CASSANDRA_HOSTS) is not set"),
        (["scheduler"], {"TIDEWHEEL_KAFKA_BOOTSTRAP": ""}, 2, "kafka.bootstrap (TIDEWHEEL_KAFKA_BOOTSTRAP)"),
        (["all"], {"TIDEWHEEL_SHRADS": "5"}, 2, "did you mean TIDEWHEEL_SHARDS?"),
        (["worker", "nothing.there:app"], {}, 1, "there is no module"),
        (["schema", "apply"], {"TIDEWHEEL_CASSANDRA_PORT": "1"}, 3, "do the nodes run?"),
    ],
)
def test_what_keeps_a_process_from_starting_is_said(
    command: list[str], environ: dict[str, str], code: int, said: str
) -> None:
    done = tidewheel(*command, TIDEWHEEL_STARTUP_TIMEOUT_S="0", **environ)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err


@pytest.mark.usefixtures("cluster")
def test_a_worker_with_a_folder_works_for_the_folder(tmp_path: Path) -> None:
    done = tidewheel("worker", APP, "--data", str(tmp_path))
    assert done.code == 3
    assert f"no scheduler answers at {tmp_path}" in done.err


# --- topics and settings ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_topics_are_planned_and_applied_with_an_exit_code_for_scripts() -> None:
    assert json.loads(tidewheel("topics", "plan", "--json").out)["is_done"] is True
    assert tidewheel("topics", "plan").code == 0
    other = {"TIDEWHEEL_KAFKA_EVENT_RETENTION_S": "7200"}
    planned = tidewheel("topics", "plan", **other)
    assert planned.code == 1
    assert "retention.ms: wanted 7200000, found 604800000" in planned.out
    assert "--allow-data-loss" in planned.out
    applied = tidewheel("topics", "apply", "--change-settings", "--json", **other)
    assert applied.code == 1
    assert [one["name"] for one in json.loads(applied.out)["differences"]] == ["retention.ms"]
    refused = tidewheel("topics", "apply", "--allow-data-loss", "task-events", **other)
    assert (refused.code, "'task-events' is no topic that would lose records" in refused.err) == (2, True)
    assert tidewheel("topics", "plan").code == 0  # nothing was changed


@pytest.mark.usefixtures("cluster")
def test_the_schema_may_be_applied_again() -> None:
    done = tidewheel("schema", "apply", "--json")
    assert done.code == 0
    report = json.loads(done.out)
    assert report["before"] == report["after"] > 0


def test_the_settings_in_force_are_shown_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'[kafka.sasl]\nmechanism = "PLAIN"\nusername = "u"\npassword = "{SECRET}"\n')
    environ = {"TIDEWHEEL_SHARDS": "7", "TIDEWHEEL_KAFKA_PROPERTIES": f"ssl.key.password={SECRET}"}
    shown = tidewheel("config", "show", "--config", str(file), "--json", **environ)
    assert SECRET not in shown.out + shown.err
    document = json.loads(shown.out)
    assert document["shards"] == {"value": 7, "from": "TIDEWHEEL_SHARDS"}
    assert document["kafka.sasl.username"] == {"value": "u", "from": f"kafka.sasl.username in {file}"}
    lines = tidewheel("config", "show", "--config", str(file), **environ).out
    assert SECRET not in lines
    assert "TIDEWHEEL_SHARDS" in lines
