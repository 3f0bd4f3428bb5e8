"""The projector of `tidewheel all` as a child: folding events must not take the interpreter's lock from what decides.

The parent gives the child the file and the options that its own settings came from; the environment is the same, so
no secret passes between them. The child says every second how it is.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from scheduler.api.health import PartHealth
from schemas.errors import Fatal, TidewheelIOError
from tidewheel import child as children
from tidewheel.cluster import Abandoned, Node, Unreachable
from tidewheel.configuration import Loaded, load_settings
from tidewheel.logs import LogStyle, apply_style, style
from tidewheel.metrics import ViewMetrics
from tidewheel.parts import Parts
from tidewheel.roles import ProjectorRole, Role, Shared

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

WORD_S = 1.0  # between two words of the child
WATCH_S = 0.25  # between looks at the child
WORD_BYTES_MAX = 65_536
_WHAT = "the projector's process"

_log = structlog.get_logger(__name__)


class _Task(msgspec.Struct, frozen=True):
    """What a child is started with."""

    config: str | None
    overrides: dict[str, Any]
    logs: LogStyle


class _Word(msgspec.Struct, frozen=True):
    """How the child is."""

    alive: PartHealth
    ready: PartHealth
    lag: int | None


class ProjectorChildRole(Role):
    """Starts the child and watches it."""

    name = "projector"
    parts = ("projector",)

    def __init__(self, loaded: Loaded) -> None:
        """`loaded` is where the child finds its settings too."""
        super().__init__()
        config = None if loaded.config is None else str(loaded.config.absolute())
        self._task = _Task(config, dict(loaded.overrides), style())
        self._word: _Word | None = None
        self._word_at = time.monotonic()

    def _open(self, shared: Shared, files: ExitStack) -> None:
        """Nothing: the child connects by itself."""

    def start(self, parts: Parts) -> None:
        """Start the child."""
        parts.run(self.name, lambda: self._run(parts.stopping))

    def _run(self, stop: threading.Event) -> None:
        with children.spawn(_WHAT, __name__, msgspec.json.encode(self._task), has_output=True) as child:
            try:
                while not stop.is_set():
                    self._listen(child)
                    if child.poll() is not None:
                        raise Fatal(f"{_WHAT} ended: {children.end_of(child.returncode)}")
            finally:
                children.end(child, "the projector")

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        if not select.select([child.stdout], [], [], WATCH_S)[0]:
            return
        said = os.read(child.stdout.fileno(), WORD_BYTES_MAX)
        if not said:  # it is about to end
            child.wait(children.CLOSE_S)
            return
        with contextlib.suppress(msgspec.DecodeError):  # a word that was cut: the next one comes in a second
            self._word = msgspec.json.decode(said.rstrip(b"\n").rpartition(b"\n")[2], type=_Word)
            self._word_at = time.monotonic()

    def liveness(self, stalled_s: float) -> PartHealth:
        """What the child said last, unless it is silent."""
        silent_s = time.monotonic() - self._word_at
        if silent_s > stalled_s:
            return PartHealth(name=self.name, is_ok=False, detail=f"silent for {silent_s:.1f} s")
        return (
            self._word.alive if self._word is not None else PartHealth(name=self.name, is_ok=True, detail="it starts")
        )

    def readiness(self, stalled_s: float) -> PartHealth:
        """What the child said last."""
        alive = self.liveness(stalled_s)
        if self._word is None:
            return PartHealth(name=self.name, is_ok=False, detail=alive.detail)
        return self._word.ready if alive.is_ok else alive

    def collectors(self) -> tuple[Collector, ...]:
        """How far the view is behind."""
        return (ViewMetrics(lambda: None if self._word is None else self._word.lag),)


# --- in the child -----------------------------------------------------------------------------------------------------


def main(task: bytes) -> None:
    """Project until standard input ends."""
    given = msgspec.json.decode(task, type=_Task)
    apply_style(given.logs)
    settings = load_settings(None if given.config is None else Path(given.config), given.overrides).settings
    role = ProjectorRole()
    node = Node(settings.model_copy(update={"health": settings.health.model_copy(update={"port": None})}), [role])
    ended = threading.Event()

    def end() -> None:
        ended.set()
        node.abandon()

    children.begin(end)
    try:
        node.start()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and with it the child's reason to be
            _say(role, node, settings.health.stalled_s, ended)
    except Abandoned:
        return
    except (TidewheelIOError, Unreachable) as error:
        _log.error("the projector cannot go on", reason=str(error))
        sys.exit(children.TOLD)
    finally:
        node.stop(0)
    if node.failure is not None:
        sys.exit(children.TOLD)


def _say(role: ProjectorRole, node: Node, stalled_s: float, ended: threading.Event) -> None:
    while not ended.wait(WORD_S) and not node.wait(0):
        word = _Word(role.liveness(stalled_s), role.readiness(stalled_s), role.lag())
        os.write(sys.stdout.fileno(), msgspec.json.encode(word) + b"\n")
