"""One process of a service, in a folder of its own: `pid`, `log`, its settings and its data.

It outlives whoever started it. It is known by its pid together with its command line, which names the folder, so that
a pid that was given to another process since is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from infra.services.errors import ServiceFailed
from infra.services.probes import is_taken

STOP_S = 20.0  # from SIGTERM to SIGKILL
KILL_S = 10.0  # from SIGKILL to the end of the process
LOOK_EVERY_S = 0.05
LOG_LINES_SHOWN = 15
_LOG_BYTES_READ = 64 * 1024
# The pid is written before the program begins: nobody can be killed between the start and the note of it.
_LAUNCH = 'cd "$1" && echo $$ > pid.new && mv pid.new pid && shift && exec "$@" < /dev/null >> log 2>&1'


class Node(ABC):
    """One process of a service, which listens at host:port."""

    service: ClassVar[str]
    ready_s: ClassVar[float]  # from its start to its first answer, on a slow machine
    starts_alone: ClassVar[bool] = False  # the next node is started only when this one answers

    def __init__(self, name: str, folder: Path, host: str, port: int) -> None:
        self.name, self.folder, self.host, self.port = name, folder.absolute(), host, port
        self._mark = f"-Dtidewheel.node={self.folder}"
        self._child: int | None = None  # if this very process started it

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves; asks it, for at most some seconds."""

    def is_settled(self) -> bool:
        """Whether it sees all others of its service; asks it."""
        return self.answers()

    @abstractmethod
    def java(self) -> str:
        """The path of the Java that runs it. Raises ServiceMissing."""

    @abstractmethod
    def _arguments(self) -> list[str]:
        """Writes its settings, and gives the arguments of the Java that runs it."""

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports on which it listens."""
        return (self.port,)

    @property
    def pid(self) -> int | None:
        """Its process id; None if it does not run."""
        self._reap()
        if self._child is not None:
            return self._child
        try:
            pid = int((self.folder / "pid").read_text("ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return pid if f" {self._mark} " in command_line(pid) else None

    @property
    def log_tail(self) -> str:
        """The last lines that it wrote since its start."""
        try:
            with open(self.folder / "log", "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES_READ))
                return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES_SHOWN:])
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start it; nothing happens if it runs. Raises ServiceError. Follow with `wait`."""
        if self.pid is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_ports()
        arguments = self._arguments()
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder / "log", self.folder / "log.before")
        command = ["sh", "-c", _LAUNCH, "sh", str(self.folder), self.java(), self._mark, *arguments]
        self._child = os.posix_spawn("/bin/sh", command, os.environ, setsid=True)

    def wait(self, fact: Callable[[], bool] | None = None) -> None:
        """Wait until it answers, or until `fact`. Raises ServiceFailed after `ready_s`, or if it ends before."""
        fact = fact or self.answers
        give_up_at = time.monotonic() + self.ready_s
        while not fact():
            if self.pid is None:
                raise self._failed("ended while it started")
            if time.monotonic() > give_up_at:
                raise self._failed(f"runs, but was not ready within {self.ready_s:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def stop(self, within_s: float = STOP_S) -> None:
        """Ask it to end in order; kill it after `within_s`. Nothing happens if it does not run."""
        self.finish(self.tell_to_stop(), within_s)

    def tell_to_stop(self) -> int | None:
        """Ask it to end in order, without waiting for it; its pid, for `finish`."""
        pid = self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # if it is paused it would not hear of it
        return pid

    def finish(self, pid: int | None, within_s: float) -> None:
        """Wait until a process that was told to stop is gone; kill it after `within_s`."""
        if pid is not None and not self._is_gone(pid, within_s):
            self.kill()

    def kill(self) -> None:
        """End it as a crash would; wait until it is gone. Nothing happens if it does not run."""
        pid = self._signal(signal.SIGKILL)
        if pid is not None and not self._is_gone(pid, KILL_S):
            raise self._failed(f"is there {KILL_S:.0f} s after SIGKILL")

    def pause(self) -> None:
        """Let no code of it run until `resume`, as a long pause of the machine would."""
        pid = self._signal(signal.SIGSTOP)
        give_up_at = time.monotonic() + KILL_S
        while pid is not None and not stands_still(pid):  # a thread on another core may run on for a while
            if time.monotonic() > give_up_at:
                raise self._failed(f"runs on {KILL_S:.0f} s after SIGSTOP")
            time.sleep(LOOK_EVERY_S)

    def resume(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)

    def memory_bytes(self) -> int | None:
        """What it has in memory; None if it does not run."""
        pid = self.pid
        return None if pid is None else resident_bytes(pid)

    def _check_ports(self) -> None:
        taken = [str(port) for port in self.ports if is_taken(self.host, port)]
        if taken:
            raise ServiceFailed(
                f"{self.name} cannot have {self.host}:{', '.join(taken)}: another process listens there",
                hint="end that process, or choose other ports with --base-port and a --data folder of their own",
            )

    def _signal(self, number: signal.Signals) -> int | None:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def _is_gone(self, pid: int, within_s: float) -> bool:
        give_up_at = time.monotonic() + within_s
        while not has_ended(pid):
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _reap(self) -> None:
        if self._child is None:
            return
        try:
            if os.waitpid(self._child, os.WNOHANG)[0]:
                self._child = None
        except ChildProcessError:
            self._child = None

    def _failed(self, what: str) -> ServiceFailed:
        return ServiceFailed(
            f"{self.name} {what}; the end of {self.folder / 'log'}:",
            hint=f"read the log, then try again; if its data are broken and not needed, remove {self.folder}",
            log=self.log_tail,
        )


# --- processes --------------------------------------------------------------------------------------------------------


def command_line(pid: int) -> str:
    """The arguments of a process; empty if there is none, or if it has ended and nobody took notice of it."""
    if Path("/proc/self/cmdline").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    return _ps(pid, "command=")


def has_ended(pid: int) -> bool:
    """Whether a process is no more. A dying one has no arguments any longer, but still its ports."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return Path("/proc/self/stat").exists() or _ps(pid, "state=").strip()[:1] in ("", "Z")
    state, threads = after_name[0], int(after_name[17])
    return state in ("Z", "X") and threads <= 1  # its first thread may be done before the others are


def stands_still(pid: int) -> bool:
    """Whether no thread of a process runs, since it was stopped or has ended."""
    try:
        stats = [(task / "stat").read_text("ascii", "replace") for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return has_ended(pid) or _ps(pid, "state=").strip()[:1] == "T"
    return all(stat.rpartition(")")[2].split()[0] in ("T", "t", "Z", "X") for stat in stats)


def resident_bytes(pid: int) -> int | None:
    """The resident memory of a process; None if it has ended, or if this system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        kibibytes = _ps(pid, "rss=")
        return int(kibibytes) * 1024 if kibibytes else None


def _ps(pid: int, column: str) -> str:
    """What `ps` says of a process, on systems without /proc."""
    command = ["ps", "-ww", "-o", column, "-p", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=KILL_S).stdout.strip()
    except FileNotFoundError:
        return ""
