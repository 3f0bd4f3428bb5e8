"""What passes over a shard's desk: the inputs that it decides, what follows from them, and what its parts ask of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduler.core.decisions import Decision
from schemas.ids import is_name
from schemas.messages import (
    EndedTask,
    Event,
    EventBody,
    Origin,
    Outcome,
    RejectedRecord,
    Reply,
    ShardMessage,
    Task,
    TaskRejected,
    TaskSpec,
    WorkerSignal,
)

# Refusals after which whoever waits for no reply finds the record among the invalid ones: what it asked for would be
# lost otherwise. The others say that all is as asked already, or that the task stands where it cannot be done.
LOST = frozenset({Outcome.INVALID, Outcome.CONFLICT, Outcome.OVERLOADED, Outcome.TOO_MANY})
RECORD_MAX = 1 << 20  # bytes of a record that a refusal repeats; the topics of inputs take no larger ones


class Source(NamedTuple):
    """The input that is decided: its place, its bytes, and where it was first written if it was forwarded."""

    topic: str
    offset: int
    key: bytes | None = None
    value: bytes | None = None
    origin: Origin | None = None

    def size(self) -> int:
        """Bytes of key and value."""
        return len(self.key or b"") + len(self.value or b"")


class Effects(NamedTuple):
    """Events, and what may be released once they are acknowledged.

    Replies go to the gateway, messages to the shard named beside them.
    """

    events: list[Event]
    replies: list[tuple[int, Reply]]
    signals: list[WorkerSignal]
    messages: list[tuple[int, ShardMessage]]

    def extend(self, more: Effects) -> None:
        """Let `more` follow."""
        self.events.extend(more.events)
        self.replies.extend(more.replies)
        self.signals.extend(more.signals)
        self.messages.extend(more.messages)

    @classmethod
    def none(cls) -> Effects:
        """No events, no effects."""
        return cls([], [], [], [])


class Desk(Protocol):
    """A shard as its parts see it: they decide on their own entities, and what they decide happens here."""

    @property
    def forgotten_offset(self) -> int:
        """All that is forgotten had its last event at or before this one."""

    def known(self, task_id: str) -> Task | EndedTask | None:
        """The task if it lives, what is remembered of it if it ended lately, else None."""

    def kind_of(self, entity_id: str) -> str | None:
        """Whether there is a schedule or a workflow of this id, with whose tasks those of another would be mixed up."""

    def is_full(self, spec: TaskSpec, now: int) -> str | None:
        """Why no task like this can be taken in; None: it can."""

    def event(
        self, entity_id: str, tenant_id: str, version: int, body: EventBody, now: int, source: Source | None
    ) -> Event:
        """An event of this owner."""

    def happened(self, event: Event) -> Effects:
        """Fold an event that was decided now."""

    def applied(self, task: Task | EndedTask | None, decision: Decision, source: Source | None, now: int) -> Effects:
        """Fold what was decided of a task, if anything was."""

    def release(self, task_id: str, now: int) -> None:
        """A task that ended is remembered for its workflow no more."""

    def note_changed(self, key: str) -> None:
        """Let the next checkpoint have the entity of this key as it is then."""

    def unstore(self, key: str) -> None:
        """Let the next checkpoint not have it."""


def rejected(request: str, decision: Decision, source: Source, *, is_kept: bool) -> TaskRejected:
    """The refusal; with `is_kept` it holds the record, from which an InvalidRecord is made."""
    detail, record = decision.detail, None
    if is_kept:
        record = RejectedRecord(key=source.key, value=source.value)
        if source.size() > RECORD_MAX:
            record = RejectedRecord()
            detail = f"{detail}; its {source.size()} bytes, above {RECORD_MAX}, are only where it was written"
    return TaskRejected(request=request, outcome=decision.outcome, detail=detail, record=record)


def name_or_nothing(text: str) -> str:
    """What was no name may be of any length: it is in the record, not in the event's key."""
    return text if is_name(text) else ""
