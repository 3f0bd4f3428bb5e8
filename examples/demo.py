"""`python -m examples.demo`: a durable scheduler with real work going through it; ends by itself.

All that is shown comes from the REST API, as it would for any other client. The exit code is 0 if everything came out
as it must: each task in its expected status, each file written, each result right. State and logs are in `.demo/`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, TextIO

import httpx
from rich.console import Console
from rich.live import Live

from examples.playground import Files, busy_service
from examples.progress import Progress, Row
from examples.sample_app import app
from examples.workload import Workload
from tidewheel import Engine
from tidewheel.logs import configure_logs

FOLDER = Path(".demo")
DEADLINE_S = 50.0  # for all tasks together; about 20 s are needed
LOOK_S = 1.0  # between two looks at the API
LINE_S = 3.0  # between two lines where there is no terminal
SLOWEST = 5


def main() -> int:
    """Run the demonstration; gives the exit code."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    begin = time.monotonic()
    try:
        problems = _demonstrate(console)
    except KeyboardInterrupt:
        console.print("Interrupted, and stopped in order.")
        return 130
    for problem in problems:
        console.print(f"NOT AS EXPECTED: {problem}", style="bold red", markup=False)
    verdict = "Not as expected" if problems else "All as expected"
    console.print(f"\n{verdict}, after {time.monotonic() - begin:.0f} s.")
    return 1 if problems else 0


def _demonstrate(console: Console) -> list[str]:
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    files = Files(FOLDER / "files")
    files.make(Random(7))
    with (
        (FOLDER / "demo.log").open("w", encoding="utf-8") as log,
        busy_service() as service,
        _engine(log) as engine,
    ):
        console.print(f"The scheduler runs and keeps its state in {FOLDER}/data. Its API: {engine.address}/docs")
        try:
            with httpx.Client(base_url=engine.address, timeout=10) as client:
                return _run(console, engine, client, Workload(files, service))
        except KeyboardInterrupt:
            engine.hurry()
            raise


def _engine(log: TextIO) -> Engine:
    configure_logs("info", is_json=False, stream=log)
    return app.embedded(FOLDER / "data", port=0, app="examples.sample_app:app")


def _run(console: Console, engine: Engine, client: httpx.Client, workload: Workload) -> list[str]:
    progress = Progress(client)
    with ThreadPoolExecutor(1, "workload") as pool:
        pushing = pool.submit(workload.push)
        try:
            problems = _follow(console, engine, progress, pushing)
        finally:
            workload.stop()
    progress.look(at_all=True)
    _summary(console, client, progress)
    return problems or workload.problems(progress.counts())


# --- while it runs ----------------------------------------------------------------------------------------------------


def _follow(console: Console, engine: Engine, progress: Progress, pushing: Future[None]) -> list[str]:
    with _display(console, progress) as show:
        while not engine.wait(LOOK_S):
            is_pushed = pushing.done()
            if is_pushed and (error := pushing.exception()) is not None:
                return [f"not all could be submitted: {type(error).__name__}: {error}"]
            progress.look()
            show()
            if is_pushed and not progress.open:
                return []
            if progress.elapsed_s > DEADLINE_S:
                return [f"{row.task_type} {row.task_id} is still {row.status}" for row in progress.open[:10]]
    return [f"the engine stopped: {engine.failure}"]


@contextmanager
def _display(console: Console, progress: Progress) -> Iterator[Any]:
    if console.is_terminal:
        with Live(progress.table(), console=console, auto_refresh=False) as live:
            yield lambda: live.update(progress.table(), refresh=True)
        return
    shown_at = [-LINE_S]

    def show() -> None:
        if progress.elapsed_s - shown_at[0] >= LINE_S or not progress.open:
            shown_at[0] = progress.elapsed_s
            console.print(progress.line())

    yield show


# --- the summary ------------------------------------------------------------------------------------------------------


def _summary(console: Console, client: httpx.Client, progress: Progress) -> None:
    rows = list(progress.rows.values())
    if not console.is_terminal:
        console.print(progress.table())
    lines = [f"{len(rows):,} tasks came to their end. The slowest attempts:", *_slowest(rows)]
    lines += ["", "In the dead-letter queue, until somebody sends them back or discards them:", *_dead_letters(client)]
    fetched = [row for row in rows if row.task_type == "fetch_price" and row.status == "SUCCEEDED"]
    for row in sorted(fetched, key=lambda row: row.attempts)[-1:]:
        lines += ["", f"The life of {row.task_id} ({row.task_type}):", *_life(client, row.task_id)]
    console.print("\n".join(lines), markup=False)


def _slowest(rows: list[Row]) -> Iterator[str]:
    for row in sorted(rows, key=lambda row: row.duration_ms or 0, reverse=True)[:SLOWEST]:
        yield f"  {row.duration_ms or 0:>7,} ms  {row.task_type:14} {row.status}"


def _dead_letters(client: httpx.Client) -> Iterator[str]:
    for task in client.get("/api/v1/dlq").raise_for_status().json()["tasks"]:
        yield f"  {task['task_type']:14} after {task['attempts']} attempts: {_reason(task['error'])}"


def _life(client: httpx.Client, task_id: str) -> Iterator[str]:
    task = client.get(f"/api/v1/tasks/{task_id}").raise_for_status().json()
    yield f"  {_after(task, task['created_at'])}  accepted"
    for attempt in task["attempt_history"]:
        yield f"  {_after(task, attempt['started_at'])}  attempt {attempt['attempt']} starts"
        reason = f": {_reason(attempt['error'])}" if attempt["error"] else ""
        yield f"  {_after(task, attempt['finished_at'])}  attempt {attempt['attempt']} {attempt['outcome']}{reason}"
    yield f"  {_after(task, task['completed_at'])}  {task['status']}, with the result {task['result']}"


def _after(task: dict[str, Any], instant: str) -> str:
    passed = datetime.fromisoformat(instant) - datetime.fromisoformat(task["created_at"])
    return f"{passed / timedelta(milliseconds=1):>9,.1f} ms"


def _reason(error: dict[str, Any]) -> str:
    return str(error["message"]).partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
