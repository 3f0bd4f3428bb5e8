"""What a client may ask for: the fields of a submission and of an update, their bounds, and their fingerprint.

The same models stand behind every surface. They are strict: a boolean is no number, a text is no number, NaN and
Infinity are nothing, an unknown field is an error, and `null` stands for "not given". Every duration is rounded up to
whole milliseconds, every instant to whole microseconds: nothing is ever early.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec.structs import asdict, replace
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from scheduler.core.decisions import REASON_MAX
from scheduler.instants import INSTANT_RULE, instant_of, parse_instant
from scheduler.refusals import FieldError, Refusal, RefusalKind, Refused, invalid
from scheduler.strict_json import NotAcceptable, canonical_json, check_bounds, check_json, decode_json
from schemas.ids import NAME_RULE, UNIQUE_PREFIX, is_name
from schemas.limits import (
    ATTEMPTS_MAX,
    BULK_MAX,
    DURATION_MS_MAX,
    JSON_DEPTH_MAX,
    METADATA_MAX,
    SCHEDULE_AHEAD_US_MAX,
)
from schemas.messages import Backoff, Jitter, Priority, QueuePolicy, RetryPolicy, TaskSpec, Uniqueness, UniqueScope

KEY_RULE = "1 to 255 printable characters"
QUEUE_RULE = "1 to 128 characters of A-Z a-z 0-9 _ . -"  # a queue is part of a topic's name
CONTENT_TYPE_RULE = "a media type of at most 127 ASCII characters, for example application/octet-stream"
METADATA_RULE = f"texts without NUL, keys and values together at most {METADATA_MAX} bytes of UTF-8"
BASE64_RULE = "base64 of RFC 4648 with padding, in one line"
RESERVED_PREFIXES = {"key-": "idempotency keys", UNIQUE_PREFIX: "unique keys"}  # of ids that are made of these
JSON = "application/json"
LEASE_SECONDS_MIN = 5.0  # two heartbeats of a worker, and one that is late
CLASS_NAMES_MAX = 64  # in retry_on and in give_up_on
ERRORS_MAX = 20  # told of at once
_SECONDS_MAX = DURATION_MS_MAX / 1000
_ENVELOPE_DEPTH = 8  # how much deeper than the payload a body may be


# --- types of fields --------------------------------------------------------------------------------------------------


def not_allowed(message: str, allowed: str, field: str = "") -> PydanticCustomError:
    """What a validator raises: `message` completes "<field> …"."""
    # The texts go through the context: what stands in braces in a template would be replaced.
    return PydanticCustomError("not_allowed", "{message}", {"message": message, "allowed": allowed, "field": field})


def _name(text: str) -> str:
    if not is_name(text):
        raise not_allowed("is not a name", f"{NAME_RULE}; not . and ..")
    return text


def _queue(text: str) -> str:
    if not is_name(text) or ":" in text:
        raise not_allowed("is not the name of a queue", QUEUE_RULE)
    return text


def _task_id(text: str) -> str:
    for prefix, what in RESERVED_PREFIXES.items():
        if text.startswith(prefix):
            raise not_allowed(f"begins with {prefix}, which is reserved for {what}", NAME_RULE)
    return _name(text)


def _key(text: str) -> str:
    if not 1 <= len(text) <= 255 or not text.isprintable():
        raise not_allowed("is not an idempotency key", KEY_RULE)
    return text


def _content_type(text: str) -> str:
    if not (3 <= len(text) <= 127 and text.isascii() and text.isprintable() and "/" in text):
        raise not_allowed("is not a media type", CONTENT_TYPE_RULE)
    return text


def _instant(value: object) -> int:
    try:
        if isinstance(value, str):
            return parse_instant(value)
        if isinstance(value, datetime):
            return instant_of(value)
    except ValueError as error:
        raise not_allowed(str(error), INSTANT_RULE) from error
    raise not_allowed("is not a text; numbers are not taken for instants", INSTANT_RULE)


def _base64(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise not_allowed("is not base64", BASE64_RULE) from error
    raise not_allowed("is not a text", BASE64_RULE)


def _metadata(metadata: dict[str, str]) -> dict[str, str]:
    texts = [*metadata, *metadata.values()]
    if any("\0" in text for text in texts) or sum(len(text.encode()) for text in texts) > METADATA_MAX:
        raise not_allowed("is too large, or has a NUL", METADATA_RULE)
    tenant_id = metadata.get("tenant_id")
    if tenant_id is not None and not is_name(tenant_id):
        raise not_allowed("is not a name", NAME_RULE, "metadata.tenant_id")
    return metadata


_ANY_JSON = {"description": "Any JSON value; integers are kept exactly.", "examples": [{"order": 17}]}
_BASE64_SCHEMA = {"type": "string", "contentEncoding": "base64", "examples": ["aGVsbG8="]}
_INSTANT_SCHEMA = {"type": "string", "format": "date-time", "examples": ["2026-06-01T12:00:00Z"]}

Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": r"^[A-Za-z0-9_.:\-]{1,128}$"})]
Queue = Annotated[str, AfterValidator(_queue), Field(json_schema_extra={"pattern": r"^[A-Za-z0-9_.\-]{1,128}$"})]
TaskId = Annotated[str, AfterValidator(_task_id), Field(json_schema_extra={"pattern": r"^[A-Za-z0-9_.:\-]{1,128}$"})]
Key = Annotated[str, AfterValidator(_key), Field(json_schema_extra={"minLength": 1, "maxLength": 255})]
ContentType = Annotated[str, AfterValidator(_content_type)]
Instant = Annotated[int, BeforeValidator(_instant), WithJsonSchema(_INSTANT_SCHEMA)]
JsonPayload = Annotated[bytes, WithJsonSchema(_ANY_JSON)]
Base64 = Annotated[bytes, BeforeValidator(_base64), WithJsonSchema(_BASE64_SCHEMA)]
Metadata = Annotated[dict[str, str], AfterValidator(_metadata)]
Duration = Annotated[float, Field(gt=0, le=_SECONDS_MAX)]
DurationOrNone = Annotated[float, Field(ge=0, le=_SECONDS_MAX)]
Delay = Annotated[float, Field(ge=0, le=SCHEDULE_AHEAD_US_MAX / 1_000_000)]
Lease = Annotated[float, Field(ge=LEASE_SECONDS_MIN, le=_SECONDS_MAX)]
Factor = Annotated[float, Field(ge=1, le=1000)]
ClassName = Annotated[str, Field(min_length=1, max_length=256)]
ClassNames = Annotated[tuple[ClassName, ...], Field(strict=False, max_length=CLASS_NAMES_MAX)]
MaxAttempts = Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)]
PriorityName = Annotated[Priority, Field(strict=False)]
BackoffName = Annotated[Backoff, Field(strict=False)]
JitterName = Annotated[Jitter, Field(strict=False)]


class Body(BaseModel):
    """Base of what clients send: strict, and without unknown fields."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, title=None
    )


