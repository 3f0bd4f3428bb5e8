"""Which task or schedule a request is about, and so which shard decides it."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.ids import is_name, keyed_task_id, record_task_id, shard_of
from schemas.messages import DiscardTask, RedriveTask, Request, ScheduleRequest, SubmitTask, WorkflowRequest


def identified(request: Request, topic: str, partition: int, offset: int) -> Request:
    """The request with a task id: a submission without one gets that of its idempotency key, else of its place."""
    if not isinstance(request, SubmitTask) or request.task_id is not None:
        return request
    key = request.spec.idempotency_key
    if key is not None:
        return replace(request, task_id=keyed_task_id(request.spec.tenant_id, key))
    return replace(request, task_id=record_task_id(topic, partition, offset))


def entity_id_of(request: Request) -> str:
    """The id of the task, or of the schedule, that an identified request is about."""
    if isinstance(request, ScheduleRequest):
        return request.schedule_id
    if isinstance(request, WorkflowRequest):
        return request.workflow_id
    if isinstance(request, RedriveTask | DiscardTask):
        return request.task.task_id
    return request.task_id or ""


def home_of(entity_id: str, shard: int, shards: int) -> int:
    """The shard that decides on it; `shard` itself for what can be no id: it is refused where it is."""
    return shard_of(entity_id, shards) if shards > 1 and is_name(entity_id) else shard
