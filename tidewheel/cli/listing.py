"""Pages of tasks, and commands on several tasks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
from rich.text import Text

from scheduler.service import TaskList
from schemas.limits import PAGE_MAX
from tidewheel.cli.arguments import LIST_DEFAULT, task_id_of
from tidewheel.cli.edge import CommandError, Exit, complain, note, print_json, usage
from tidewheel.terminal import TaskTable, console, show

T = TypeVar("T")


class _Page(Protocol):
    @property
    def cursor(self) -> str | None: ...


P = TypeVar("P", bound=_Page)


def now_us() -> int:
    """Microseconds of Unix time, as this machine has it."""
    return time.time_ns() // 1000


def check_limit(limit: int | None, every: bool) -> None:
    """All pages have no limit. Raises CommandError."""
    if every and limit is not None:
        raise usage("--limit", "is given beside --all", "one of the two")


def pages_of(page: Callable[[int, str | None], P], limit: int | None, cursor: str | None, every: bool) -> Iterator[P]:
    """One page, or every one from `cursor` on."""
    size = PAGE_MAX if every else limit or LIST_DEFAULT
    while True:
        answer = page(size, cursor)
        yield answer
        cursor = answer.cursor
        if cursor is None or not every:
            return


def show_pages(pages: Iterator[TaskList], is_json: bool, if_empty: str, *, is_dead_letters: bool = False) -> None:
    """Print pages as they come, as one table or one JSON document."""
    first = next(pages)
    if is_json:
        _print_pages_json(first, pages)
        return
    if not first.tasks:
        note(if_empty)
        return
    out, last = console(), first
    table = TaskTable(out.width, first.tasks, is_dead_letters=is_dead_letters)
    show(out, table.header(), *table.rows(first.tasks, now_us()))
    for last in pages:
        if last.tasks:
            show(out, *table.rows(last.tasks, now_us()))
    if last.cursor is not None:
        note(f"→ more with --all, or with --cursor {last.cursor}")


def _print_pages_json(first: TaskList, others: Iterator[TaskList]) -> None:
    """One document, written page by page: a list of everything need not fit into memory."""
    following = next(others, None)
    if following is None:
        print_json(first)
        return
    sys.stdout.write('{"tasks":[' + _inner_json(first))
    page: TaskList | None = following
    while page is not None:
        if page.tasks:
            sys.stdout.write("," + _inner_json(page))
        page = next(others, None)
    sys.stdout.write('],"cursor":null}\n')


def _inner_json(page: TaskList) -> str:
    return msgspec.json.encode(page.tasks).decode()[1:-1]


def each(
    task_ids: Sequence[str],
    act: Callable[[str], T],
    text: Callable[[T], Text],
    is_json: bool,
    *,
    checked: Callable[[str], str] = task_id_of,
) -> int:
    """Do it to each task, or what else `checked` takes; a refusal of one does not keep the others from it."""
    task_ids = [checked(task_id) for task_id in task_ids]
    answers: list[T] = []
    code = Exit.OK
    for task_id in task_ids:
        try:
            answer = act(task_id)
        except CommandError as error:
            if not is_json and task_id not in error.detail and error.code is not Exit.UNREACHABLE:
                error.detail = f"{task_id}: {error.detail}"
            complain(error, is_json)
            code = error.code
            if code is Exit.UNREACHABLE:
                break  # the others would fare no better
            continue
        answers.append(answer)
        if not is_json:
            show(console(), text(answer))
    if is_json:
        print_json({"results": answers})
    return code