# --- the models -------------------------------------------------------------------------------------------------------


class Unique(Body):
    """One task stands for all that are submitted under a key: while it waits or lives, or for a time."""

    key: Key
    scope: Literal["waiting", "live"] | None = Field(
        None, description="`waiting`, or `live`: until it has ended, the default."
    )
    seconds: Duration | None = Field(None, description="In place of `scope`: so long after the submission.")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.scope is not None and self.seconds is not None:
            raise not_allowed("is given beside scope", "one of the two", "unique.seconds")
        return self

    def uniqueness(self) -> Uniqueness:
        """What it means to a shard."""
        if self.seconds is not None:
            return Uniqueness(key=self.key, scope=UniqueScope.WINDOW, window_ms=ms_of(self.seconds) or 0)
        return Uniqueness(key=self.key, scope=UniqueScope(self.scope or "live"))


class Debounce(Body):
    """Of all that are submitted under a key one is run, with the content of the last, once none has come for a time."""

    key: Key
    seconds: Duration = Field(description="The quiet time.")
    max_seconds: Duration | None = Field(None, description="So long after the first one at the latest.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_seconds is not None and self.max_seconds < self.seconds:
            raise not_allowed("is less than seconds", "seconds, or more", "debounce.max_seconds")
        return self

    def uniqueness(self) -> Uniqueness:
        """What it means to a shard."""
        window_ms = ms_of(self.seconds) or 0
        return Uniqueness(key=self.key, scope=UniqueScope.DEBOUNCE, window_ms=window_ms, max_ms=ms_of(self.max_seconds))


class TaskFields(Body):
    """What is to be run, and how: the fields that a task and a schedule have in common."""

    task_type: Name = Field(description="What is to be done; workers know it by this name.")
    payload: JsonPayload | None = Field(None, description="What the handler is given.")
    payload_base64: Base64 | None = Field(None, description="In place of `payload`: bytes that are not JSON.")
    content_type: ContentType | None = Field(None, description="The media type of `payload_base64`.")
    priority: PriorityName | None = None
    queue: Queue | None = None
    timeout_seconds: Duration | None = Field(None, description="Of one attempt.")
    total_timeout_seconds: Duration | None = Field(None, description="Of the whole task, from its due time.")
    lease_seconds: Lease | None = Field(None, description="How long a worker that is not heard of keeps the attempt.")
    max_retries: Annotated[int, Field(ge=0, lt=ATTEMPTS_MAX)] | None = Field(
        None, description="Attempts after the first."
    )
    max_attempts: MaxAttempts | None = Field(None, description="`max_retries` + 1.")
    max_crashes: Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)] | None = Field(
        None, description="Attempts that may be lost with their worker before the task is DEAD."
    )
    retry_backoff: BackoffName | None = None
    retry_jitter: JitterName | None = None
    retry_delay_seconds: DurationOrNone | None = Field(None, description="Before the first retry.")
    retry_factor: Factor | None = Field(None, description="Growth of the exponential delay from retry to retry.")
    retry_cap_seconds: DurationOrNone | None = Field(None, description="The longest delay between attempts.")
    retry_on: ClassNames | None = Field(None, description="Only errors of these classes are retried.")
    give_up_on: ClassNames | None = Field(None, description="Errors of these classes are permanent.")
    metadata: Metadata | None = Field(
        None, description="Texts that travel with the task; `tenant_id` says whose it is."
    )

    @model_validator(mode="after")
    def _is_one_task(self) -> Self:
        _check_payload(self.payload, self.payload_base64, self.content_type)
        retries, attempts = self.max_retries, self.max_attempts
        if retries is not None and attempts is not None and attempts != retries + 1:
            raise not_allowed("disagrees with max_retries", "max_retries + 1, or one of the two", "max_attempts")
        return self

    @property
    def tenant_id(self) -> str:
        """Whose it is."""
        return (self.metadata or {}).get("tenant_id", _SPEC.tenant_id)

    def task_spec(self) -> TaskSpec:
        """What is asked for by these fields."""
        payload, content_type = payload_of(self.payload, self.payload_base64, self.content_type)
        given: dict[str, Any] = {
            "payload": payload,
            "content_type": content_type,
            "priority": self.priority,
            "queue": self.queue,
            "tenant_id": self.tenant_id,
            "metadata": self.metadata,
            "timeout_ms": ms_of(self.timeout_seconds),
            "total_timeout_ms": ms_of(self.total_timeout_seconds),
            "lease_ms": ms_of(self.lease_seconds),
        }
        return TaskSpec(task_type=self.task_type, retry=self._retry(), **without_none(given))

    def _retry(self) -> RetryPolicy:
        given: dict[str, Any] = {
            "max_attempts": self.max_attempts if self.max_retries is None else self.max_retries + 1,
            "max_crashes": self.max_crashes,
            "backoff": self.retry_backoff,
            "jitter": self.retry_jitter,
            "delay_ms": ms_of(self.retry_delay_seconds),
            "factor": self.retry_factor,
            "cap_ms": ms_of(self.retry_cap_seconds),
            "retry_on": self.retry_on,
            "give_up_on": self.give_up_on,
        }
        given = without_none(given)
        return RetryPolicy(**given) if given else _RETRY


