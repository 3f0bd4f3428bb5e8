"""One shard in a process: its memory, what it has in flight, and the order of its effects.

A shard is LOADING (from its checkpoint and the events after it), ACTIVE, or SUPERSEDED (another owner opened a higher
epoch: nothing that this one sent since then counts). In any doubt its memory is dropped and loaded again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec
import structlog

from scheduler.core.desk import Effects, Source
from scheduler.core.policies import Policies
from scheduler.core.shard import Entity, Shard, ShardSettings
from scheduler.core.wheel import Marks
from scheduler.lateness import TimerLateness
from scheduler.ports import Entry, Log, OnAck, Reader, Record, StateStore, TopicPartition
from scheduler.slots import Slots
from schemas.codec import Codec
from schemas.errors import DecodeError, Fatal, Fenced, Retriable, TidewheelIOError, Undecodable, UnknownSchema
from schemas.ids import routing_key
from schemas.messages import (
    Event,
    FireCause,
    ForwardedRequest,
    InvalidRecord,
    Message,
    Priority,
    QueueStats,
    ReadyTask,
    Replies,
    Reply,
    Report,
    Request,
    RequestForwarded,
    ScheduleFired,
    ScheduleFlagged,
    ShardCheckpoint,
    ShardMessage,
    ShardOpened,
    TaskRejected,
    TaskReleased,
)
from schemas.topics import (
    INPUT_TOPICS,
    REPLIES,
    SHARD_MESSAGES,
    SHARD_STATS,
    TASK_EVENTS,
    TASK_REQUESTS,
    TASK_REQUESTS_INVALID,
    WORKER_SIGNALS,
    delay_topic,
    ready_topic,
)

LOAD_CHUNK = 1_000  # records read per iteration while loading, so that other shards go on
IN_FLIGHT_MAX = 64  # batches sent but not acknowledged; more would only hide a log that is too slow
OWED_MAX = 64  # appends of owed effects, not acknowledged: no input is taken meanwhile
CHECKPOINT_US = 10_000_000  # how far apart checkpoints are: a recovery replays about so much
CHECKPOINT_CHANGES_MAX = 50_000  # changed entities, and owed effects, that bring a checkpoint forward
IDLE_CHECKPOINT_US = 60_000_000  # one that would only note how far reports were read
RETURN_US = 10_000_000  # how long a superseded owner waits for the group to take the shard from it
LOAD_WAIT_US = 1_000  # between looks for an answer of the log while loading
LOAD_AGAIN_US = 500_000  # until a load that failed for now is tried again
HOLD_US, HOLD_US_MAX = 10_000, 1_000_000  # until an input whose schema could not be looked up is tried again
STATS_US = 1_000_000  # between two words of what waits and runs, while that changes
STATS_AGAIN_US = 10_000_000  # the same if it does not: who begins to listen then knows
BLOCKED_US = 5_000  # how soon a full buffer of the log, or an unread gap, is looked at again
CHECKPOINT_KEY = b"checkpoint"
OWNER_KEY = b"owner"  # who loaded it last, for people to look at

_log = structlog.get_logger(__name__)


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ between processes."""

    owner: str
    shard: ShardSettings = ShardSettings()
    checkpoint_us: int = CHECKPOINT_US


class Phase(Enum):
    """Where a hosted shard stands; only an ACTIVE one decides."""

    LOADING = "loading"
    ACTIVE = "active"
    SUPERSEDED = "superseded"


class _Checkpoint(NamedTuple):
    """A copy of what changed, taken when a batch was appended; written when that batch is acknowledged."""

    changes: list[tuple[str, Entity | bytes | None]]
    positions: dict[str, int]
    forwarded: dict[str, int]
    taken_at: int
    marks: Marks
    next_offset: int = 0  # known when it is committed


class _Held(NamedTuple):
    """An input whose schema could not be looked up: it and what follows it on its topic is taken again from there."""

    offset: int
    wait: int
    until: int | None  # None: it was asked for again


class _Owed:
    """Effects that nobody would ask for again, and the checkpoint that waits for them: a load must see their events."""

    def __init__(self, entries: list[Entry], checkpoint: _Checkpoint | None) -> None:
        self.entries = entries
        self.checkpoint = checkpoint
        self.is_sent = self.is_acknowledged = not entries


class _Parcel(NamedTuple):
    """Effects that are appended together. Nobody waits for most; `on_ack` tells whether ready records were taken."""

    entries: list[Entry]
    on_ack: OnAck | None = None


class _Batch:
    """Events that are appended together, and what follows when they are acknowledged."""

    def __init__(self, effects: Effects, checkpoint: _Checkpoint | None) -> None:
        self.effects = effects
        self.checkpoint = checkpoint
        self.result: Sequence[int] | TidewheelIOError | None = None if effects.events else ()


