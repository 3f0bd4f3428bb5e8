"""An application for the processes of a pool: handlers that behave, and handlers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

from workers.context import Context, current_context
from workers.registry import Function, Handler, Registry

registry = Registry()
BLOCKED_S = 60  # longer than any test waits

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


def _in_process(function: Function) -> Function:
    registry.add(Handler(function, name=function.__name__, executor="process"))
    return function


@_in_process
def double(n: int) -> int:
    return 2 * n


@_in_process
async def double_async(n: int) -> int:
    await asyncio.sleep(0)
    return 2 * n


@_in_process
def fail() -> None:
    raise SystemExit(3)


@_in_process
def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@_in_process
def exit_at_once() -> None:
    os._exit(3)


@_in_process
def busy(context: Context) -> None:
    context.checkpoint(os.getpid())
    while True:
        pass


@_in_process
def blocked(context: Context) -> None:
    context.checkpoint(os.getpid())
    time.sleep(BLOCKED_S)


@_in_process
def swallowing(context: Context) -> None:
    context.checkpoint(os.getpid())
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(BLOCKED_S)


@_in_process
def with_stubborn_child(context: Context) -> None:
    child = subprocess.Popen([sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    context.checkpoint(child.pid)
    time.sleep(BLOCKED_S)


@_in_process
async def waiting() -> None:
    current_context().checkpoint(os.getpid())
    await asyncio.sleep(BLOCKED_S)


@_in_process
def until_cancelled(context: Context) -> str:
    context.checkpoint(os.getpid())
    while not context.is_cancelled:
        time.sleep(0.001)
    return "stopped in order"
