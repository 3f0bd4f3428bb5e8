"""Children of a process of ours: started with a task, ended by the end of their standard input.

So a child neither outlives a parent that was killed, nor ends before the parent wants it to: signals go to the whole
group or service, and the child leaves them to the parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import structlog

from schemas.errors import Fatal

CLOSE_S = 5.0  # from the end of its input to the end of the child
NICE = 10  # readers may wait a little longer than tasks that are due: without it the p99 to a start is a third longer
TOLD = 3  # exit status of a child whose log says why it ended
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({task!r})"

_log = structlog.get_logger(__name__)


def spawn(what: str, module: str, task: bytes, *, has_output: bool = False) -> subprocess.Popen[bytes]:
    """Start `main(task)` of a module. Fatal: it could not be started."""
    path = [entry or os.getcwd() for entry in sys.path]
    command = [sys.executable, "-c", _BOOT.format(path=path, module=module, task=task)]
    output = subprocess.PIPE if has_output else None
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, start_new_session=True)
    except OSError as error:
        raise Fatal(f"{what} cannot be started ({error})") from error


def end(child: subprocess.Popen[bytes], what: str) -> None:
    """End a child, and wait for that; one that does not end in time is killed."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        _log.warning(f"{what} did not stop and is killed; it will go on from the last write of the view")
        child.kill()


def end_of(status: int) -> str:
    """What the exit status of a child says."""
    if status == TOLD:
        return "its log says why"
    return f"exit status {status}" if status >= 0 else f"it was killed by {signal.Signals(-status).name}"


# --- in the child -----------------------------------------------------------------------------------------------------


def begin(on_end: Callable[[], None]) -> None:
    """Leave signals to the parent, yield to it, and call `on_end`, from a thread, when it wants the child to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)

    def await_end() -> None:
        os.read(sys.stdin.fileno(), 1)
        on_end()

    threading.Thread(target=await_end, name="end", daemon=True).start()
