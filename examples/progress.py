"""How the tasks of a scheduler stand, as its REST API tells it, and how that looks in a terminal."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import httpx
import msgspec
from rich import box
from rich.table import Table

PAGE = 500  # tasks in one answer
OVERLAP = timedelta(seconds=1)  # tasks may become visible a little out of order
COLUMNS = {  # statuses that are shown as one
    "waiting": ("SCHEDULED", "PENDING", "BLOCKED"),
    "running": ("RUNNING",),
    "retry": ("RETRYING",),
    "succeeded": ("SUCCEEDED",),
    "failed": ("FAILED",),
    "dead": ("DEAD",),
    "cancelled": ("CANCELLED",),
}


class Row(msgspec.Struct, frozen=True):
    """The part of a task in a list that is needed here."""

    task_id: str
    task_type: str
    status: str
    created_at: datetime
    scheduled_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    attempts: int
    duration_ms: int | None

    @property
    def start_latency_ms(self) -> float | None:
        """From when it could start to when it did; of tasks with one attempt, since only the last one is listed."""
        if self.started_at is None or self.attempts != 1:
            return None
        return max(0.0, (self.started_at - max(self.created_at, self.scheduled_at)) / timedelta(milliseconds=1))


class _Page(msgspec.Struct):
    tasks: list[Row]
    cursor: str | None


class Progress:
    """Follows all tasks of a scheduler. Each look asks only for those that may have changed."""

    def __init__(self, client: httpx.Client) -> None:
        self.rows: dict[str, Row] = {}
        self._client = client
        self._started = time.monotonic()
        self._completed: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    @property
    def open(self) -> list[Row]:
        """The tasks that have not ended."""
        return [row for row in self.rows.values() if row.completed_at is None]

    def look(self, *, at_all: bool = False) -> None:
        """Ask for the tasks from the oldest open one on, or for all."""
        since = min((row.created_at for row in self.open), default=None)
        if since is None and self.rows:
            since = max(row.created_at for row in self.rows.values())
        params: dict[str, Any] = {"limit": PAGE}
        if since is not None and not at_all:
            params["created_from"] = (since - OVERLAP).isoformat()
        while True:
            answer = self._client.get("/api/v1/tasks", params=params).raise_for_status()
            page = msgspec.json.decode(answer.content, type=_Page)
            self.rows.update((row.task_id, row) for row in page.tasks)
            if page.cursor is None:
                break
            params["cursor"] = page.cursor
        self._completed.append((self.elapsed_s, len(self.rows) - len(self.open)))

    @property
    def throughput(self) -> float:
        """Tasks that ended per second, over the last looks."""
        (begin, before), (end, after) = self._completed[-4:][0], self._completed[-1]
        return (after - before) / (end - begin) if end > begin else 0.0

    def counts(self) -> Counter[tuple[str, str]]:
        """How many tasks there are by type and status."""
        return Counter((row.task_type, row.status) for row in self.rows.values())

    # --- how it looks -------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """A line for each task type."""
        title = f"tidewheel · {self.elapsed_s:.0f} s · {self.throughput:,.0f} tasks/s"
        table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE)
        table.padding, table.show_edge = 0, False
        table.add_column("task type", no_wrap=True)
        for name in [*COLUMNS, "p50", "p99"]:
            table.add_column(name, justify="right", no_wrap=True)
        for task_type in sorted({row.task_type for row in self.rows.values()}):
            table.add_row(task_type, *self._cells([row for row in self.rows.values() if row.task_type == task_type]))
        table.add_section()
        table.add_row("all", *self._cells(list(self.rows.values())), style="bold")
        table.caption = "p50, p99: milliseconds from due to started; hash_file comes in bursts"
        return table

    def _cells(self, rows: list[Row]) -> list[str]:
        by_status = Counter(row.status for row in rows)
        counts = [sum(by_status[status] for status in statuses) for statuses in COLUMNS.values()]
        return [f"{count:,}" if count else "·" for count in counts] + [_ms(rows, 0.5), _ms(rows, 0.99)]

    def line(self) -> str:
        """The same in one line, for what is no terminal."""
        by_status = Counter(row.status for row in self.rows.values())
        counts = ", ".join(
            f"{sum(by_status[status] for status in statuses):,} {name}" for name, statuses in COLUMNS.items()
        )
        rows = list(self.rows.values())
        latency = f"start p50 {_ms(rows, 0.5)} ms, p99 {_ms(rows, 0.99)} ms"
        return f"{self.elapsed_s:5.1f} s: {counts}; {self.throughput:,.0f} tasks/s; {latency}"


def _ms(rows: list[Row], share: float) -> str:
    latencies = sorted(latency for row in rows if (latency := row.start_latency_ms) is not None)
    if not latencies:
        return "·"
    latency = latencies[min(len(latencies) - 1, int(share * len(latencies)))]
    return f"{latency:.1f}" if latency < 100 else f"{latency:,.0f}"
