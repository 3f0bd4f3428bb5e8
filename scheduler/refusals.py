"""How a request is refused: a value that every surface translates in its own terms (an HTTP problem, a gRPC status)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.messages import Outcome, Reply, Status


class RefusalKind(StrEnum):
    """Why, as far as the client's next step depends on it."""

    INVALID = "invalid"  # the content is wrong: `errors` names the fields
    TOO_LARGE = "too-large"
    NOT_FOUND = "not-found"
    CONFLICT = "conflict"  # the id or key belongs to a task with other content
    WRONG_STATUS = "wrong-status"  # what was asked cannot be done to a task that stands where it stands
    VERSION_MISMATCH = "version-mismatch"
    OVERLOADED = "overloaded"  # nothing happened; later
    TOO_MANY = "too-many"  # the tenant has more than it may; later
    UNAVAILABLE = "unavailable"  # a part that is needed does not answer; later
    UNDECIDED = "undecided"  # it was sent, and may or may not have been accepted


RETRY_AFTER_S = {
    RefusalKind.OVERLOADED: 1,
    RefusalKind.TOO_MANY: 1,
    RefusalKind.UNAVAILABLE: 1,
    RefusalKind.UNDECIDED: 2,
}


class FieldError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with one field, and what is allowed."""

    field: str
    message: str
    allowed: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    """The refusal of one request. `status` is that of the task, where it is the reason."""

    kind: RefusalKind
    detail: str
    errors: tuple[FieldError, ...] = ()
    status: Status | None = None

    @property
    def retry_after_s(self) -> int | None:
        """When the same request may succeed, in seconds; None if repeating it unchanged is of no use."""
        return RETRY_AFTER_S.get(self.kind)


class Refused(Exception):
    """A request was refused; nothing changed, except where the kind is UNDECIDED."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


def invalid(field: str, message: str, allowed: str | None = None) -> Refused:
    """The refusal of one field."""
    return Refused(Refusal(RefusalKind.INVALID, f"{field} {message}", (FieldError(field, message, allowed),)))


def too_large(what: str, size: int, size_max: int) -> Refused:
    """The refusal of something by its size in bytes."""
    return Refused(Refusal(RefusalKind.TOO_LARGE, f"{what} has {size} bytes; at most {size_max} are allowed"))


def not_found(task_id: str) -> Refused:
    """No task has this id."""
    return Refused(Refusal(RefusalKind.NOT_FOUND, f"there is no task {task_id[:128]!r}"))


def schedule_not_found(schedule_id: str) -> Refused:
    """No schedule has this id."""
    return Refused(Refusal(RefusalKind.NOT_FOUND, f"there is no schedule {schedule_id[:128]!r}"))


def wrong_status(task_id: str, status: Status, allowed: str) -> Refused:
    """The task stands where this cannot be done."""
    return Refused(Refusal(RefusalKind.WRONG_STATUS, f"task {task_id} is {status}; {allowed}", status=status))


_KINDS = {
    Outcome.CONFLICT: RefusalKind.CONFLICT,
    Outcome.NOT_FOUND: RefusalKind.NOT_FOUND,
    Outcome.WRONG_STATUS: RefusalKind.WRONG_STATUS,
    Outcome.VERSION_MISMATCH: RefusalKind.VERSION_MISMATCH,
    Outcome.VIEW_BEHIND: RefusalKind.UNAVAILABLE,
    Outcome.INVALID: RefusalKind.INVALID,
    Outcome.OVERLOADED: RefusalKind.OVERLOADED,
    Outcome.TOO_MANY: RefusalKind.TOO_MANY,
}


def refusal_of(reply: Reply) -> Refusal:
    """What a shard's refusal means to the client."""
    return Refusal(
        _KINDS[reply.outcome], reply.detail or f"the request was refused: {reply.outcome}", status=reply.status
    )
