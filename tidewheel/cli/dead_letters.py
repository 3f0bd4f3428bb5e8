"""The commands for dead letters."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from tidewheel.cli.arguments import All, Cursor, Debug, Json, Limit, Server, TaskIds
from tidewheel.cli.client import LOCAL, connected_to
from tidewheel.cli.edge import Exit, note, print_json
from tidewheel.cli.lazy import group
from tidewheel.cli.listing import check_limit, each, pages_of, show_pages
from tidewheel.terminal import console, plain, show, status_text


def list_dead_letters(
    queue: Annotated[str | None, typer.Option()] = None,
    limit: Limit = None,
    cursor: Cursor = None,
    every: All = False,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List dead letters, newest first, and why they died."""
    check_limit(limit, every)
    with connected_to(server) as connected:
        backend = connected.backend
        pages = pages_of(
            lambda size, at: connected.ask(backend.dead_letters(queue, limit=size, cursor=at)), limit, cursor, every
        )
        show_pages(pages, json, "no dead letters", is_dead_letters=True)
    return Exit.OK


def retry(task_ids: TaskIds, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Run dead or failed tasks again, with fresh attempts."""
    with connected_to(server) as connected:
        backend = connected.backend
        return each(task_ids, lambda i: connected.ask(backend.redrive(i), i), _redriven_text, json)


def _redriven_text(answer: Any) -> Text:
    return Text.assemble(status_text(answer.status), f"  {answer.task_id}")


def retry_all(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False)],
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run all dead letters of a queue again."""
    with connected_to(server) as connected:
        done = connected.ask(connected.backend.redrive_all(queue))
    if json:
        print_json(done)
        return Exit.OK
    skipped = f", {done.skipped:,} had changed meanwhile" if done.skipped else ""
    letters = "1 dead letter" if done.redriven == 1 else f"{done.redriven:,} dead letters"
    show(console(), Text(f"✔ sent back from {plain(queue)}: {letters}{skipped}"))
    if not done.is_complete:
        note("→ there are more: run it once more")
    return Exit.OK


def discard(task_ids: TaskIds, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Take dead tasks out of the dead-letter queue; they stay DEAD."""
    with connected_to(server) as connected:
        backend = connected.backend

        def act(task_id: str) -> dict[str, str]:
            connected.ask(backend.discard(task_id), task_id)
            return {"task_id": task_id}

        return each(task_ids, act, lambda done: Text(f"✔ discarded  {done['task_id']}"), json)


dlq = group(
    "Dead letters: tasks that used up their attempts.",
    {"list": list_dead_letters, "retry": retry, "retry-all": retry_all, "discard": discard},
)
