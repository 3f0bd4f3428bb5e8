"""The names of the topics. How many partitions they have, and how long they keep, is in `infra.topics`."""

from __future__ import annotations

from schemas.messages import Priority

TASK_REQUESTS = "task-requests"  # one partition a shard; key = routing key
TASK_REQUESTS_INVALID = "task-requests-invalid"  # what could not be taken from an input topic, as it was
TASK_REPORTS = "task-reports"  # one partition a shard
TASK_EVENTS = "task-events"  # one partition a shard: the commit log
SHARD_STATE = "shard-state"  # one partition a shard: checkpoints; on brokers only
WORKER_SIGNALS = "worker-signals"  # every worker reads all of it
SHARD_STATS = "shard-stats"  # what waits and runs in each shard, each second; key = shard
POLICIES = "policies"  # what operators say of queues, tenants, limits: schedulers and API processes read all of it
SHARD_MESSAGES = "shard-messages"  # one partition a shard: what the owners of other shards tell its owner
REPLIES = "replies"  # one partition a gateway
INPUT_TOPICS = (TASK_REQUESTS, TASK_REPORTS)


def delay_topic(level: int) -> str:
    """Where tasks wait that are due far ahead, by level of the wheel; the partitions are the slots of the shards."""
    return f"delay.{level}"


def ready_topic(queue: str, priority: Priority) -> str:
    """Where the attempts of a queue and priority wait for a worker."""
    return f"ready.{queue}.{priority}"


def worker_group(queue: str) -> str:
    """The group that shares the ready topics of a queue."""
    return f"workers.{queue}"
