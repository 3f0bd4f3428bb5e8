"""What the demonstration submits, when, and what must have become of it at the end."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from examples import playground
from examples.playground import Files
from examples.sample_app import (
    FileHash,
    await_upload,
    compress,
    fetch_price,
    hash_file,
    import_catalog,
    import_orders,
    remind,
    scan,
    thumbnail,
    watch,
)
from tidewheel import TaskHandle

BULK, COMPRESSED, REMINDERS, CATALOGS, UNKNOWN_PRICES = 1_800, 150, 200, 3, 2
PUSH_S = 20.0  # how long tasks are submitted
REMIND_S_MAX = 8.0  # how much later a reminder may be due


class Step(NamedTuple):
    """Something to be done at a time, in seconds from the beginning."""

    at_s: float
    do: Callable[[], object]


class Workload:
    """A few thousand tasks of all types, over `PUSH_S` seconds."""

    def __init__(self, files: Files, service: str) -> None:
        self.catalogs: list[TaskHandle[int]] = []
        self.hashes: list[TaskHandle[FileHash]] = []
        self._files, self._service = files, service
        self._stop = threading.Event()

    def push(self) -> None:
        """Do all steps, each at its time; until the end, or `stop`."""
        begin = time.monotonic()
        for step in sorted(self._steps(), key=lambda step: step.at_s):
            if self._stop.wait(max(0.0, begin + step.at_s - time.monotonic())):
                return
            step.do()

    def stop(self) -> None:
        """Submit no more; from any thread."""
        self._stop.set()

    def _steps(self) -> list[Step]:
        files, prices = self._files, [f"{self._service}/prices/{n}" for n in range(playground.PRICES)]
        unknown = [f"{self._service}/prices/unknown-{n}" for n in range(UNKNOWN_PRICES)]
        return [
            Step(0, lambda: scan.submit(files.documents_folder)),
            *_spread(1, 15, thumbnail.submit, [*files.pictures, *files.broken_pictures]),
            *_spread(0, PUSH_S, import_orders.submit, [*files.orders, *files.hopeless_orders]),
            *_spread(0, PUSH_S - 3, fetch_price.submit, [*prices, *unknown]),
            *_spread(1, 4, self._import_catalog, range(CATALOGS)),
            *_spread(0, PUSH_S - REMIND_S_MAX, self._remind, range(REMINDERS)),
            *_spread(1, 2, await_upload.submit, files.uploads),
            *_spread(3, 12, _upload, files.uploads),
            Step(1, lambda: compress.submit(files.endless)),
            Step(4, lambda: compress.submit_many({"path": path} for path in files.documents[:COMPRESSED])),
            Step(9, self._submit_bulk),
            *_cancelled(0.5, 16, lambda: watch.submit(files.inbox)),
            *_cancelled(1, 14, lambda: remind.options(delay=3_600).submit(files.outbox, "never")),
        ]

    def _import_catalog(self, number: int) -> None:
        self.catalogs.append(import_catalog.submit(f"{self._service}/catalogs/{number}"))

    def _remind(self, number: int) -> None:
        delay = number * 7 % REMINDERS / REMINDERS * REMIND_S_MAX
        remind.options(delay=delay).submit(self._files.outbox, f"reminder {number}")

    def _submit_bulk(self) -> None:
        paths = (self._files.documents * 3)[:BULK]
        self.hashes.extend(hash_file.options(priority="low").submit_many({"path": path} for path in paths))

    # --- what must have become of it ----------------------------------------------------------------------------------

    def expected(self) -> Counter[tuple[str, str]]:
        """How many tasks there must be at the end, by type and status."""
        hashes = playground.DOCUMENTS + BULK + playground.UPLOADS
        return Counter(
            {
                ("scan", "SUCCEEDED"): 1,
                ("hash_file", "SUCCEEDED"): hashes,
                ("compress", "SUCCEEDED"): COMPRESSED,
                ("compress", "DEAD"): 1,
                ("thumbnail", "SUCCEEDED"): playground.PICTURES,
                ("thumbnail", "FAILED"): playground.BROKEN_PICTURES,
                ("import_orders", "SUCCEEDED"): playground.ORDERS,
                ("import_orders", "FAILED"): playground.HOPELESS_ORDERS,
                ("fetch_price", "SUCCEEDED"): playground.PRICES - playground.PRICES_DOWN,
                ("fetch_price", "DEAD"): playground.PRICES_DOWN,
                ("fetch_price", "FAILED"): UNKNOWN_PRICES,
                ("import_catalog", "SUCCEEDED"): CATALOGS,
                ("remind", "SUCCEEDED"): REMINDERS,
                ("remind", "CANCELLED"): 1,
                ("await_upload", "SUCCEEDED"): playground.UPLOADS,
                ("watch", "CANCELLED"): 1,
            }
        )

    def problems(self, counts: Counter[tuple[str, str]]) -> list[str]:
        """What is not as it must be: of the tasks, and of the work itself."""
        expected = self.expected()
        found = [
            f"{task_type}: {counts[task_type, status]} tasks are {status}, {expected[task_type, status]} expected"
            for task_type, status in sorted(expected.keys() | counts.keys())
            if counts[task_type, status] != expected[task_type, status]
        ]
        return found + [f"{what} is wrong" for what, is_right in self._work_done() if not is_right]

    def _work_done(self) -> Iterable[tuple[str, bool]]:
        files = self._files
        documents = [path.read_bytes() for path in files.documents]
        for handle, content in zip(self.hashes[:100], documents, strict=False):
            hashed = FileHash(hashlib.sha256(content).hexdigest(), len(content))
            yield f"the hash of task {handle.task_id}", handle.result(5) == hashed
        for path, content in zip(files.documents[:COMPRESSED], documents, strict=False):
            yield f"{path}.gz", gzip.decompress(Path(f"{path}.gz").read_bytes()) == content
        for path in files.pictures:
            yield f"the thumbnail of {path}", path.with_suffix(".128.jpg").exists()
        for catalog in self.catalogs:
            yield f"catalogue {catalog.task_id}", catalog.result(5) == playground.PAGES * playground.PAGE_SIZE
        notes = {path.read_text() for path in files.outbox.iterdir()}
        yield "the outbox", notes == {f"reminder {number}" for number in range(REMINDERS)}


def _spread(begin_s: float, end_s: float, do: Callable[[Any], object], arguments: Sequence[Any]) -> list[Step]:
    gap_s = (end_s - begin_s) / len(arguments)
    return [Step(begin_s + place * gap_s, partial(do, argument)) for place, argument in enumerate(arguments)]


def _cancelled(submit_s: float, cancel_s: float, submit: Callable[[], TaskHandle[Any]]) -> list[Step]:
    handles: list[TaskHandle[Any]] = []
    return [Step(submit_s, lambda: handles.append(submit())), Step(cancel_s, lambda: handles[0].cancel("enough"))]


def _upload(path: Path) -> None:
    unfinished = path.parent.with_name(path.name)  # beside the folder that is watched: it appears there whole
    unfinished.write_bytes(b"uploaded " * 1_000)
    unfinished.rename(path)
