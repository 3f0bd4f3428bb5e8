"""What operators and supervisors ask a process: /healthz, /readyz, /metrics and /timers, on a port of their own.

Alive is a process whose loops go on; one that is not should be started again. Ready is one that does its work now; one
that is not should be waited for, or be sent nothing. /timers tells what waits for its time, if the process has shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from scheduler.api.health import Health, health_view
from scheduler.timer_report import TimersView
from schemas.errors import Fatal

REQUEST_S = 5.0  # for one request, so that a client that says nothing does not keep a thread
STOP_S = 1.0

_JSON = "application/json"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class OperatingServer:
    """Answers in threads of its own, from before anything else works until after everything else has stopped."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        liveness: Callable[[], Health],
        readiness: Callable[[], Health],
        metrics: Callable[[], bytes],
        timers: Callable[[], TimersView | None] = lambda: None,
    ) -> None:
        """Listen; port 0 is any that is free. Fatal: the port cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/healthz":
                        self._tell(liveness())
                    case "/readyz":
                        self._tell(readiness())
                    case "/metrics":
                        self._answer(200, _TEXT, metrics())
                    case "/timers" if (view := timers()) is not None:
                        self._answer(200, _JSON, msgspec.json.encode(view))
                    case _:
                        there = "/healthz, /readyz and /metrics; /timers where a process has shards"
                        self._answer(404, _JSON, msgspec.json.encode({"detail": f"there are {there}"}))

            def _tell(self, health: Health) -> None:
                self._answer(503 if health.reasons else 200, _JSON, msgspec.json.encode(health_view(health)))

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes come every few seconds: they are not worth a line each."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise Fatal(f"port {port} of {host} cannot be listened on ({error}); choose another health.port") from error
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="operating", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_S)
