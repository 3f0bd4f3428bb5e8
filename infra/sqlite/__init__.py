"""Log, state and view in SQLite files. Only `database` imports the driver."""

from infra.sqlite.database import Unusable, put_aside
from infra.sqlite.log import SqliteLogStorage
from infra.sqlite.state import SqliteStateStore
from infra.sqlite.view import SqliteView

__all__ = ["SqliteLogStorage", "SqliteStateStore", "SqliteView", "Unusable", "put_aside"]
