"""What an application can do with queues and tenants of its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler.queue_service import QueueView, TenantView
from scheduler.refusals import Refused
from scheduler.service import PurgeView
from tidewheel.backend import Backend, Doable
from tidewheel.handles import translated

if TYPE_CHECKING:
    from tidewheel.app import App

T = TypeVar("T")


class AppQueues:
    """Queues by their names: what waits and runs in them, and what holds there. Calls block."""

    def __init__(self, app: App) -> None:
        self._app = app

    def all(self) -> list[QueueView]:
        """Those that have something, or of which something was said."""
        return list(_run(lambda: self._backend.queues.queues()).queues)

    def get(self, name: str) -> QueueView:
        """What waits and runs in a queue, and what was said of it; one that nobody has heard of is empty."""
        return _run(lambda: self._backend.queues.queue(name))

    def pause(self, name: str, *, reason: str | None = None) -> QueueView:
        """Let its tasks wait until it is resumed; those that run go on."""
        return _run(lambda: self._backend.queues.pause(name, reason=reason))

    def resume(self, name: str) -> QueueView:
        """Let its tasks go out again."""
        return _run(lambda: self._backend.queues.resume(name))

    def set(self, name: str, **fields: Any) -> QueueView:
        """Let bounds or defaults hold for it: the fields of PATCH /api/v1/queues/{queue}. None takes a word back."""
        return _run(lambda: self._backend.queues.set_queue(name, fields))

    def purge(self, name: str, *, reason: str | None = None) -> PurgeView:
        """Cancel all of its tasks that wait. If the answer is not complete there may be more: do it again."""
        return _run(lambda: self._backend.purge(name, confirmed=name, reason=reason))

    @property
    def _backend(self) -> Backend:
        return self._app.backend


class AppTenants:
    """Tenants by their ids: what waits and runs of them, their shares and bounds. Calls block."""

    def __init__(self, app: App) -> None:
        self._app = app

    def all(self) -> list[TenantView]:
        """Those that have something, or of which something was said."""
        return list(_run(lambda: self._app.backend.queues.tenants()).tenants)

    def get(self, tenant_id: str) -> TenantView:
        """What waits and runs of a tenant, and what was said of it."""
        return _run(lambda: self._app.backend.queues.tenant(tenant_id))

    def set(self, tenant_id: str, **fields: Any) -> TenantView:
        """Let a share or bounds hold for it: the fields of PATCH /api/v1/tenants/{tenant_id}. None: the default."""
        return _run(lambda: self._app.backend.queues.set_tenant(tenant_id, fields))


def _run(operation: Callable[[], Doable[T]]) -> T:
    try:
        return operation().run()
    except Refused as refused:
        raise translated(refused) from refused
