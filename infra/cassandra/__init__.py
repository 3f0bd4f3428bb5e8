"""The view in Cassandra, and its schema. The only place that knows its driver."""

from infra.cassandra.schema import SchemaReport, apply_schema
from infra.cassandra.settings import CassandraSettings, Consistency
from infra.cassandra.view import CassandraView

__all__ = ["CassandraSettings", "CassandraView", "Consistency", "SchemaReport", "apply_schema"]
