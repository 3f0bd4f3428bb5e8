"""The API of a process: the REST surface of a service, at an address."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from schemas import registry as schema_registry
from schemas.errors import Fatal
from tidewheel.parts import Parts

if TYPE_CHECKING:
    import uvicorn
    from prometheus_client import CollectorRegistry

    from scheduler.api.health import Health
    from scheduler.service import TaskService
    from scheduler.timer_report import TimersView

PART = "api"
START_S = 60.0  # until it answers
GRACE_S = 5  # for requests that are being answered when it stops


class ApiServer:
    """Serves the REST surface in a thread."""

    def __init__(self, host: str, port: int) -> None:
        """Without `start` nothing listens; port 0 is any that is free."""
        self.host, self.port = host, port
        self._server: uvicorn.Server | None = None

    @property
    def address(self) -> str:
        """The URL of the API."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def start(
        self,
        parts: Parts,
        service: TaskService,
        *,
        health: Callable[[], Health],
        metrics: CollectorRegistry,
        readiness: Callable[[], Health] | None = None,
        timers: Callable[[], TimersView] | None = None,
    ) -> None:
        """Listen, and return once it answers; `port` is then the real one. Fatal: the port cannot be had."""
        import uvicorn  # with the API's framework half of the time of `import tidewheel`, which workers do not need

        from scheduler.api.rest import create_api
        from tidewheel import __version__

        api = create_api(
            service,
            health=health,
            schema_answer=schema_registry.answer,
            metrics=metrics,
            version=__version__,
            readiness=readiness,
            timers=timers,
        )
        listener = listen(self.host, self.port, "--port")
        config = uvicorn.Config(api, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
        server = self._server = uvicorn.Server(config)
        self.port = listener.getsockname()[1]
        parts.run(PART, lambda: server.run(sockets=[listener]))
        parts.wait_until("the API answers", lambda: server.started, START_S)

    def stop(self) -> None:
        """Take no more requests; those being answered get `GRACE_S`. Returns at once."""
        if self._server is not None:
            self._server.should_exit = True


def listen(host: str, port: int, option: str) -> socket.socket:
    """A socket bound to the address. Fatal: it cannot be had; `option` is how another port is chosen."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Fatal(
            f"port {port} of {host} cannot be listened on ({error}); choose another one with {option}"
        ) from error
    return listener
