"""Options of tasks, as Python says them: seconds or timedeltas, aware datetimes, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypedDict

from schemas.messages import (
    Backoff,
    FoldPolicy,
    GapPolicy,
    Jitter,
    MisfirePolicy,
    OverlapPolicy,
    Priority,
    RetryPolicy,
)
from workers.errors import milliseconds
from workers.execution import type_name

Seconds = float | timedelta


class Retry:
    """When a failed attempt is tried again; seconds or timedeltas. What is not given is as the cluster has it."""

    def __init__(
        self,
        max_attempts: int | None = None,
        *,
        backoff: Backoff | str | None = None,
        jitter: Jitter | str | None = None,
        delay: Seconds | None = None,
        factor: float | None = None,
        cap: Seconds | None = None,
        max_crashes: int | None = None,
        retry_on: Sequence[type[BaseException] | str] = (),
        give_up_on: Sequence[type[BaseException] | str] = (),
    ) -> None:
        given: dict[str, Any] = {
            "max_attempts": max_attempts,
            "backoff": None if backoff is None else Backoff(backoff),
            "jitter": None if jitter is None else Jitter(jitter),
            "delay_ms": None if delay is None else milliseconds(delay, "delay"),
            "factor": factor,
            "cap_ms": None if cap is None else milliseconds(cap, "cap"),
            "max_crashes": max_crashes,
            "retry_on": tuple(map(_class_name, retry_on)) or None,
            "give_up_on": tuple(map(_class_name, give_up_on)) or None,
        }
        self.policy = RetryPolicy(**{name: value for name, value in given.items() if value is not None})


def _class_name(error: type[BaseException] | str) -> str:
    return error if isinstance(error, str) else type_name(error)


class Unique:
    """One task stands for all that are submitted under a key: until it has ended, while it waits, or for `seconds`."""

    def __init__(self, key: str, *, scope: str | None = None, seconds: Seconds | None = None) -> None:
        given = {"key": key, "scope": scope, "seconds": None if seconds is None else seconds_of(seconds)}
        self.fields = {name: value for name, value in given.items() if value is not None}


class Debounce:
    """Of all that are submitted under a key the last one is run, once none has come for `seconds`.

    It is due no later than `max_seconds` after the first one, if that is given.
    """

    def __init__(self, key: str, *, seconds: Seconds, max_seconds: Seconds | None = None) -> None:
        self.fields: dict[str, Any] = {"key": key, "seconds": seconds_of(seconds)}
        if max_seconds is not None:
            self.fields["max_seconds"] = seconds_of(max_seconds)


class CallOptions(TypedDict, total=False):
    """What can be said of one submission; it goes before what the task type says."""

    task_id: str
    idempotency_key: str
    unique: Unique
    debounce: Debounce
    priority: Priority | str
    queue: str
    delay: Seconds
    at: datetime
    start_deadline: datetime
    timeout: Seconds
    total_timeout: Seconds
    lease: Seconds
    retry: Retry
    metadata: Mapping[str, str]


_SECONDS = {
    "delay": "delay_seconds",
    "timeout": "timeout_seconds",
    "total_timeout": "total_timeout_seconds",
    "lease": "lease_seconds",
}
_RENAMED = {"at": "scheduled_at"}


def fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a submission that say the same. TypeError names an option that does not exist."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name not in CallOptions.__annotations__:
            raise TypeError(
                f"{name!r} is no option of a task; the options are: {', '.join(CallOptions.__annotations__)}"
            )
        if value is None:
            continue
        if name == "retry":
            fields.update(retry_fields(value.policy))
        elif name in _SECONDS:
            fields[_SECONDS[name]] = value.total_seconds() if isinstance(value, timedelta) else value
        elif name in ("unique", "debounce"):
            fields[name] = dict(value.fields)
        elif name == "metadata":
            fields[name] = dict(value)
        else:
            fields[_RENAMED.get(name, name)] = str(value) if isinstance(value, Priority) else value
    return fields


_DEFAULT = RetryPolicy()


def retry_fields(policy: RetryPolicy) -> dict[str, Any]:
    """The fields of a submission for what differs from the default policy."""
    values = {
        "max_attempts": policy.max_attempts if policy.max_attempts != _DEFAULT.max_attempts else None,
        "max_crashes": policy.max_crashes if policy.max_crashes != _DEFAULT.max_crashes else None,
        "retry_backoff": str(policy.backoff) if policy.backoff != _DEFAULT.backoff else None,
        "retry_jitter": str(policy.jitter) if policy.jitter != _DEFAULT.jitter else None,
        "retry_delay_seconds": policy.delay_ms / 1000 if policy.delay_ms != _DEFAULT.delay_ms else None,
        "retry_factor": policy.factor if policy.factor != _DEFAULT.factor else None,
        "retry_cap_seconds": policy.cap_ms / 1000 if policy.cap_ms != _DEFAULT.cap_ms else None,
        "retry_on": policy.retry_on or None,
        "give_up_on": policy.give_up_on or None,
    }
    return {name: value for name, value in values.items() if value is not None}


class ScheduleOptions(TypedDict, total=False):
    """What can be said of a schedule beside its rule; what is not given is as in REST.

    `name` is that of the task type unless it is given. `arguments` are those of the function, by name.
    """

    name: str
    arguments: Mapping[str, Any]
    tenant_id: str
    overlap: OverlapPolicy | str
    misfire: MisfirePolicy | str
    misfire_max: int
    misfire_grace: Seconds
    max_lateness: Seconds
    jitter: Seconds
    gap: GapPolicy | str
    fold: FoldPolicy | str
    start_at: datetime
    end_at: datetime


_SCHEDULE_FIELDS = {
    "overlap": "overlap_policy",
    "misfire": "misfire_policy",
    "gap": "gap_policy",
    "fold": "fold_policy",
    "misfire_grace": "misfire_grace_seconds",
    "max_lateness": "max_lateness_seconds",
    "jitter": "jitter_seconds",
}


def schedule_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a schedule that say the same. TypeError names an option that does not exist."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name not in ScheduleOptions.__annotations__:
            known = ", ".join(ScheduleOptions.__annotations__)
            raise TypeError(f"{name!r} is no option of a schedule; the options are: {known}")
        if name == "tenant_id":
            fields["metadata"] = {"tenant_id": value}
        elif name != "arguments" and value is not None:
            given = str(value) if isinstance(value, StrEnum) else seconds_of(value)
            fields[_SCHEDULE_FIELDS.get(name, name)] = given
    return fields


def seconds_of(value: Any) -> Any:
    """A timedelta as seconds; anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value