class Submission(TaskFields):
    """A task to be run. In Python, `payload` is the bytes of a JSON text and instants may be aware datetimes."""

    scheduled_at: Instant | None = Field(None, description="When it is due; null or past: now.")
    delay_seconds: Delay | None = Field(None, description="In place of `scheduled_at`: due so long after acceptance.")
    start_deadline: Instant | None = Field(None, description="FAILED if it has not started by then.")
    idempotency_key: Key | None = Field(
        None, description="Repeats of the submission within the idempotency window (24 h) are one task. Per tenant."
    )
    task_id: TaskId | None = Field(None, description="The first submission under an id wins. Not with a key.")
    unique: Unique | None = Field(None, description="Another task may stand for this one. Not with an id or a key.")
    debounce: Debounce | None = Field(None, description="It waits for others that may come. Not with an id or a key.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.scheduled_at is not None and self.delay_seconds is not None:
            raise not_allowed("is given beside scheduled_at", "one of the two", "delay_seconds")
        if self.task_id is not None and self.idempotency_key is not None:
            raise not_allowed("is given beside task_id", "one of the two", "idempotency_key")
        self._check_unique()
        return self

    def _check_unique(self) -> None:
        if self.unique is not None and self.debounce is not None:
            raise not_allowed("is given beside unique", "one of the two", "debounce")
        field = "unique" if self.unique is not None else "debounce"
        if (self.unique or self.debounce) is not None:
            for other in ("task_id", "idempotency_key"):
                if getattr(self, other) is not None:
                    raise not_allowed(f"is given beside {other}", "one of the two", field)
        if self.debounce is not None and (self.scheduled_at is not None or self.delay_seconds is not None):
            raise not_allowed("is given beside a due time", "one of the two", "debounce")

    @property
    def asked(self) -> Submission:
        """The fields that were given."""
        return self

    @property
    def uniqueness(self) -> Uniqueness | None:
        """Whether it shares a task with others."""
        given = self.unique or self.debounce
        return None if given is None else given.uniqueness()

    @property
    def delay_us(self) -> int | None:
        """The delay, never shorter than what was asked for."""
        return None if self.delay_seconds is None else _up(self.delay_seconds, 1_000_000)

    def spec(self, now: int) -> TaskSpec:
        """What is asked for at the time `now`. Raises Refused if an instant is out of range."""
        delay_us = self.delay_us
        scheduled_at = self.scheduled_at if delay_us is None else now + delay_us
        check_scheduled_at(scheduled_at, now)
        if self.start_deadline is not None and self.start_deadline <= max(scheduled_at or now, now):
            raise invalid("start_deadline", "is not later than the due time", "an instant after scheduled_at and now")
        return replace(self.timeless_spec(), scheduled_at=scheduled_at)

    def timeless_spec(self) -> TaskSpec:
        """What is asked for, but for when it is due."""
        given = {
            "start_deadline_at": self.start_deadline,
            "idempotency_key": self.idempotency_key,
            "unique": self.uniqueness,
        }
        return replace(self.task_spec(), **without_none(given))

    def fingerprint(self) -> str:
        """The same for the same content: whatever the order of JSON keys, the white space, and the way to say it.

        It is made of what differs from the defaults, so that a default may change without making repeats conflicts.
        """
        content = content_of(self.timeless_spec())
        content["scheduled_at"] = self.scheduled_at
        content["delay_us"] = self.delay_us
        content.pop("idempotency_key", None)
        return fingerprint_of(content)


class Template:
    """A submission checked once, to be sent with one payload after the other: what a task type is to the SDK."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.timeless_spec = submission.timeless_spec()
        self.has_times = any((submission.scheduled_at, submission.start_deadline, submission.delay_seconds))

    def with_payload(self, payload: bytes) -> FilledTemplate:
        """The submission with this payload: a JSON text that its maker has checked."""
        return FilledTemplate(self, payload)


class FilledTemplate:
    """A template with its payload: as good as the Submission that has both."""

    __slots__ = ("_payload", "_template", "idempotency_key", "task_id", "tenant_id", "uniqueness")

    def __init__(self, template: Template, payload: bytes) -> None:
        submission = template.submission
        self._template, self._payload = template, payload
        self.task_id = submission.task_id
        self.tenant_id = template.timeless_spec.tenant_id
        self.idempotency_key = submission.idempotency_key
        self.uniqueness = template.timeless_spec.unique

    def spec(self, now: int) -> TaskSpec:
        """What is asked for at the time `now`. Raises Refused if an instant is out of range."""
        template = self._template
        spec = template.submission.spec(now) if template.has_times else template.timeless_spec
        return replace(spec, payload=self._payload)

    @property
    def asked(self) -> Submission:
        """The fields that were given, without the payload."""
        return self._template.submission

    def fingerprint(self) -> str:
        """As that of the Submission."""
        return self._template.submission.model_copy(update={"payload": self._payload}).fingerprint()


Submittable = Submission | FilledTemplate


class Update(Body):
    """A change of a waiting task; an absent field stays as it is. `scheduled_at: null` means now."""

    priority: PriorityName | None = None
    scheduled_at: Instant | None = Field(None, description="The new due time; null: now.")
    payload: JsonPayload | None = None
    payload_base64: Base64 | None = None
    content_type: ContentType | None = None
    metadata: Metadata | None = Field(None, description="In place of all of it; the tenant cannot change.")
    expected_version: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        None, description="Refuse if the task has another version."
    )
    enabled: Annotated[Any, WithJsonSchema({"description": "Of schedules only; refused for tasks."})] = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if "enabled" in self.model_fields_set:
            raise not_allowed("is a field of schedules; a task is stopped by cancelling it", "absent", "enabled")
        for field in ("priority", "payload_base64", "metadata", "content_type"):
            if field in self.model_fields_set and getattr(self, field) is None:
                raise not_allowed("is null", "a value, or absent to leave it as it is", field)
        if not self.model_fields_set - {"expected_version"}:
            raise not_allowed("changes nothing", "priority, scheduled_at, payload, metadata", "body")
        _check_payload(self.payload, self.payload_base64, self.content_type)
        return self

    @property
    def is_rescheduled(self) -> bool:
        """Whether the due time changes."""
        return "scheduled_at" in self.model_fields_set

    @property
    def new_payload(self) -> tuple[bytes, str] | None:
        """The new payload with its media type, if it changes."""
        if not self.model_fields_set & {"payload", "payload_base64"}:
            return None
        return payload_of(self.payload, self.payload_base64, self.content_type)


_SPEC = TaskSpec(task_type="")
_RETRY = RetryPolicy()


def _check_payload(payload: bytes | None, binary: bytes | None, content_type: str | None) -> None:
    if binary is None and content_type not in (None, JSON):
        raise not_allowed("is for payload_base64; payload is JSON", "absent", "content_type")
    if binary is not None and payload is not None:
        raise not_allowed("is given beside payload", "one of the two", "payload_base64")
    content, kind = payload_of(payload, binary, content_type)
    if is_json(kind) and content != b"null":
        try:
            check_json(content)
        except NotAcceptable as error:
            allowed = f"JSON of at most {JSON_DEPTH_MAX} levels, with finite numbers and paired surrogates"
            raise not_allowed(str(error), allowed, "payload" if binary is None else "payload_base64") from error


def payload_of(payload: bytes | None, binary: bytes | None, content_type: str | None) -> tuple[bytes, str]:
    """The payload's bytes and media type."""
    if binary is not None:
        return binary, content_type or "application/octet-stream"
    return (b"null" if payload is None else payload), JSON


def is_json(content_type: str) -> bool:
    """Whether a media type is that of JSON."""
    return content_type.partition(";")[0].strip().lower() == JSON


def check_scheduled_at(scheduled_at: int | None, now: int) -> None:
    """Refuse a due time that is a mistaken unit: before 1970, or more than a hundred years ahead. Raises Refused."""
    if scheduled_at is not None and not 0 <= scheduled_at <= now + SCHEDULE_AHEAD_US_MAX:
        raise invalid("scheduled_at", "is out of range", "from 1970 to a hundred years from now")


def check_reason(reason: str | None) -> None:
    """Refuse a reason of an operator that is no short, printable text. Raises Refused."""
    if reason is not None and not (len(reason) <= REASON_MAX and reason.replace("\n", " ").isprintable()):
        raise invalid("reason", "is not accepted", f"at most {REASON_MAX:,} printable characters")


def _up(seconds: float, per_second: int) -> int:
    # Rounding to a thousandth of the unit first takes away what binary fractions add: 1.1 s are 1,100 ms, not 1,101.
    return math.ceil(round(seconds * per_second, 3))


def with_defaults(spec: TaskSpec, asked: TaskFields, policy: QueuePolicy) -> TaskSpec:
    """What is asked for, and of what is not said what holds in its queue."""
    wanted = {
        "priority": policy.priority if asked.priority is None else None,
        "timeout_ms": policy.timeout_ms if asked.timeout_seconds is None else None,
        "total_timeout_ms": policy.total_timeout_ms if asked.total_timeout_seconds is None else None,
    }
    given: dict[str, Any] = without_none(wanted)
    if policy.max_attempts is not None and asked.max_attempts is None and asked.max_retries is None:
        given["retry"] = replace(spec.retry, max_attempts=policy.max_attempts)
    return replace(spec, **given) if given else spec


def ms_of(seconds: float | None) -> int | None:
    """Whole milliseconds, rounded up."""
    return None if seconds is None else _up(seconds, 1000)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def differing(value: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    """The fields of a value that are not as in another one."""
    defaults = asdict(default)
    return {name: given for name, given in asdict(value).items() if given != defaults[name]}


def content_of(spec: TaskSpec) -> dict[str, Any]:
    """What a specification says beyond the defaults, JSON as what it means."""
    content = differing(spec, _SPEC)
    content["retry"] = differing(spec.retry, _RETRY)
    content["payload"] = check_json(spec.payload) if is_json(spec.content_type) else spec.payload
    return content


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """The same for the same content."""
    return hashlib.sha256(canonical_json(content)).hexdigest()


# --- from bytes -------------------------------------------------------------------------------------------------------

_Fields = dict[str, msgspec.Raw]
_Model = TypeVar("_Model", bound=BaseModel)


class _Bulk(msgspec.Struct, forbid_unknown_fields=True):
    tasks: list[_Fields]


def parse_submission(body: bytes) -> Submission:
    """The submission of a JSON body. Raises Refused, with an error for each field that is wrong."""
    return model_of(Submission, fields_of_body(body))


def parse_update(body: bytes) -> Update:
    """The update of a JSON body. Raises Refused, with an error for each field that is wrong."""
    return model_of(Update, fields_of_body(body))


def fields_of_body(body: bytes) -> Mapping[str, msgspec.Raw]:
    """The fields of a JSON body, not yet looked into. Raises Refused."""
    fields: _Fields = _decoded(body, _Fields, _ENVELOPE_DEPTH)
    return fields


def split_bulk(body: bytes) -> Sequence[Mapping[str, msgspec.Raw]]:
    """The items of a bulk body, not yet looked into. Raises Refused if the body as a whole is wrong."""
    items: list[_Fields] = _decoded(body, _Bulk, _ENVELOPE_DEPTH).tasks
    if not 1 <= len(items) <= BULK_MAX:
        raise invalid("tasks", f"has {len(items)} items", f"1 to {BULK_MAX} tasks")
    return items


def parse_item(item: Mapping[str, msgspec.Raw]) -> Submission | Refusal:
    """The submission of one item of a bulk body, or why it is refused."""
    try:
        return model_of(Submission, item)
    except Refused as refused:
        return refused.refusal


def parse_fields(body: bytes, allowed: Sequence[str]) -> dict[str, Any]:
    """A small JSON object that may be left out. Raises Refused for fields that are not `allowed`."""
    fields: _Fields = _decoded(body, _Fields, 0) if body.strip() else {}
    for name in fields:
        if name not in allowed:
            raise invalid(name[:128], "is not a known field", ", ".join(allowed) or "no field")
    return {name: _value(name, raw) for name, raw in fields.items()}


def _decoded(body: bytes, shape: Any, depth: int) -> Any:
    try:
        check_bounds(body, depth_max=JSON_DEPTH_MAX + depth)
        return decode_json(body, shape)
    except NotAcceptable as error:
        raise invalid("body", str(error), "a JSON object") from error


def model_of(model: type[_Model], fields: Mapping[str, msgspec.Raw]) -> _Model:
    """The model of the fields of a JSON body. Raises Refused, with an error for each field that is wrong."""
    return validated(model, values_of(fields))


def values_of(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """What the fields of a JSON body mean; the payload stays as it is. Raises Refused."""
    return {name: bytes(raw) if name == "payload" else _value(name, raw) for name, raw in fields.items()}


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return decode_json(bytes(raw), Any)
    except NotAcceptable as error:
        raise invalid(name[:128], str(error)) from error


def validated(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """The model of these values. Raises Refused, with an error for each field that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = tuple(_field_error(details, model) for details in _details(error)[:ERRORS_MAX])
        summary = "; ".join(f"{error.field} {error.message}" for error in errors[:3])
        raise Refused(Refusal(RefusalKind.INVALID, summary, errors)) from error


def _details(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_input=False)


def _field_error(details: ErrorDetails, model: type[BaseModel]) -> FieldError:
    return field_error(details, tuple(model.model_fields))


_RANGES = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def field_error(details: ErrorDetails, fields: Sequence[str] = ()) -> FieldError:
    """What pydantic found, in our words; never with the value itself."""
    context = details.get("ctx", {})
    field = context.get("field") or ".".join(str(part) for part in details["loc"])[:128] or "body"
    if details["type"] == "extra_forbidden":
        return FieldError(field, "is not a known field", ", ".join(fields))
    if details["type"] == "missing":
        return FieldError(field, "is required")
    ranges = [f"{words} {context[bound]:,}" for bound, words in _RANGES.items() if bound in context]
    allowed = context.get("allowed") or context.get("expected") or (", ".join(ranges) or None)
    message = details["msg"].removeprefix("Value error, ")
    return FieldError(field, message.replace("Input should be", "must be", 1), allowed)
