"""The embedded engine's log for other processes of the same machine, over a Unix domain socket."""

from __future__ import annotations

from infra.remote.client import RemoteLog, RemoteMember, RemoteReader
from infra.remote.server import LogServer
from infra.remote.wire import SOCKET_NAME, Facts, SchedulerGone

__all__ = ["SOCKET_NAME", "Facts", "LogServer", "RemoteLog", "RemoteMember", "RemoteReader", "SchedulerGone"]
