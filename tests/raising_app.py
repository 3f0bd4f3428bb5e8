"""Task types that raise what cannot travel, in every executor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from tidewheel import App

app = App()


class TwoArguments(Exception):
    """Its constructor takes two arguments, its base is told one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class Holding(Exception):
    """It holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock and a socket")
        self.lock, self.socket = threading.Lock(), socket.socket()
        self.socket.close()


class Speechless(Exception):
    """It cannot be put in words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class OfThisModule(ValueError):
    """Nobody but this module knows it."""


def _nested() -> NoReturn:
    error: Exception = ValueError("cause 0")
    for number in range(1, 50):
        try:
            raise KeyError(f"cause {number}") from error
        except KeyError as caught:
            error = caught
    raise OfThisModule("the last of fifty") from error


def _raise(error: BaseException) -> NoReturn:
    raise error


_MAKERS: dict[str, Callable[[], NoReturn]] = {
    "two arguments": lambda: _raise(TwoArguments("one", "two")),
    "holding": lambda: _raise(Holding()),
    "speechless": lambda: _raise(Speechless()),
    "nested": _nested,
    "huge": lambda: _raise(ConnectionError("x" * 10_000_000)),
    "exit": lambda: _raise(SystemExit(3)),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "of this module": lambda: _raise(OfThisModule("unknown elsewhere")),
}

# What is to be recorded: the type's name, and what is in the message.
ERRORS = {
    "two arguments": ("tests.raising_app.TwoArguments", "one"),
    "holding": ("tests.raising_app.Holding", "a lock and a socket"),
    "speechless": ("tests.raising_app.Speechless", "RuntimeError"),
    "nested": ("tests.raising_app.OfThisModule", "the last of fifty"),
    "huge": ("ConnectionError", "xxx"),
    "exit": ("SystemExit", "3"),
    "interrupt": ("KeyboardInterrupt", ""),
    "of this module": ("tests.raising_app.OfThisModule", "unknown elsewhere"),
}


@app.task(name="raise-async")
async def raise_async(kind: str) -> None:
    """Raise it on the event loop."""
    _MAKERS[kind]()


@app.task(name="raise-thread")
def raise_in_thread(kind: str) -> None:
    """Raise it in a thread."""
    _MAKERS[kind]()


@app.task(name="raise-process", executor="process")
def raise_in_process(kind: str) -> None:
    """Raise it in a process of the pool."""
    _MAKERS[kind]()


@app.task(name="fine-async")
async def fine_async() -> str:
    """Work as ever."""
    return "fine"


@app.task(name="fine-thread")
def fine_in_thread() -> str:
    """Work as ever."""
    return "fine"


@app.task(name="fine-process", executor="process")
def fine_in_process() -> str:
    """Work as ever."""
    return "fine"
