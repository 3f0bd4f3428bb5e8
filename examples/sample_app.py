"""A sample application: ordinary work, as tasks. `make demo` puts it to work, `make run` serves it.

    scan            walk a folder and submit a task for each file
    hash_file       hash a file
    compress        compress a file, in a process that is killed at its timeout
    thumbnail       make a small image; what is no image fails for good
    import_orders   read a CSV and report its bad rows; a hopeless file fails for good
    fetch_price     ask an HTTP service that is often busy: retried, then a dead letter
    import_catalog  read a service page by page; a retry goes on at the page it had reached
    remind          write a note, at a later time
    await_upload    look for a file; if it is not there yet, ask to be called again
    watch           hash what appears in a folder, until cancelled

A task runs at least once: its worker may die after the work and before the report. So each of these may run twice
without harm. Files are replaced whole, under names that follow from the task, and what a task submits has a key.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import os
import uuid
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import httpx
from PIL import Image, UnidentifiedImageError

from tidewheel import App, PermanentError, Retry, Snooze, current_context

FILES_MAX = 5_000  # of one scan, which submits them all at once

app = App()
web = httpx.Client(timeout=5)


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileHash:
    """What `hash_file` found."""

    sha256: str
    size: int


@app.task(name="hash_file", retry=Retry(give_up_on=[FileNotFoundError]))
def hash_file(path: Path) -> FileHash:
    """Hash a file. A plain function runs in a thread of the worker."""
    content = path.read_bytes()
    return FileHash(hashlib.sha256(content).hexdigest(), len(content))


@app.task(name="scan")
async def scan(folder: Path) -> int:
    """Submit a task for each file in a folder. A coroutine runs on the worker's event loop."""
    paths = await asyncio.to_thread(_files_in, folder)
    await asyncio.gather(*map(_submit_hash, paths))
    return len(paths)


@app.task(name="compress", executor="process", timeout=1.5, retry=Retry(2, delay=0.5))
def compress(path: Path) -> int:
    """Write `<path>.gz` and return its size. Whatever hangs in here is killed when the time is over."""
    compressed = gzip.compress(path.read_bytes(), mtime=0)
    _write(path.with_name(path.name + ".gz"), compressed)
    return len(compressed)


@app.task(name="thumbnail", queue="media", priority="low", retry=Retry(give_up_on=[UnidentifiedImageError]))
def thumbnail(image: Path, width: int = 128) -> Path:
    """Write a JPEG of at most `width` pixels beside the image."""
    content = io.BytesIO()
    with Image.open(image) as picture:
        picture.thumbnail((width, width))
        picture.convert("RGB").save(content, "JPEG")
    target = image.with_suffix(f".{width}.jpg")
    _write(target, content.getvalue())
    return target


@dataclass(frozen=True)
class ImportReport:
    """What `import_orders` took, and the rows that it could not take."""

    orders: int
    total: Decimal
    rejected: list[str]


@app.task(name="import_orders", retry=Retry(give_up_on=[UnicodeDecodeError]))
def import_orders(path: Path) -> ImportReport:
    """Add up the orders of a CSV file. Bad rows are reported; without its columns the file is hopeless."""
    amounts: list[Decimal] = []
    rejected: list[str] = []
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if not {"order", "amount"} <= set(rows.fieldnames or ()):
            raise PermanentError(f"{path.name} has the columns {rows.fieldnames}; order and amount are needed")
        for row in rows:
            try:
                amounts.append(Decimal(row["amount"]))
            except (InvalidOperation, TypeError):
                rejected.append(f"line {rows.line_num}: {row['amount']!r} is no amount")
    return ImportReport(len(amounts), sum(amounts, Decimal()), rejected)


# --- the web ----------------------------------------------------------------------------------------------------------


@app.task(name="fetch_price", queue="web", retry=Retry(4, delay=0.3, cap=2))
def fetch_price(url: str) -> float:
    """Ask for a price. A busy service (5xx, 429) is asked again, when it says if it does; 404 fails for good."""
    return float(web.get(url).raise_for_status().json()["price"])


@app.task(name="import_catalog", queue="web", retry=Retry(8, delay=0.3, backoff="fixed"))
def import_catalog(url: str) -> int:
    """Count the products of a service page by page. A later attempt goes on where the last one stopped."""
    context = current_context()
    page, products = context.last_checkpoint or (1, 0)
    while page is not None:
        answer = web.get(url, params={"page": page}).raise_for_status().json()
        page, products = answer["next_page"], products + len(answer["products"])
        context.checkpoint((page, products))
    return int(products)


# --- time -------------------------------------------------------------------------------------------------------------


@app.task(name="remind", priority="high")
def remind(outbox: Path, text: str) -> Path:
    """Write a note. Submit it with `delay=` or `at=`; its name is the task's, so that two runs make one note."""
    note = outbox / f"{current_context().task_id}.txt"
    _write(note, text.encode())
    return note


@app.task(name="await_upload")
def await_upload(path: Path) -> int:
    """The size of a file that somebody else writes. Waiting takes no slot and uses up no attempt."""
    if not path.exists():
        raise Snooze(1, f"{path.name} is not there yet")
    return path.stat().st_size


@app.task(name="watch")
async def watch(folder: Path) -> None:
    """Submit a task for each file that appears in a folder. Has no end: it is stopped by cancelling it."""
    while True:
        for path in await asyncio.to_thread(_files_in, folder):
            await _submit_hash(path)
        await asyncio.sleep(1)


# --- what they share --------------------------------------------------------------------------------------------------


async def _submit_hash(path: Path) -> None:
    """Submit a task for a file; once, however often the running task asks: under the same key it is the same task."""
    await hash_file.options(idempotency_key=f"{current_context().task_id} {path}").asubmit(path)


def _files_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(paths) > FILES_MAX:
        raise PermanentError(f"{folder} has {len(paths)} files; at most {FILES_MAX} are allowed")
    return paths


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole: whoever reads it sees the old content or the new one."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