class ShardHost:
    """One shard in this process: its memory, what it has in flight, and the order of its effects."""

    def __init__(
        self,
        shard: int,
        log: Log,
        states: StateStore,
        codec: Codec,
        settings: RuntimeSettings,
        rng: Random,
        lateness: TimerLateness,
        policies: Policies,
    ) -> None:
        self.shard_id = shard
        self.phase = Phase.LOADING
        settings = msgspec.structs.replace(
            settings, shard=msgspec.structs.replace(settings.shard, shards=log.partitions(TASK_REQUESTS))
        )
        self._policies = policies
        self.shard = Shard(shard, settings.shard, rng, 0, policies)
        self.reloads = 0
        self._lateness = lateness
        self._log, self._states, self._codec, self._settings, self._rng = log, states, codec, settings, rng
        self._events = TopicPartition(TASK_EVENTS, shard)
        self._gateways = log.partitions(REPLIES)
        self._invalid_partition = shard % log.partitions(TASK_REQUESTS_INVALID)
        self._loading: Generator[None, None, None] | None = None
        self._load_took: dict[str, float] = {}  # seconds of each part of the load
        self._load_at = self._load_mark = 0
        self._now = 0
        self._superseded_at = 0
        self._slots: Slots | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget all that is in flight; what is heard of it later is ignored."""
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        self._generation = object()
        self._sent: deque[_Batch] = deque()
        self._failure: TidewheelIOError | None = None  # of a batch that was sent
        self._unsent: _Batch | None = None
        self._outbox: deque[_Parcel] = deque()
        self._returned: list[str] = []  # tasks whose ready records were not taken
        self._doubted: set[str] = set()  # topics of inputs whose ends were looked at since one came again
        self._owed: deque[_Owed] = deque()
        self._owed_count = 0  # since the last checkpoint: a load sends them all again
        self._next_offset = 0
        self._gap: _GapCheck | None = None
        self._token = 0
        self._is_checkpointing = False
        self._checkpoint_results: deque[tuple[object, _Checkpoint, TidewheelIOError | None]] = deque()
        self._checkpointed_at = 0
        self._loaded_taken_at: int | None = None
        self._checkpointed_positions: dict[str, int] | None = None  # a quiet shard, too, takes one after its opening
        self._read_positions: dict[str, int] = {}
        self._resume_from: dict[str, int] | None = None
        self._held: dict[str, _Held] = {}
        self._step_at = 0
        if self._slots is not None:
            self._slots.close()
        self._slots = None
        self._stats_at = self._stats_told_at = 0
        self._stats_told: tuple[QueueStats, ...] = ()
        self._trimmed: dict[str, int] = {}  # of the wheel: what the log was told that is not needed

    # --- loading -------------------------------------------------------------------------------------------------

    def reload(self, reason: str) -> None:
        """Drop the memory and build it again from the log."""
        _log.warning("shard reloads", shard=self.shard_id, reason=reason)
        self.reloads += 1
        self._reset()
        self.phase = Phase.LOADING

    def _stop(self) -> None:
        _log.warning("shard is superseded", shard=self.shard_id, epoch=self.shard.state.epoch)
        self._reset()
        self.phase = Phase.SUPERSEDED
        self._superseded_at = self._now

    def maybe_return(self, now: int) -> None:
        """If the group still gives the shard to this process long after it was superseded, it is to take it back."""
        if now - self._superseded_at >= RETURN_US:
            self.reload("superseded, but still assigned")

    def load_step(self, now: int) -> None:
        """Load a bit more; what fails for now is tried again, from the beginning, a little later."""
        self._now = now
        if now < self._load_at:
            return
        if self._loading is None:
            self._loading = self._load()
            self._load_took, self._load_mark = {}, now
        try:
            next(self._loading)
        except Retriable as error:
            self.reload(str(error))
            self._load_at = now + LOAD_AGAIN_US
        except StopIteration:
            self._loading = None
            # By whoever was the last to take one; if none of them ever did, one is due. An owner who counts from its
            # own beginning, and does not live until its first checkpoint, leaves ever more events for the next one.
            self._checkpointed_at = min(now, self._loaded_taken_at or 0)
            self.shard.drained_at = 0
            self._slots = Slots(self._log, self._codec, self.shard)
            self._resume_from = dict(self.shard.state.positions)
            self._read_positions = dict(self.shard.state.positions)
            self.phase = Phase.ACTIVE  # the last: readers in other threads ask an active shard
            state = self.shard.state
            held = {"tasks": len(state.tasks), "schedules": len(state.schedules)}
            _log.info("shard is active", shard=self.shard_id, epoch=state.epoch, **held, **self._load_took)

    def take_resume_positions(self) -> dict[str, int] | None:
        """Once after each load: from where the inputs must be read."""
        positions, self._resume_from = self._resume_from, None
        return positions

    def take_held(self, now: int) -> dict[str, int]:
        """From where inputs must be read again, by topic: once for each time that an input was held back."""
        due = {topic: held for topic, held in self._held.items() if held.until is not None and held.until <= now}
        for topic, held in due.items():
            self._held[topic] = held._replace(until=None)
        return {topic: held.offset for topic, held in due.items()}

    def _load(self) -> Generator[None, None, None]:
        # The fence comes first: from now on no older owner can change the checkpoint that is read next.
        while (token := self._states.fence(self.shard_id)) is None:
            self._load_at = self._now + LOAD_WAIT_US
            yield
        self._token = token
        self._has_loaded("fence_s")
        shard = Shard(self.shard_id, self._settings.shard, self._rng, self._now, self._policies)
        yield from self._restore(shard)
        self._has_loaded("state_s")
        reader = self._log.reader()
        try:
            reader.seek(self._events, self._next_offset)
            end_offset = self._log.end_offset(self._events)
            self._check_log(end_offset)
            if end_offset == 0 and self._loaded_taken_at is None:
                self._loaded_taken_at = self._now  # there is nothing yet that a checkpoint could have
            opened_at = yield from self._replay(shard, reader, end_offset, -1)
            self._has_loaded("events_s")
            while True:
                epoch = shard.state.epoch + 1
                offset = yield from self._open(epoch)
                opened_at = yield from self._replay(shard, reader, offset + 1, opened_at)
                if opened_at == offset:
                    break  # else another owner opened this epoch or a higher one first
        finally:
            reader.close()
        self._has_loaded("opening_s")
        yield from self._prove(token)
        self._has_loaded("proof_s")
        for topic, position in shard.state.positions.items():
            self._check_input(topic, position)
        for _ in shard.derive(self._now, self._next_offset - 1):
            yield
        self._has_loaded("derived_s")
        self.shard = shard

    def _has_loaded(self, part: str) -> None:
        """For the log: where the time of a takeover goes."""
        self._load_took[part] = round((self._now - self._load_mark) / 1e6, 3)
        self._load_mark = self._now

    def _prove(self, token: int) -> Generator[None, None, None]:
        """Make sure that nobody has fenced the state since it was read here.

        Whoever did may have taken a later checkpoint: one without the tasks that it parked, which this owner would have
        in memory. What this owner says of them would mean nothing to the next one, who loads that checkpoint.
        """
        results: list[TidewheelIOError | None] = []
        owner = self._settings.owner.encode()
        self._states.commit(self.shard_id, token, [(OWNER_KEY, owner)], results.append)
        while not results:
            self._load_at = self._now + LOAD_WAIT_US
            yield
        if isinstance(results[0], Fenced):
            raise Retriable("another owner fenced the state while it was loaded")
        if results[0] is not None:
            raise results[0]

    def _check_log(self, end_offset: int) -> None:
        if self._next_offset > end_offset:
            raise Fatal(
                f"the checkpoint of shard {self.shard_id} reaches to event {self._next_offset}, but the log ends at "
                f"{end_offset}: they are not of the same time. Bring back the log that belongs to the state; or, to go "
                "on with what the log tells, remove the state"
            )

    def _check_input(self, topic: str, position: int) -> None:
        """Fatal: the topic ends before what was decided of it, so that what is written there next would be passed over.

        Retriable: the log does not say where it ends.
        """
        if topic not in INPUT_TOPICS:
            return
        end_offset = self._log.end_offset(TopicPartition(topic, self.shard_id))
        if position > end_offset:
            raise Fatal(
                f"shard {self.shard_id} has decided {topic}[{self.shard_id}] up to offset {position}, but the topic "
                f"ends at {end_offset}: it was made anew, or lost records, while the events and the state were kept. "
                f"What is written below {position} would be taken for decided and be lost. Bring back the topic that "
                "belongs to them; or begin a new cluster, with topics of another kafka.prefix or an empty data folder"
            )

    def _restore(self, shard: Shard) -> Generator[None, None, None]:
        checkpoint: Message | None = None
        while (state := self._states.load(self.shard_id)) is None:
            self._load_at = self._now + LOAD_WAIT_US
            yield
        for number, (key, value) in enumerate(state):
            if key == OWNER_KEY:
                continue
            message = self._decode_state(value)
            if key == CHECKPOINT_KEY:
                checkpoint = message
            elif isinstance(message, Entity):
                shard.restore(message)
            if number % LOAD_CHUNK == LOAD_CHUNK - 1:
                yield
        if isinstance(checkpoint, ShardCheckpoint):
            self._loaded_taken_at = checkpoint.taken_at
            shard.state.epoch = checkpoint.epoch
            shard.state.positions = dict(checkpoint.positions)
            shard.state.forwarded = {int(partition): offset for partition, offset in checkpoint.forwarded.items()}
            self._next_offset = checkpoint.next_offset
            if checkpoint.opened:
                self._check_marks(checkpoint)
                shard.parking.wheel.resume(Marks(checkpoint.opened, checkpoint.next_offsets, checkpoint.waiting))
            shard.forgotten_offset = checkpoint.next_offset - 1

    def _check_marks(self, checkpoint: ShardCheckpoint) -> None:
        shape, levels = self._settings.shard.wheel, len(checkpoint.opened)
        has_slots = all(int(place.split("/")[1]) < shape.slots for place in checkpoint.next_offsets)
        if levels != len(shape.levels) or not has_slots:
            raise Fatal(
                f"the checkpoint of shard {self.shard_id} is of a delay wheel of another shape, with {levels} levels; "
                f"this process has {len(shape.levels)}, of {shape.slots} slots. The shape is fixed for the life of a "
                "cluster: with another one tasks that wait are not found. Run the version that wrote the checkpoint"
            )

    def _decode_state(self, value: bytes) -> Message:
        try:
            return self._codec.decode(value)
        except DecodeError as error:
            raise Fatal(
                f"the checkpoint of shard {self.shard_id} cannot be read ({error}): it was written by a newer version, "
                "or is damaged. Run that version; or bring back a copy of the state that is older; or, if the log "
                "still has all events, remove the state so that it is made anew of them"
            ) from error

    def _replay(self, shard: Shard, reader: Reader, until: int, opened_at: int) -> Generator[None, None, int]:
        """Fold the valid events below `until`; returns where the epoch that counts was opened.

        What they owe was sent by an earlier owner, or was not: it is sent again.
        """
        while self._next_offset < until:
            records = reader.take(LOAD_CHUNK)
            if records and records[0].offset > self._next_offset:
                missing = f"{self._next_offset} to {records[0].offset - 1}"
                raise Fatal(
                    f"events {missing} of shard {self.shard_id} are not in the log any more, and no checkpoint holds "
                    "what they led to: bring back the state that belongs to this log"
                )
            owed: list[Entry] = []
            for record in records:
                event = self._event_of(record)
                if event is not None and event.epoch >= shard.state.epoch:
                    if isinstance(event.body, ShardOpened):
                        if event.epoch > shard.state.epoch:
                            shard.state.epoch, opened_at = event.epoch, record.offset
                    else:
                        shard.evolve(event)
                        owed += self._owed_by(event)
                self._next_offset = record.offset + 1
            if owed:
                self._owed_count += len(owed)
                yield from self._landed(owed)
            if not records:
                self._load_at = self._now + LOAD_WAIT_US
            yield
        return opened_at

    def _open(self, epoch: int) -> Generator[None, None, int]:
        opening = Event(
            entity_id=f"shard-{self.shard_id}",
            tenant_id="",
            version=0,
            epoch=epoch,
            at=self._now,
            body=ShardOpened(owner=self._settings.owner),
        )
        entry = Entry(TASK_EVENTS, self.shard_id, None, self._codec.encode(opening))
        offsets = yield from self._landed([entry])
        if offsets[0] < 0:
            raise Retriable("the log did not say where it put the opening of the shard")
        return offsets[0]

    def _landed(self, entries: Sequence[Entry]) -> Generator[None, None, Sequence[int]]:
        """Append while loading, and wait for the acknowledgement."""
        results: list[Sequence[int] | TidewheelIOError] = []
        self._log.append(entries, results.append)
        while not results:
            self._load_at = self._now + LOAD_WAIT_US
            yield
        if isinstance(results[0], TidewheelIOError):
            raise results[0]
        return results[0]

    def _event_of(self, record: Record) -> Event | None:
        try:
            message = self._codec.decode(record.value or b"")
        except UnknownSchema as error:
            where = f"{record.topic}[{record.partition}] offset {record.offset}"
            raise Fatal(f"{where} was written by a newer version ({error}): run that version") from error
        except Undecodable as error:
            # Not one of ours: an owner never writes what it can't read. Foreign bytes must not stop the shard for ever.
            _log.error("undecodable event", partition=record.partition, offset=record.offset, reason=str(error))
            return None
        return message if isinstance(message, Event) else None

    # --- the loop of an active shard -----------------------------------------------------------------------------

    def is_accepting(self) -> bool:
        """Whether inputs may be given to `step` now."""
        has_room = len(self._sent) < IN_FLIGHT_MAX and len(self._owed) < OWED_MAX
        return self.phase is Phase.ACTIVE and self._unsent is None and has_room

    def has_unacknowledged(self) -> bool:
        """Whether the memory is ahead of what is known to be in the log."""
        return bool(self._sent or self._unsent)

    def is_due(self, now: int) -> bool:
        """Whether `step` has something to do even without inputs."""
        has_news = (
            (self._sent and self._sent[0].result is not None)
            or self._failure
            or self._checkpoint_results
            or (self._owed and self._owed[0].is_acknowledged)
            or self._returned
            or (self._slots is not None and self._slots.has_news())
        )
        return bool(has_news) or now >= self._step_at

    def step(self, inputs: Sequence[Record], drained_at: int, now: int) -> None:
        """Release what was acknowledged, decide inputs and timers, append, dispatch, maybe checkpoint.

        `drained_at` is when all inputs that were there had been given to `step`.
        """
        self._now = now
        is_blocked = bool(self._outbox)
        self._absorb_checkpoints()
        self._absorb_acks()
        self._absorb_owed()
        if self.phase is not Phase.ACTIVE or self._slots is None:
            return
        if not self._held:
            self.shard.drained_at = drained_at
        if inputs or self.is_accepting():  # what was taken is decided, whatever was acknowledged meanwhile
            self._append(self._decide(inputs, now), now)
        self._send_unsent()
        self._send_owed()
        self._slots.park(now)
        self.shard.forget_ended(now)
        self.shard.expire_markers()
        if not is_blocked:
            self._dispatch(now)
            self._tell_stats(now)
        self._send_outbox()
        self._step_at = self._due_at(now)

    def _tell_stats(self, now: int) -> None:
        """What waits and runs here, for dashboards: now and then, more often while it changes."""
        if now < self._stats_at:
            return
        self._stats_at = now + STATS_US
        stats = self.shard.stats(now)
        if stats.queues != self._stats_told or now >= self._stats_told_at + STATS_AGAIN_US:
            self._stats_told, self._stats_told_at = stats.queues, now
            value = self._codec.encode(stats)
            self._outbox.append(_Parcel([Entry(SHARD_STATS, 0, str(self.shard_id).encode(), value)]))

    def finish(self, now: int) -> bool:
        """Release what is still acknowledged after the shard went to another; whether nothing more is awaited.

        Nothing new is decided. Who asked would otherwise wait in vain: the next owner knows the decision, not them.
        """
        self._now = now
        if self.phase is Phase.ACTIVE:
            self._absorb_acks()
        if self.phase is not Phase.ACTIVE:
            return True
        self._send_outbox()
        return not self._sent and not self._outbox

    def close(self) -> None:
        """Give back what is open."""
        self._reset()

    def next_at(self, now: int) -> int:
        """When the shard must be called even if nothing arrives."""
        if self.phase is Phase.LOADING:
            return max(now, self._load_at)
        if self.phase is Phase.SUPERSEDED:
            return self._superseded_at + RETURN_US
        return now if self.is_due(now) else self._step_at

    def _due_at(self, now: int) -> int:
        if self._unsent or self._outbox or self._gap or any(not owed.is_sent for owed in self._owed):
            return now + BLOCKED_US
        has_changes = self.shard.changed or self._owed_count
        checkpoint_at = self._checkpointed_at + self._settings.checkpoint_us if has_changes else None
        slots_at = self._slots.next_at(now) if self._slots is not None else None
        is_busy = self._stats_told or self.shard.state.tasks
        stats_at = self._stats_at if is_busy else self._stats_told_at + STATS_AGAIN_US
        instants = (
            self.shard.next_at(),
            checkpoint_at,
            slots_at,
            stats_at,
            *(held.until for held in self._held.values()),
        )
        return min((at for at in instants if at is not None), default=now + IDLE_CHECKPOINT_US)

    def _decide(self, inputs: Sequence[Record], now: int) -> Effects:
        effects = Effects.none()
        for record in inputs:
            if record.topic == SHARD_MESSAGES:
                effects.extend(self._hear(record, now))
                continue
            held = self._held.get(record.topic)
            if held is not None and held.until is not None:
                continue  # comes again
            try:
                effects.extend(self._decide_input(record, now))
            except Retriable as error:
                self._hold(record, str(error), now)
                continue
            self._read_positions[record.topic] = record.offset + 1
            self._held.pop(record.topic, None)
        if self._slots is not None:
            effects.extend(self._slots.read(now))
        effects.extend(self.shard.fire_timers(now))
        effects.extend(self.shard.decide_limits(now))
        return effects

    def _hear(self, record: Record, now: int) -> Effects:
        """What the owner of another shard says. What cannot be read is as if it were lost: it is said again."""
        try:
            message = self._codec.decode(record.value)
        except (DecodeError, Retriable) as error:
            _log.warning("message of a shard cannot be read", shard=self.shard_id, reason=str(error))
            return Effects.none()
        if not isinstance(message, ShardMessage):
            _log.warning("no message of a shard", shard=self.shard_id, found=type(message).__name__)
            return Effects.none()
        return self.shard.handle(message, Source(record.topic, record.offset), now)

    def _decide_input(self, record: Record, now: int) -> Effects:
        position = self.shard.state.positions.get(record.topic, 0)
        if record.offset < position:
            if record.topic not in self._doubted:  # nobody asked for it: is this still the topic that was read before?
                self._check_input(record.topic, position)
                self._doubted.add(record.topic)
            return Effects.none()  # decided before
        source = Source(record.topic, record.offset, record.key, record.value)
        try:
            message = self._codec.decode(record.value)
            if isinstance(message, ForwardedRequest) and record.topic == TASK_REQUESTS:
                request = self._codec.decode(message.value)
                if isinstance(request, Request):
                    return self.shard.handle_forwarded(message, request, source, now)
                message = request
        except DecodeError as error:
            return self._refuse(source, str(error), now)
        if not isinstance(message, Request if record.topic == TASK_REQUESTS else Report):
            return self._refuse(source, f"{type(message).__name__} does not belong on this topic", now)
        return self.shard.handle(message, source, now)

    def _hold(self, record: Record, reason: str, now: int) -> None:
        """The registry's trouble is not the record's: it waits, with its topic; timers and other topics go on."""
        held = self._held.get(record.topic)
        wait = min(2 * held.wait, HOLD_US_MAX) if held is not None else HOLD_US
        if wait == HOLD_US_MAX:
            _log.warning("input waits", topic=record.topic, shard=self.shard_id, offset=record.offset, reason=reason)
        self._held[record.topic] = _Held(record.offset, wait, now + wait)

    def _refuse(self, source: Source, reason: str, now: int) -> Effects:
        where = {"topic": source.topic, "partition": self.shard_id, "offset": source.offset}
        _log.warning("input refused", **where, reason=reason)
        return self.shard.refuse(source, reason, now)

    # --- appending and acknowledgements --------------------------------------------------------------------------

    def _append(self, effects: Effects, now: int) -> None:
        checkpoint = self._maybe_capture(now)
        if any(effects) or checkpoint:
            self._unsent = _Batch(effects, checkpoint)

    def _send_unsent(self) -> None:
        batch = self._unsent
        if batch is None:
            return
        encode, generation = self._codec.encode, self._generation
        entries = [Entry(TASK_EVENTS, self.shard_id, e.entity_id.encode(), encode(e)) for e in batch.effects.events]

        def on_ack(result: Sequence[int] | TidewheelIOError) -> None:
            batch.result = result
            if isinstance(result, TidewheelIOError) and self._generation is generation:
                self._failure = result

        if entries:
            try:
                self._log.append(entries, on_ack)
            except Retriable:
                return  # the log's buffer is full: the batch waits, and no input is taken meanwhile
        self._sent.append(batch)
        self._unsent = None

    def _absorb_acks(self) -> None:
        """Release, in order, the effects of batches that are in the log, and known to be valid there."""
        if self._failure is None and self._slots is not None:
            self._failure = self._slots.failure
        if isinstance(self._failure, Fatal):
            raise self._failure
        if self._failure is not None:
            # At once, even if an earlier batch is still in doubt: what is appended now would stand behind a hole.
            self.reload(f"an append was not acknowledged: {self._failure}")
            return
        while self._sent and (result := self._sent[0].result) is not None:
            if isinstance(result, TidewheelIOError) or not self._is_verified(result):
                return
            batch = self._sent.popleft()
            if result:
                self._next_offset = result[-1] + 1
            self._release(batch)

    def _is_verified(self, offsets: Sequence[int]) -> bool:
        """Whether nothing but void events of a stale owner stands between this owner's events in the log."""
        if not offsets:
            return True
        if any(offset < 0 for offset in offsets):
            self.reload("the log did not say where it put the events")
            return False
        if offsets[0] == self._next_offset and offsets[-1] == self._next_offset + len(offsets) - 1:
            return True
        if self._gap is None:
            self._gap = _GapCheck(self._log.reader(), self._events, self._next_offset)
        try:
            verdict = self._gap.read(set(offsets), self.shard.state.epoch, self._event_of)
        except Retriable as error:  # an event of another owner whose schema cannot be looked up now
            self.reload(f"what stands between this owner's events cannot be read: {error}")
            return False
        if verdict is _Gap.UNREAD:
            return False
        self._gap.close()
        self._gap = None
        if verdict is _Gap.SUPERSEDED:
            self._stop()
            return False
        if verdict is _Gap.DOUBLED:
            self.reload("events of this owner stand in the log twice")
            return False
        return True

    def _release(self, batch: _Batch) -> None:
        effects = batch.effects
        self.shard.acknowledged(effects.events, self._next_offset - 1, self._now)
        self._note_lateness(effects.events)
        self._tell_flagged(effects.events)
        by_gateway: dict[int, list[Reply]] = {}
        for gateway, reply in effects.replies:
            if 0 <= gateway < self._gateways:  # else whoever wrote the request asks for an answer to nowhere
                by_gateway.setdefault(gateway, []).append(reply)
        encode = self._codec.encode
        entries: list[Entry] = []
        for gateway, replies in by_gateway.items():
            entries.append(Entry(REPLIES, gateway, None, encode(Replies(replies=tuple(replies)))))
        entries += [Entry(WORKER_SIGNALS, 0, one.worker_id.encode(), encode(one)) for one in effects.signals]
        entries += [Entry(SHARD_MESSAGES, shard, None, encode(message)) for shard, message in effects.messages]
        if entries:
            self._outbox.append(_Parcel(entries))
        owed = [entry for event in effects.events for entry in self._owed_by(event)]
        checkpoint = batch.checkpoint and batch.checkpoint._replace(next_offset=self._next_offset)
        self._owed_count += len(owed)
        if owed or checkpoint:
            self._owed.append(_Owed(owed, checkpoint))
            self._absorb_owed()

    def _tell_flagged(self, events: Sequence[Event]) -> None:
        """A schedule that fires no more is an operator's business, not only its owner's."""
        for event in events:
            if isinstance(event.body, ScheduleFlagged):
                _log.error(
                    "schedule fires no more until it is changed or resumed",
                    shard=self.shard_id,
                    schedule=event.entity_id,
                    tenant=event.tenant_id,
                    problem=event.body.problem,
                )

    def _note_lateness(self, events: Sequence[Event]) -> None:
        """How long after their time tasks and schedules were let go, now that this is in the log."""
        state = self.shard.state
        for event in events:
            body = event.body
            if isinstance(body, TaskReleased):
                task = state.tasks.get(event.entity_id)
                if task is not None and task.next_run_at is not None:
                    self._lateness.releases.note(self._now - task.next_run_at)
            elif isinstance(body, ScheduleFired) and body.cause is FireCause.TIME:
                schedule = state.schedules.get(event.entity_id)
                if schedule is not None and not schedule.spec.jitter_ms:  # else it is late on purpose
                    self._lateness.fires.note(self._now - body.nominal_at)

    # --- what is owed --------------------------------------------------------------------------------------------

    def _owed_by(self, event: Event) -> Iterator[Entry]:
        """What must land because of an acknowledged event; a copy is recognised by where the input was written."""
        if event.version:
            return
        body, source_offset = event.body, event.source_offset or 0
        if isinstance(body, RequestForwarded):
            request = ForwardedRequest(
                task_id=event.entity_id,
                partition=self.shard_id,
                offset=source_offset,
                value=body.value,
                key=body.key,
            )
            key = routing_key(event.entity_id).encode()
            yield Entry(TASK_REQUESTS, body.shard, key, self._codec.encode(request))
        elif isinstance(body, TaskRejected) and body.record is not None:
            invalid = InvalidRecord(
                topic=event.source_topic or "",
                partition=event.origin.partition if event.origin else self.shard_id,
                offset=event.origin.offset if event.origin else source_offset,
                reason=body.detail or body.outcome,
                at=event.at,
                key=body.record.key,
                value=body.record.value,
            )
            yield Entry(TASK_REQUESTS_INVALID, self._invalid_partition, body.record.key, self._codec.encode(invalid))

    def _send_owed(self) -> None:
        for owed in self._owed:
            if owed.is_sent:
                continue
            try:
                self._log.append(owed.entries, partial(self._on_owed, owed, self._generation))
            except Retriable:
                return  # the log's buffer is full
            owed.is_sent = True

    def _on_owed(self, owed: _Owed, generation: object, result: Sequence[int] | TidewheelIOError) -> None:
        if not isinstance(result, TidewheelIOError):
            owed.is_acknowledged = True
        elif self._generation is generation:
            self._failure = result

    def _absorb_owed(self) -> None:
        """Write the checkpoints before which nothing is owed any more."""
        while self._owed and self._owed[0].is_acknowledged:
            checkpoint = self._owed.popleft().checkpoint
            if checkpoint is not None:
                self._commit_checkpoint(checkpoint)

    def _dispatch(self, now: int) -> None:
        """Send out what is to be started: each topic by itself, so that one that refuses is no other's trouble."""
        returned, self._returned = self._returned, []
        self.shard.not_sent(returned, now)
        by_topic: dict[str, list[tuple[int, ReadyTask]]] = {}
        for partition, task in self.shard.dispatch(now, self._partitions_of):
            by_topic.setdefault(ready_topic(task.queue, task.priority), []).append((partition, task))
        for topic, tasks in by_topic.items():
            encode = self._codec.encode
            entries = [Entry(topic, number, task.task_id.encode(), encode(task)) for number, task in tasks]
            on_ack = partial(self._on_ready, self._generation, [task.task_id for _, task in tasks])
            self._outbox.appendleft(_Parcel(entries, on_ack))  # replies and signals can wait a little better

    def _partitions_of(self, queue: str, priority: Priority) -> int:
        return self._log.ready_partitions(ready_topic(queue, priority))

    def _on_ready(self, generation: object, task_ids: list[str], result: Sequence[int] | TidewheelIOError) -> None:
        if isinstance(result, TidewheelIOError) and self._generation is generation:
            self._returned += task_ids

    def _send_outbox(self) -> None:
        """Send released effects. Those that get lost are made good: replies by a deadline, the others are repeated."""
        while self._outbox:
            try:
                self._log.append(*self._outbox[0])
            except Retriable:
                return
            self._outbox.popleft()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _maybe_capture(self, now: int) -> _Checkpoint | None:
        changed = self.shard.changed
        changes = len(changed) + self._owed_count
        is_due = now - self._checkpointed_at >= self._settings.checkpoint_us
        is_idle_due = now - self._checkpointed_at >= IDLE_CHECKPOINT_US
        has_moved = self._read_positions != self._checkpointed_positions
        is_wanted = (changes and is_due) or changes >= CHECKPOINT_CHANGES_MAX or (has_moved and is_idle_due)
        if self._is_checkpointing or not is_wanted:
            return None
        self._is_checkpointing = True
        self._checkpointed_at = now
        self._owed_count = 0
        entities: list[tuple[str, Entity | bytes | None]] = []
        for key in changed:
            entity = self.shard.entity(key)
            if entity is not None or self.shard.is_stored(key):
                entities.append((key, entity))
                self.shard.note_stored(key, is_stored=entity is not None)
        changed.clear()
        forwarded = {str(partition): offset for partition, offset in self.shard.state.forwarded.items()}
        return _Checkpoint(entities, dict(self._read_positions), forwarded, now, self.shard.parking.wheel.marks())

    def _commit_checkpoint(self, checkpoint: _Checkpoint) -> None:
        record = ShardCheckpoint(
            epoch=self.shard.state.epoch,
            next_offset=checkpoint.next_offset,
            positions=checkpoint.positions,
            taken_at=checkpoint.taken_at,
            forwarded=checkpoint.forwarded,
            opened=checkpoint.marks.opened,
            next_offsets=checkpoint.marks.next_offsets,
            waiting=checkpoint.marks.waiting,
        )
        generation = self._generation

        def on_done(error: TidewheelIOError | None) -> None:
            self._checkpoint_results.append((generation, checkpoint, error))
            self._log.wake()

        try:
            self._states.commit(self.shard_id, self._token, self._encoded(record, checkpoint), on_done)
        except Retriable as error:  # too much to write already: the next checkpoint takes this one's changes
            on_done(error)

    def _encoded(self, record: ShardCheckpoint, checkpoint: _Checkpoint) -> Iterator[tuple[bytes, bytes | None]]:
        encode = self._codec.encode
        for key, entity in checkpoint.changes:
            yield key.encode(), encode(entity) if isinstance(entity, Entity) else entity
        yield CHECKPOINT_KEY, encode(record)

    def _absorb_checkpoints(self) -> None:
        while self._checkpoint_results:
            generation, checkpoint, error = self._checkpoint_results.popleft()
            if generation is not self._generation:
                continue
            self._is_checkpointing = False
            if isinstance(error, Fatal):
                raise error
            if error is None:
                self._checkpointed_positions = checkpoint.positions
                for topic, offset in checkpoint.positions.items():
                    self._log.trim(TopicPartition(topic, self.shard_id), offset)
                self._log.trim(self._events, checkpoint.next_offset)  # the log keeps them as long as readers may ask
                self._trim_slots(checkpoint.marks.next_offsets)
            elif isinstance(error, Fenced):
                self.reload("another owner fenced the checkpoint")
            else:
                _log.warning("checkpoint failed, will be tried again", shard=self.shard_id, reason=str(error))
                self.shard.changed.update(key for key, _ in checkpoint.changes)
                for key, _ in checkpoint.changes:
                    self.shard.note_stored(key, is_stored=True)

    def _trim_slots(self, next_offsets: Mapping[str, int]) -> None:
        """What was read from a slot, and is in a checkpoint or was parked again, is not needed any more."""
        slots = self._settings.shard.wheel.slots
        for place, offset in next_offsets.items():
            if self._trimmed.get(place) != offset:
                level, slot = map(int, place.split("/"))
                self._log.trim(TopicPartition(delay_topic(level), self.shard_id * slots + slot), offset)
                self._trimmed[place] = offset


class _Gap(Enum):
    UNREAD = "unread"
    HARMLESS = "harmless"
    SUPERSEDED = "superseded"
    DOUBLED = "doubled"


class _GapCheck:
    """Reads what stands between the acknowledged events of an owner, over as many iterations as it takes."""

    def __init__(self, reader: Reader, partition: TopicPartition, offset: int) -> None:
        self._reader = reader
        self._next_offset = offset
        self._worst = _Gap.HARMLESS
        reader.seek(partition, offset)

    def read(self, own: set[int], epoch: int, event_of: Callable[[Record], Event | None]) -> _Gap:
        """What stands there beside the records at the offsets in `own`."""
        for record in self._reader.take(LOAD_CHUNK):
            if record.offset > max(own):
                break
            self._next_offset = record.offset + 1
            event = None if record.offset in own else event_of(record)
            if event is not None and event.epoch > epoch and isinstance(event.body, ShardOpened):
                self._worst = _Gap.SUPERSEDED
            elif event is not None and event.epoch == epoch and self._worst is _Gap.HARMLESS:
                self._worst = _Gap.DOUBLED
        return self._worst if self._next_offset > max(own) else _Gap.UNREAD

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()
