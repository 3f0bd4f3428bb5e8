"""What a client may ask for of schedules: the fields, their bounds, what they mean. One verdict for every surface."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cron.errors import InvalidSchedule
from cron.limits import CALENDAR_MAX, EVERY_US_MAX, EVERY_US_MIN
from cron.schedule import Recurrence
from cron.zones import zone
from scheduler.core.schedule import GRACE_MS_MAX, GRACE_MS_MIN, JITTER_MS_MAX, MISFIRE_MAX, recurrence_of, run_id
from scheduler.core.schedule_requests import BACKFILL_MAX, SCHEDULE_ID_MAX, schedule_id_problem
from scheduler.instants import format_instant
from scheduler.refusals import invalid
from scheduler.submission import (
    JSON,
    Body,
    Instant,
    Name,
    TaskFields,
    content_of,
    differing,
    fields_of_body,
    fingerprint_of,
    ms_of,
    not_allowed,
    validated,
    values_of,
    without_none,
)
from schemas.limits import DURATION_MS_MAX
from schemas.messages import FoldPolicy, GapPolicy, MisfirePolicy, OverlapPolicy, ScheduleSpec, TaskSpec

PREVIEW_MAX, PREVIEW_DEFAULT = 1_000, 10  # nominal times of one preview
CRON_ID_RULE = f"1 to {SCHEDULE_ID_MAX} characters of A-Z a-z 0-9 _ : -, not beginning with cron-"
RESERVED_PREFIX = "cron-"  # of the ids that stand for names
RULES = ("cron_expression", "every_seconds", "calendar")

_INTERVAL = (EVERY_US_MIN / 1e6, EVERY_US_MAX / 1e6)
_FIELD_OF = {  # how the parts that a refusal names are called at the surface
    "timezone": "timezone",
    "every": "every_seconds",
    "anchor": "anchor",
    "calendar": "calendar",
    "start": "start_at",
    "end": "end_at",
    "jitter": "jitter_seconds",
}


def _cron_id(text: str) -> str:
    if text.startswith(RESERVED_PREFIX):
        raise not_allowed(f"begins with {RESERVED_PREFIX}, which is reserved for ids made of names", CRON_ID_RULE)
    if schedule_id_problem(text) is not None:
        raise not_allowed("is not the id of a schedule", CRON_ID_RULE)
    return text


CronId = Annotated[str, AfterValidator(_cron_id), Field(json_schema_extra={"maxLength": SCHEDULE_ID_MAX})]
Expression = Annotated[str, Field(json_schema_extra={"examples": ["0 9 * * MON-FRI"]})]
Instants = Annotated[tuple[Instant, ...], Field(strict=False, min_length=1, max_length=CALENDAR_MAX)]
Seconds = Annotated[float, Field(ge=0, le=DURATION_MS_MAX / 1000)]
_Version = Annotated[int, Field(ge=1, lt=2**63)]


class _Times(Body):
    """When: the nominal times."""

    cron_expression: Expression | None = Field(None, description="Five fields, or six with seconds first.")
    every_seconds: Annotated[float, Field(ge=_INTERVAL[0], le=_INTERVAL[1])] | None = Field(
        None, description="In place of an expression: so often, on a grid that has a line at `anchor`."
    )
    anchor: Instant | None = Field(None, description="Of `every_seconds`; 1970-01-01T00:00:00Z unless given.")
    calendar: Instants | None = Field(None, description="In place of an expression: these instants, in order.")
    timezone: str | None = Field(None, description="Of `cron_expression`: an IANA name; UTC unless given.")
    gap_policy: Literal["default", "once", "shift", "skip"] | None = None
    fold_policy: Literal["default", "first", "second", "both"] | None = None
    start_at: Instant | None = Field(None, description="No nominal time before.")
    end_at: Instant | None = Field(None, description="No nominal time from then on.")

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        given = [name for name in RULES if getattr(self, name) is not None]
        if not given:
            raise not_allowed("is required", f"one of {', '.join(RULES)}", "cron_expression")
        if len(given) > 1:
            raise not_allowed(f"is given beside {given[0]}", f"one of {', '.join(RULES)}", given[1])
        if self.anchor is not None and self.every_seconds is None:
            raise not_allowed("is given without every_seconds", "absent", "anchor")
        # The pattern itself, so that what is accepted here is accepted by the shard.
        refusing(lambda: self.recurrence())
        return self

    def _times(self) -> dict[str, Any]:
        given = {
            "cron_expression": self.cron_expression,
            "timezone": None if self.timezone is None else zone(self.timezone).name,
            "every_ms": ms_of(self.every_seconds),
            "anchor_at": self.anchor,
            "calendar": self.calendar,
            "gap": None if self.gap_policy is None else GapPolicy(self.gap_policy),
            "fold": None if self.fold_policy is None else FoldPolicy(self.fold_policy),
            "start_at": self.start_at,
            "end_at": self.end_at,
        }
        return without_none(given)

    def recurrence(self) -> Recurrence:
        """The nominal times. Raises InvalidSchedule."""
        return recurrence_of(ScheduleSpec(name="preview", task=TaskSpec(task_type="preview"), **self._times()))


def refusing(make: Callable[[], Any]) -> None:
    """Make it, in a validator: what is wrong is told of the field that the surface has for it."""
    try:
        make()
    except InvalidSchedule as error:
        field = _FIELD_OF.get(error.field, "cron_expression")
        text = str(error).removeprefix(f"{error.field} ").removesuffix(f"; allowed: {error.allowed}")
        if field == "cron_expression" and error.field != "expression":
            text = f"is not accepted: {error.field} {text}"
        raise not_allowed(text, error.allowed or "", field) from error


class ScheduleSubmission(TaskFields, _Times):
    """What is to be run again and again. The fields of the task are those of a submission."""

    name: Name = Field(description="Of the schedule; one of its kind in its tenant, unless `cron_id` is given.")
    cron_id: CronId | None = Field(None, description="The schedule's id; otherwise it follows from tenant and name.")
    overlap_policy: Literal["skip", "queue", "cancel_running", "allow"] | None = Field(
        None, description="When the run before is not over; skip unless given."
    )
    misfire_policy: Literal["none", "latest", "all"] | None = Field(
        None, description="Of nominal times that were missed; latest unless given."
    )
    misfire_max: Annotated[int, Field(ge=1, le=MISFIRE_MAX)] | None = Field(
        None, description="With misfire_policy all: at most so many are made up for, the latest; 10 unless given."
    )
    misfire_grace_seconds: Annotated[float, Field(ge=GRACE_MS_MIN / 1000, le=GRACE_MS_MAX / 1000)] | None = Field(
        None, description="A run that is late by less is no misfire; 20 unless given."
    )
    max_lateness_seconds: Seconds | None = Field(None, description="What was missed longer ago is not made up for.")
    jitter_seconds: Annotated[float, Field(ge=0, le=JITTER_MS_MAX / 1000)] | None = Field(
        None, description="A run is due up to so much later, the same whoever computes it."
    )
    enabled: bool | None = Field(None, description="Otherwise it is paused; true unless given.")
    declared_by: Name | None = Field(None, description="The application in whose code it is declared.")

    def spec(self) -> ScheduleSpec:
        """What is asked for."""
        given: dict[str, Any] = {
            **self._times(),
            "overlap": None if self.overlap_policy is None else OverlapPolicy(self.overlap_policy),
            "misfire": None if self.misfire_policy is None else MisfirePolicy(self.misfire_policy),
            "misfire_max": self.misfire_max,
            "misfire_grace_ms": ms_of(self.misfire_grace_seconds),
            "max_lateness_ms": ms_of(self.max_lateness_seconds),
            "jitter_ms": ms_of(self.jitter_seconds),
            "declared_by": self.declared_by,
        }
        return ScheduleSpec(name=self.name, task=self.task_spec(), **without_none(given))

    @property
    def schedule_id(self) -> str:
        """The id that was given, or the one that stands for (tenant, name)."""
        return self.cron_id or named_schedule_id(self.tenant_id, self.name)

    @property
    def is_paused(self) -> bool:
        """Whether it is made without firing."""
        return self.enabled is False

    def fingerprint(self) -> str:
        """The same for the same content, however it is said."""
        return fingerprint_of({**content_of_schedule(self.spec()), "is_paused": self.is_paused})


_SPEC = ScheduleSpec(name="", task=TaskSpec(task_type=""))


def content_of_schedule(spec: ScheduleSpec) -> dict[str, Any]:
    """What a specification says beyond the defaults."""
    return {**differing(spec, _SPEC), "task": content_of(spec.task)}


def named_schedule_id(tenant_id: str, name: str) -> str:
    """The id that stands for (tenant, name): the same schedule meets itself in its own shard."""
    digest = hashlib.sha256(f"{len(tenant_id)}:{tenant_id}{name}".encode()).hexdigest()
    return f"{RESERVED_PREFIX}{digest[:32]}"


def parse_schedule(body: bytes) -> ScheduleSubmission:
    """The schedule of a JSON body. Raises Refused, with an error for each field that is wrong."""
    return validated(ScheduleSubmission, values_of(fields_of_body(body)))


# --- changes ----------------------------------------------------------------------------------------------------------


class ScheduleChange:
    """A change of a schedule: absent fields stay; `null` stands for the default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises Refused for what is wrong whatever the schedule is."""
        values = dict(values)
        version = validated(_Expected, {"expected_version": values.pop("expected_version", None)}).expected_version
        if not values:
            raise invalid("body", "changes nothing", "fields of a schedule")
        if "cron_id" in values:
            raise invalid("cron_id", "cannot change", "absent")
        self.expected_version = version
        self._values = values

    @property
    def enabled(self) -> bool | None:
        """Whether it is to fire; None: as before."""
        enabled: bool | None = validated(_Enabled, {"enabled": self._values.get("enabled")}).enabled
        return enabled

    @property
    def changes_spec(self) -> bool:
        """Whether more than `enabled` is to change."""
        return bool(self._values.keys() - {"enabled"})

    def applied_to(self, spec: ScheduleSpec) -> ScheduleSpec:
        """The specification after the change. Raises Refused."""
        fields, given = fields_of_spec(spec), self._values
        if any(given.get(name) is not None for name in RULES):
            for name in RULES if given.get("every_seconds") is not None else (*RULES, "anchor"):
                fields.pop(name, None)
        if given.keys() & {"payload", "payload_base64"}:
            for name in ("payload", "payload_base64", "content_type"):
                fields.pop(name, None)
        if given.keys() & {"max_retries", "max_attempts"}:
            fields.pop("max_attempts", None)
        if isinstance(given.get("metadata"), dict) and "tenant_id" in spec.task.metadata:
            given = {**given, "metadata": {"tenant_id": spec.task.tenant_id, **given["metadata"]}}
        submission = validated(ScheduleSubmission, {**fields, **given})
        if submission.name != spec.name:
            raise invalid("name", "cannot change", "the name of the schedule, or absent; or another schedule")
        if submission.tenant_id != spec.task.tenant_id:
            raise invalid("metadata.tenant_id", "cannot change", "the tenant of the schedule, or absent")
        return submission.spec()


class _Expected(Body):
    expected_version: _Version | None = None


class _Enabled(Body):
    enabled: bool | None = None


def parse_change(body: bytes) -> ScheduleChange:
    """The change of a JSON body. Raises Refused."""
    return ScheduleChange(values_of(fields_of_body(body)))


def fields_of_spec(spec: ScheduleSpec) -> dict[str, Any]:
    """The fields of a submission that asks for just this."""
    task, retry = spec.task, spec.task.retry
    fields: dict[str, Any] = {
        "name": spec.name,
        "task_type": task.task_type,
        **({"payload": task.payload} if task.content_type == JSON else {}),
        **({"payload_base64": task.payload, "content_type": task.content_type} if task.content_type != JSON else {}),
        "queue": task.queue,
        "priority": str(task.priority),
        "metadata": task.metadata or None,
        "timeout_seconds": _seconds(task.timeout_ms),
        "total_timeout_seconds": _seconds(task.total_timeout_ms),
        "lease_seconds": _seconds(task.lease_ms),
        "max_attempts": retry.max_attempts,
        "max_crashes": retry.max_crashes,
        "retry_backoff": str(retry.backoff),
        "retry_jitter": str(retry.jitter),
        "retry_delay_seconds": _seconds(retry.delay_ms),
        "retry_factor": retry.factor,
        "retry_cap_seconds": _seconds(retry.cap_ms),
        "retry_on": retry.retry_on or None,
        "give_up_on": retry.give_up_on or None,
    }
    return without_none({**fields, **_schedule_fields(spec)})


def _schedule_fields(spec: ScheduleSpec) -> dict[str, Any]:
    return {
        "cron_expression": spec.cron_expression,
        "every_seconds": _seconds(spec.every_ms),
        "anchor": format_instant(spec.anchor_at) if spec.anchor_at else None,
        "calendar": [format_instant(at) for at in spec.calendar] or None,
        "timezone": spec.timezone,
        "gap_policy": str(spec.gap),
        "fold_policy": str(spec.fold),
        "start_at": None if spec.start_at is None else format_instant(spec.start_at),
        "end_at": None if spec.end_at is None else format_instant(spec.end_at),
        "overlap_policy": str(spec.overlap),
        "misfire_policy": str(spec.misfire),
        "misfire_max": spec.misfire_max,
        "misfire_grace_seconds": _seconds(spec.misfire_grace_ms),
        "max_lateness_seconds": _seconds(spec.max_lateness_ms),
        "jitter_seconds": _seconds(spec.jitter_ms),
        "declared_by": spec.declared_by,
    }


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


# --- preview and backfill ---------------------------------------------------------------------------------------------


class Preview(_Times):
    """The nominal times that a rule has."""

    start: Instant | None = Field(None, description="Times later than this; now unless given.")
    count: Annotated[int, Field(ge=1, le=PREVIEW_MAX)] | None = Field(
        None, description=f"How many; {PREVIEW_DEFAULT} unless given."
    )


class Backfill(Body):
    """Runs for the nominal times of a range that have none."""

    first_at: Instant = Field(alias="from", description="The first instant of the range.")
    last_at: Instant = Field(alias="to", description="Its last one; no later than what the schedule has decided.")
    runs_max: Annotated[int, Field(ge=1, le=BACKFILL_MAX)] = Field(
        100, alias="max", description="More runs than this are refused."
    )

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.last_at < self.first_at:
            raise not_allowed("is before from", "an instant not before from", "to")
        if self.first_at < 0:
            raise not_allowed("is out of range", "an instant from 1970 on", "from")
        return self


def parse_preview(body: bytes) -> Preview:
    """The preview that a JSON body asks for. Raises Refused."""
    return validated(Preview, values_of(fields_of_body(body)))


def parse_backfill(body: bytes) -> Backfill:
    """The backfill that a JSON body asks for. Raises Refused."""
    return validated(Backfill, values_of(fields_of_body(body)))


def nominal_text(instant: int) -> str:
    """A nominal time as run ids have it: RFC 3339 in UTC, with a fraction only if there is one."""
    return run_id("", instant)[1:]
