"""What the demonstration works on: a folder of generated files, and a small HTTP service that is often busy."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

from PIL import Image

DOCUMENTS, PICTURES, BROKEN_PICTURES, ORDERS, HOPELESS_ORDERS, UPLOADS = 600, 80, 2, 60, 3, 4
PRICES, PRICES_DOWN = 400, 3  # of the prices, the first ones are never there
PAGES, PAGE_SIZE = 12, 25  # of each catalogue

_WORDS = ("tide", "wheel", "shard", "event", "epoch", "offset", "lease", "report", "attempt", "queue", "worker")


class Files:
    """The paths in the demonstration's folder."""

    def __init__(self, folder: Path) -> None:
        self.documents_folder, self.inbox, self.outbox = folder / "documents", folder / "inbox", folder / "outbox"
        self.documents = [self.documents_folder / f"{n % 6}" / f"{n}.txt" for n in range(DOCUMENTS)]
        self.pictures = [folder / "pictures" / f"{n}.png" for n in range(PICTURES)]
        self.broken_pictures = [folder / "pictures" / f"broken-{n}.png" for n in range(BROKEN_PICTURES)]
        self.orders = [folder / "orders" / f"{n}.csv" for n in range(ORDERS)]
        self.hopeless_orders = [folder / "orders" / f"hopeless-{n}.csv" for n in range(HOPELESS_ORDERS)]
        self.uploads = [self.inbox / f"{n}.bin" for n in range(UPLOADS)]
        self.endless = folder / "endless.pipe"

    def make(self, rng: Random) -> None:
        """Write all that is there from the beginning: the uploads come later."""
        paths = [*self.documents, *self.pictures, *self.orders, self.endless]
        for folder in {path.parent for path in paths} | {self.inbox, self.outbox}:
            folder.mkdir(parents=True, exist_ok=True)
        for path in self.documents:
            path.write_text(" ".join(rng.choices(_WORDS, k=rng.randint(200, 2_000))))
        for number, path in enumerate(self.pictures):
            Image.effect_mandelbrot((320, 240), (-2 + number / 100, -1.2, 0.6, 1.2), 40).save(path)
        for path in self.broken_pictures:
            path.write_bytes(b"this is no image")
        for path in self.orders:
            amounts = [f"{rng.uniform(1, 500):.2f}" if rng.random() < 0.97 else "n/a" for _ in range(200)]
            path.write_text("order,amount\n" + "".join(f"{n},{amount}\n" for n, amount in enumerate(amounts)))
        for path in self.hopeless_orders:
            path.write_text("name;colour\ntide;blue\n")
        os.mkfifo(self.endless)  # to read it is to wait for ever: nobody writes to it


class _Service(ThreadingHTTPServer):
    """Answers 503 to the first requests for every fourth price and for some pages, and to all for the first prices."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def answer(self, target: str) -> tuple[int, dict[str, Any]]:
        """Status and content for a request."""
        with self._lock:
            self._asked[target] += 1
            times = self._asked[target]
        url = urlsplit(target)
        kind, _, name = url.path.strip("/").partition("/")
        if kind == "catalogs":
            return self._page(int(parse_qs(url.query)["page"][0]), times)
        number = int(name) if name.isdigit() else PRICES
        if number >= PRICES:
            return 404, {"error": f"nobody knows a price of {name}"}
        if number < PRICES_DOWN or (number % 4 == 0 and times <= 1 + number % 3):
            return 503, {"error": "busy"}
        return 200, {"price": number * 1.25}

    def _page(self, page: int, times: int) -> tuple[int, dict[str, Any]]:
        if page in (4, 9) and times == 1:
            return 503, {"error": "busy"}
        return 200, {"products": ["tide"] * PAGE_SIZE, "next_page": page + 1 if page < PAGES else None}


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece: in two, the second waits 40 ms for the client's acknowledgement
    server: _Service

    def do_GET(self) -> None:
        """Answer with JSON."""
        status, content = self.server.answer(self.path)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def busy_service() -> Iterator[str]:
    """The service on a free port of this machine; gives its URL."""
    with _Service() as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.05,), name="service", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{service.server_port}"
        finally:
            service.shutdown()
            thread.join()
