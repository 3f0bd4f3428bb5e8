"""`tidewheel dev` and `tidewheel worker` as processes: their start, their end, and what keeps them from starting."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from schemas.errors import Fatal
from tests.harness import Api, Child, eventually
from tidewheel import Engine, EngineSettings
from tidewheel.banner import Banner, example_payload
from tidewheel.loading import AppNotLoaded, add_folder_to_path, load_app
from tidewheel.logs import configure_logs
from tidewheel.serving import PartDied, serve
from tidewheel.terminal import console
from workers.registry import Handler

APP = "tests.integration.served_app:app"


class Dev(Child):
    """`tidewheel dev` over a folder, at a free port."""

    def __init__(self, data: Path, *arguments: str) -> None:
        command = ["tidewheel", "dev", *arguments, "--data", str(data), "--port", "0", "--json"]
        super().__init__(command, data.parent / "stderr.txt")
        self.facts: dict[str, Any] = {}

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.facts = facts


def _tidewheel(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidewheel", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _refusal(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, ""), err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_dev_runs_tasks_until_it_is_told_to_stop(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Dev(data, APP) as dev:
        port = dev.facts["api"].rpartition(":")[2]
        others = (
            _tidewheel("dev", "--data", str(data), "--port", "0"),
            _tidewheel("dev", "--data", str(tmp_path / "other"), "--port", port),
            _tidewheel("worker", APP, "--data", str(tmp_path / "nobody")),
        )
        with Api(dev.facts["api"]) as api:
            assert api.until(api.submit("served.double", {"n": 21}), "SUCCEEDED")["result"] == 42
            api.until(api.submit("served.leave-thread"), "SUCCEEDED")
        in_use, port_taken, nobody = (_refusal(other, code) for other, code in zip(others, (1, 1, 3), strict=True))
        assert f"{data} is in use by another process (process id {dev.process.pid})" in in_use
        assert f"port {port} " in port_taken
        assert "--port" in port_taken
        assert "nobody" in nobody
        dev.send(signal.SIGTERM)
        assert dev.ended() == 0
        assert "left-by-a-handler" in dev.errors()  # said, and left behind


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with Dev(tmp_path / "data", APP) as dev:
        with Api(dev.facts["api"]) as api:
            api.until(api.submit("served.block"), "RUNNING")
        dev.send(signal.SIGINT)
        eventually(lambda: "stopping" in dev.errors())
        dev.send(signal.SIGINT)
        assert dev.ended() == 0
        assert "hurrying" in dev.errors()


def test_a_further_worker_runs_what_dev_does_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Dev(data) as dev, Api(dev.facts["api"]) as api:
        assert (dev.facts["app"], dev.facts["has_worker"]) == (None, False)
        task_id = api.submit("served.double", {"n": 4})
        with Child(["tidewheel", "worker", APP, "--data", str(data), "--json"], tmp_path / "worker.txt") as worker:
            assert api.until(task_id, "SUCCEEDED")["result"] == 8
            worker.send(signal.SIGTERM)
            assert worker.ended() == 0
        dev.send(signal.SIGTERM)
        assert dev.ended() == 0


def test_a_part_that_dies_ends_it_with_the_reason() -> None:
    settings = EngineSettings(has_worker=False)
    with pytest.raises(PartDied, match=r"a part of the engine died: .+"):
        serve(None, settings, lambda engine: engine.broker.close())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- finding the application ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


_NEXT_TO_IT = "from tidewheel import App\nmine = App()\nnumber = 3\n"


@pytest.mark.parametrize(
    ("name", "source", "said", "hint"),
    [
        ("loaded_a", "", "'loaded_a' is no application: module:app", "perhaps loaded_a:app"),
        ("src/shop.py", "", "'src/shop.py' is no application", "perhaps src.shop:app"),
        ("not_there_at_all:app", "", "there is no module 'not_there_at_all'", "the folder that holds"),
        ("loaded_b:app", _NEXT_TO_IT, "loaded_b has no 'app'", "loaded_b:mine"),
        ("loaded_c:number", _NEXT_TO_IT, "loaded_c:number is of type int", "loaded_c:mine"),
        ("loaded_d:app", "", "loaded_d has no 'app'", "app = tidewheel.App()"),
        ("loaded_e:app", "def (", "SyntaxError: invalid syntax", None),
        ("loaded_f:app", "\n1 / 0", "ZeroDivisionError: division by zero (", None),
        ("loaded_g:app", "import not_installed", "No module named 'not_installed'", "install it"),
        ("loaded_h:app", "import sys\nsys.exit(3)", "SystemExit: 3", None),
        (
            "loaded_i:app",
            "from tidewheel import App\n@App().task(queue='a b')\ndef f(): ...\n",
            "queue 'a b' must be",
            None,
        ),
    ],
)
def test_an_app_that_cannot_be_had_is_explained(
    folder: Path, name: str, source: str, said: str, hint: str | None
) -> None:
    module = name.partition(":")[0]
    if "loaded" in module:
        (folder / f"{module}.py").write_text(source)
    with pytest.raises(AppNotLoaded) as caught:
        load_app(name)
    assert said in str(caught.value)
    assert (hint or "") in (caught.value.hint or "")
    if "Error" in said:
        assert f"{module}.py, line" in str(caught.value)


def test_the_folder_of_the_app_is_looked_in_first_unless_it_hides_behind_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_folder_to_path(tmp_path)
    assert sys.path[0] == str(tmp_path)
    (tmp_path / "scheduler.py").touch()
    with pytest.raises(AppNotLoaded, match=r"your own 'scheduler'"):
        add_folder_to_path(tmp_path)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_banner_tells_where_it_is_and_warns_of_the_open_door(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(None, EngineSettings(host="0.0.0.0", port=4711, data=Path("/somewhere")))
    console().print(Banner.of_engine(engine, None, None))
    said = capsys.readouterr().out
    for part in (
        "http://0.0.0.0:4711/docs",
        "/somewhere",
        "no MODULE:APP was named",
        "no authentication yet",
        "submit",
    ):
        assert part in said


def test_an_example_is_a_payload_that_the_handler_takes() -> None:
    def send(to: str, copies: int, urgent: bool, subject: str = "") -> None: ...

    handler = Handler(send, name="send")
    assert json.loads(example_payload(handler)) == {"to": "…", "copies": 1, "urgent": True}


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def _fail(error: Exception) -> None:
    payload = "secret"
    assert payload
    raise error


@pytest.mark.parametrize("is_json", [False, True])
def test_both_kinds_of_loggers_come_out_alike_and_tell_no_payloads(logged: io.StringIO, is_json: bool) -> None:
    configure_logs("info", is_json=is_json, stream=logged)
    for error in (ValueError("a bug"), Fatal("the disk is full")):
        try:
            _fail(error)
        except Exception as raised:
            logging.getLogger("a").error("stdlib %s", "told", exc_info=raised)
            structlog.get_logger("b").error("structlog told", exc_info=raised, count=3)
    said = logged.getvalue()
    assert "secret" not in said.replace('payload = "secret"', "")
    assert said.count("ValueError: a bug") == 2
    assert "Fatal: the disk is full" not in said  # its reason is for the message, its traceback for nobody
    if is_json:
        lines = [json.loads(line) for line in said.splitlines()]
        assert [line["event"] for line in lines] == ["stdlib told", "structlog told"] * 2
        assert {line["level"] for line in lines} == {"error"}
