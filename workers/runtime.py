"""The worker: takes ready records, has handlers run, reports what became of them.

One thread, the one that calls `run`, owns the log's connection and never runs a handler. Each turn of its loop:

    poll → assignments → signals → outcomes → alarms → take → begin → give back → heartbeats → append → start → commit

A ready record is committed once the report that settles it (started, given back) is in the log. A handler is started
without waiting for that, unless it is suspected of having killed a worker: the shard revokes what came too late.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from scheduler.ports import Clock, Entry, Log, Member, Reader, Record, TopicPartition
from schemas.codec import Codec
from schemas.errors import DecodeError, Retriable
from schemas.ids import shard_of
from schemas.messages import (
    EVERY_WORKER,
    NO_FREE_SLOT,
    NOT_FRESH,
    AttemptCheckpointed,
    AttemptReturned,
    AttemptStarted,
    Priority,
    ReadyTask,
    Report,
    RunningAttempt,
    SignalKind,
    WorkerHeartbeat,
    WorkerSignal,
)
from schemas.topics import TASK_REPORTS, WORKER_SIGNALS, ready_topic, worker_group
from workers import execution
from workers.attempts import Alarm, Attempt, Attempts
from workers.calls import BatchCall, Call, Unit
from workers.execution import Cancelled, Crashed, Failed, GivenBack, Outcome, Snoozed, Succeeded
from workers.executors import AsyncExecutor, Executor, ThreadExecutor
from workers.intake import Intake, Key, Progress, Recent, Stamp, Version, Waiting, stamp_of
from workers.outbox import IfLost, Outbox, Outgoing
from workers.processes import ProcessExecutor
from workers.registry import ExecutorKind, Registry
from workers.settings import WorkerSettings, WorkerStats

log = logging.getLogger(__name__)

SHUTDOWN = "shutdown"
POLL_S_MAX = 1.0  # of one wait, should a wake-up be lost
SPARE = 16  # records taken although there is no slot for them, so that they can be given back and run elsewhere
RECENT_COUNT = 20_000  # attempts remembered so that a doubled ready record does not run twice
VOID_COUNT = 2_000  # ready records remembered that were called void before they came
SIGNALS_BATCH = 1_000
RETRY_PAUSE_S = 0.1  # after the log could not be polled
HELD_MAX = 256  # ready records whose schema is not known yet; with so many nothing new is taken
HELD_PAUSE_US = 100_000  # until they are looked at again

_COUNTERS: dict[type, str] = {
    Succeeded: "succeeded",
    Failed: "failed",
    Snoozed: "snoozed",
    Cancelled: "cancelled",
    Crashed: "crashed",
    GivenBack: "returned",
}


class _Stage(Enum):
    RUNNING = auto()
    LEAVING = auto()  # nothing new is taken; what is settled is being committed
    FINISHING = auto()  # out of the groups; running attempts may end in their own time
    STOPPING = auto()  # that time is over


class WorkerRuntime:
    """One worker. `run` blocks until `stop` was called, by whichever thread, and all is in order."""

    def __init__(
        self,
        log_: Log,
        codec: Codec,
        registry: Registry,
        clock: Clock,
        settings: WorkerSettings,
        shards: int,
    ) -> None:
        """Takes over the connection `log_` and closes it at the end. ValueError: processes are needed, but no app."""
        self._log = log_
        self._codec = codec
        self._registry = registry
        self._clock = clock
        self._settings = settings
        self._shards = shards
        self.stats = WorkerStats()
        self._finished: deque[tuple[Call, Outcome] | ReadyTask] = deque()  # a ReadyTask: it has a checkpoint to send
        self._checkpoints: dict[Key, bytes] = {}
        self._executors = self._make_executors()
        self._intake = Intake(settings.slots, settings.weights)
        self._batch_due_at: int | None = None
        self._call_sizes = self._find_call_sizes()
        self._attempts = Attempts()
        self._outbox = Outbox(log_, self._on_start_stored, self._on_start_lost, settings.linger_ms)
        self._to_start: list[Attempt] = []
        self._recent: Recent[Key, Stamp] = Recent(RECENT_COUNT)  # the newest that was begun, once it has ended
        self._void: Recent[Version, int] = Recent(VOID_COUNT)  # when that was said
        self._held: list[tuple[Progress, Record]] = []  # their schemas could not be looked up
        self._held_until = 0
        self._epochs: dict[int, int] = {}  # by shard, the highest that was seen
        self._members: list[Member] = []
        self._owned: list[frozenset[TopicPartition]] = []
        self._progress: dict[tuple[str, int], Progress] = {}
        self._signal_reader: Reader | None = None
        self._gave_back: dict[ExecutorKind, set[int]] = {kind: set() for kind in ExecutorKind}
        self._heartbeat_at = 0
        self._stage = _Stage.RUNNING
        self._stop_calls = 0
        self._stop_at = 0
        self._thread_id = 0

    def run(self) -> None:
        """Work until `stop`. Raises Fatal or Fenced if the log is lost, RuntimeError if processes can't be started."""
        self._thread_id = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.callback(self._log.close)
            for executor in self._executors.values():
                stack.callback(executor.close)
                executor.open()
            self._open()
            while not self._is_done():
                try:
                    self._step()
                except Retriable as error:
                    log.warning("the log is out of reach, trying again: %s", error)
                    time.sleep(RETRY_PAUSE_S)
            self._say_goodbye()

    def stop(self) -> None:
        """End in order: finish within the grace what runs, give back the rest. A second call shortens the grace to 0.

        From any thread and from a signal handler.
        """
        self._stop_calls = min(2, self._stop_calls + 1)
        if threading.get_ident() == self._thread_id:
            # A signal handler may have interrupted the log inside a lock that `wake` needs.
            threading.Thread(target=self._log.wake, name="tidewheel-wake", daemon=True).start()
        else:
            self._log.wake()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._log.poll(self._pause_s())
        now = self._clock.now_us()
        self._follow_assignments()
        self._read_signals(now)
        self._collect(now)
        self._ring_alarms(now)
        self._read_held(now)
        self._maybe_take(now)
        self._begin(now)
        self._give_back_overdue(now)
        self._advance_stop(now)
        self._maybe_heartbeat(now)
        self._outbox.send(now)
        if not self._outbox.is_stuck:
            self._hand_over(now)
        self._commit()
        self._update_stats()

    def _pause_s(self) -> float:
        call_at = self._intake.call_at()
        instants = [
            self._attempts.next_at(),
            self._outbox.next_at(),
            self._batch_due_at,
            None if call_at is None else call_at + self._settings.give_back_after_ms * 1000,
            self._heartbeat_at if len(self._attempts) else None,
            self._held_until if self._held and self._stage is _Stage.RUNNING else None,
            self._stop_at + self._settings.acknowledge_ms * 1000 if self._stage is _Stage.LEAVING else None,
            self._grace_over_at() if self._stage in (_Stage.LEAVING, _Stage.FINISHING) else None,
        ]
        next_at = min((at for at in instants if at is not None), default=None)
        if next_at is None:
            return POLL_S_MAX
        return min(POLL_S_MAX, max(0.0, (next_at - self._clock.now_us()) / 1e6))

    def _make_executors(self) -> dict[ExecutorKind, Executor]:
        settings, needed = self._settings, self._registry.executors()
        executors: dict[ExecutorKind, Executor] = {}
        if ExecutorKind.ASYNC in needed:
            executors[ExecutorKind.ASYNC] = AsyncExecutor(settings.slots, self._deliver, self._clock.now_us)
        if ExecutorKind.THREAD in needed:
            executors[ExecutorKind.THREAD] = ThreadExecutor(settings.threads, self._deliver, self._clock.now_us)
        if ExecutorKind.PROCESS in needed:
            if settings.app is None:
                names = ", ".join(handler.name for handler in self._registry if handler.executor == "process")
                raise ValueError(
                    f"app: needed by tasks that run in processes ({names}), which import the application by its "
                    "name, module:attribute; for tasks defined elsewhere use executor 'thread'"
                )
            executors[ExecutorKind.PROCESS] = ProcessExecutor(
                min(settings.processes, settings.slots),
                settings.app,
                self._registry,
                self._deliver,
                self._save,
                self._log.wake,
            )
        return executors

    def _open(self) -> None:
        reader = self._log.reader()
        for number in range(self._log.partitions(WORKER_SIGNALS)):
            partition = TopicPartition(WORKER_SIGNALS, number)
            reader.seek(partition, self._log.end_offset(partition))
        self._signal_reader = reader
        for queue in self._settings.queues:
            topics = [ready_topic(queue, priority) for priority in Priority]
            self._members.append(self._log.member(worker_group(queue), topics))
            self._owned.append(frozenset())
        now = self._clock.now_us()
        self._heartbeat_at = now + self._settings.heartbeat_ms * 1000
        self._send_heartbeats(range(self._shards), now)

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _follow_assignments(self) -> None:
        for place, member in enumerate(self._members):
            assigned = member.assigned()
            known = self._owned[place]
            if assigned is known or assigned == known:
                continue
            lost = [self._progress.pop(partition) for partition in known - assigned]
            self._intake.drop(lost)
            self._held = [held for held in self._held if held[0] not in lost]
            owned = known & assigned
            for partition in sorted(assigned - known):
                try:
                    # What a partition holds already may have been called void when this worker did not listen.
                    self._progress[partition] = Progress(self._log.end_offset(partition))
                except Retriable as error:  # the next turn tries again: what runs, and its heartbeats, must not wait
                    log.warning("a partition cannot be begun now: %s", error)
                    break
                member.resume(partition)
                owned |= {partition}
            self._owned[place] = assigned if owned == assigned else owned

    def _read_signals(self, now: int) -> None:
        if self._signal_reader is None:
            return
        for record in self._signal_reader.take(SIGNALS_BATCH):
            try:
                signal = self._decode(record)
            except Retriable as error:  # not held: what still matters is said again after the next heartbeat
                log.warning("%s@%d is passed over: %s", record.topic, record.offset, error)
                continue
            if not isinstance(signal, WorkerSignal) or self._is_superseded(signal):
                continue
            if signal.worker_id in (self._settings.worker_id, EVERY_WORKER):
                self._obey(signal, now)

    def _is_superseded(self, signal: WorkerSignal) -> bool:
        """Whether its sender is known not to own the shard any more: it may not know what its successor allowed.

        A sender of an older version does not tell its epoch, and is believed.
        """
        shard = shard_of(signal.task_id, self._shards)
        if not signal.epoch or signal.epoch >= self._epochs.get(shard, 0):
            self._see_epoch(shard, signal.epoch)
            return False
        log.warning("a signal about task %s is ignored: shard %d has a newer owner", signal.task_id, shard)
        self.stats.superseded += 1
        return True

    def _see_epoch(self, shard: int, epoch: int) -> None:
        if epoch > self._epochs.get(shard, 0):
            self._epochs[shard] = epoch

    def _obey(self, signal: WorkerSignal, now: int) -> None:
        attempt = self._attempts.find((signal.task_id, signal.attempt))
        if signal.kind is SignalKind.REVOKE:
            if signal.task_version is not None:
                self._revoke(signal, signal.task_version, attempt, now)
            elif attempt is not None:
                self._disown(attempt, now)
        elif signal.kind is SignalKind.CANCEL and attempt is not None and attempt.sealed is None:
            if attempt.call.context.is_cancelled:
                return  # the shard repeats it with each heartbeat; the handler may be cleaning up
            self._executors[attempt.kind].cancel(attempt.call)
            self._attempts.set_alarm(now + signal.grace_ms * 1000, attempt, Alarm.GRACE_OVER)

    def _revoke(self, signal: WorkerSignal, version: int, attempt: Attempt | None, now: int) -> None:
        """Void is one ready record: the same attempt may be here, or come, with another task version."""
        key = signal.task_id, signal.attempt
        waiting = self._intake.find(key)
        if attempt is not None and attempt.call.ready.task_version == version:
            self._recent.put(key, stamp_of(attempt.call.ready))
            self._disown(attempt, now)
        elif waiting is not None and waiting.task_version == version:
            self._drop_waiting(key)
            self.stats.revoked += 1
        elif attempt is None:
            self._void.put((*key, version), now)

    def _drop_waiting(self, key: Key) -> None:
        waiting = self._intake.remove(key)
        if waiting is not None:
            waiting.progress.settle(waiting.offset)

    def _maybe_take(self, now: int) -> None:
        if self._stage is not _Stage.RUNNING or self._outbox.is_stuck:
            return
        room = min(max(self._free_total(), SPARE) - len(self._intake), HELD_MAX - len(self._held))
        for place in range(len(self._members)):
            if room <= 0:
                break
            records = self._members[place].take(room)
            room -= len(records)
            for record in records:
                self._accept(record, now)
        if len(self._members) > 1:  # another queue is first next time
            self._members.append(self._members.pop(0))
            self._owned.append(self._owned.pop(0))

    def _accept(self, record: Record, now: int) -> None:
        progress = self._progress[record.topic, record.partition]
        progress.take(record.offset)
        self._read(record, progress, now)

    def _read_held(self, now: int) -> None:
        """Try again what could not be read; not while it could no longer be given back."""
        if not self._held or now < self._held_until or self._stage is not _Stage.RUNNING:
            return
        held, self._held = self._held, []
        for progress, record in held:
            self._read(record, progress, now)

    def _hold(self, record: Record, progress: Progress, now: int, reason: str) -> None:
        """The registry's trouble is not the record's: it stays open, and so is never committed as done."""
        self._held.append((progress, record))
        if now >= self._held_until:
            self._held_until = now + HELD_PAUSE_US
            log.warning("%s[%d]@%d waits: %s", record.topic, record.partition, record.offset, reason)

    def _read(self, record: Record, progress: Progress, now: int) -> None:
        try:
            ready = self._decode(record)
        except Retriable as error:
            self._hold(record, progress, now, str(error))
            return
        if not isinstance(ready, ReadyTask) or not 0 <= ready.shard < self._shards:
            if ready is not None:
                log.error("%s[%d]@%d is no ready task of these shards", record.topic, record.partition, record.offset)
                self.stats.undecodable += 1
            progress.settle(record.offset)
            return
        self._see_epoch(ready.shard, ready.epoch)
        if self._is_duplicate(ready, now):
            self.stats.duplicates += 1
            progress.settle(record.offset)
            return
        void_at = self._void.pop((ready.task_id, ready.attempt, ready.task_version))
        if void_at is not None and ready.created_at <= void_at:  # else said of an earlier task under this id
            self.stats.revoked += 1
            progress.settle(record.offset)
            return
        handler = self._registry.get(ready.task_type)
        if handler is None:
            self._refuse_type(ready, progress, record.offset, now)
            return
        waiting = Waiting(ready, handler, progress, record.offset, now)
        if record.offset < progress.fresh_from:
            self._give_back(waiting, NOT_FRESH, now)
        else:
            self._intake.put(waiting)

    def _is_duplicate(self, ready: ReadyTask, now: int) -> bool:
        """Whether the attempt was begun here. An update of a waiting task sends it again, with a higher version."""
        key, stamp = (ready.task_id, ready.attempt), stamp_of(ready)
        waiting = self._intake.find(key)
        if waiting is not None:
            if stamp_of(waiting) >= stamp:
                return True
            self._drop_waiting(key)
        attempt = self._attempts.find(key)
        begun = self._recent.get(key) if attempt is None else stamp_of(attempt.call.ready)
        if begun is None or begun < stamp:
            if attempt is not None:
                self._disown(attempt, now)
            return False
        return True

    def _refuse_type(self, ready: ReadyTask, progress: Progress, offset: int, now: int) -> None:
        outcome = execution.unknown_type(ready.task_type, self._registry.names())
        worker_id = self._settings.worker_id
        self._add(execution.started(ready, worker_id, now), ready.shard, IfLost.REPEAT)
        self._add(execution.report(ready, outcome, worker_id, now), ready.shard, IfLost.REPEAT, progress, offset)
        self.stats.started += 1
        self.stats.failed += 1

    def _decode(self, record: Record) -> object:
        try:
            return self._codec.decode(record.value or b"")
        except DecodeError as error:
            self.stats.undecodable += 1
            log.error("%s[%d]@%d was skipped: %s", record.topic, record.partition, record.offset, error)
            return None

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _begin(self, now: int) -> None:
        self._batch_due_at = None
        if self._outbox.is_stuck or not self._intake:
            return
        kept = 0  # slots of what still collects
        for lane in self._intake.lanes():
            if lane.size == 1:
                for waiting in self._intake.pick(lane, min(self._free(lane.kind), self._free_total() - kept)):
                    self._begin_together([waiting], now)
                continue
            while self._free(lane.kind) and (count := min(lane.due(now), self._free_total() - kept)) > 0:
                self._begin_together(self._intake.pick(lane, count), now)
            kept += len(lane)
        self._batch_due_at = self._intake.next_due_at(now)

    def _begin_together(self, together: Sequence[Waiting], now: int) -> None:
        """Begin attempts that share one call of their handler; mostly, it is one attempt."""
        calls = [Call(one.ready, one.handler, self._ends_at(one, now), self._save) for one in together]
        if together[0].handler.batch is not None:
            BatchCall(calls)
        # A batch with a suspect is called when its starts are in the log: if it is the end of the worker, they count.
        is_awaited = any(one.ready.is_suspect for one in together)
        for waiting, call in zip(together, calls, strict=True):
            self._begin_one(waiting, self._attempts.begin(call, is_awaited=is_awaited), now)

    def _ends_at(self, waiting: Waiting, now: int) -> int | None:
        ready = waiting.ready
        timeout_ms = waiting.handler.timeout_ms if ready.timeout_ms is None else ready.timeout_ms
        limits = [ready.deadline_at, None if timeout_ms is None else now + timeout_ms * 1000]
        return min((at for at in limits if at is not None), default=None)

    def _begin_one(self, waiting: Waiting, attempt: Attempt, now: int) -> None:
        ready, ends_at = waiting.ready, attempt.call.ends_at
        if ends_at is not None:
            self._attempts.set_alarm(ends_at, attempt, Alarm.TIME_UP)
        begun = execution.started(ready, self._settings.worker_id, now)
        self._add(begun, ready.shard, IfLost.TELL, waiting.progress, waiting.offset, attempt)
        if not attempt.is_awaited:
            self._to_start.append(attempt)
        self.stats.started += 1

    def _hand_over(self, now: int) -> None:
        if not self._to_start:
            return
        attempts, self._to_start = self._to_start, []
        units: dict[ExecutorKind, list[Unit]] = {}
        for attempt in attempts:
            is_over = False
            if attempt.sealed is not None or attempt.is_disowned:
                # Stopped before its call, for instance while the log took no reports.
                is_over = attempt.call.give_up()
                self._end(attempt.call, GivenBack(SHUTDOWN), now)
            unit = attempt.call.arrive()
            if unit is not None and not is_over:
                units.setdefault(attempt.kind, []).append(unit)
        for kind, begun in units.items():
            self._executors[kind].start(begun)

    def _deliver(self, finished: Sequence[tuple[Call, Outcome]]) -> None:
        """Called by executors, from their threads."""
        self._finished.extend(finished)
        self._log.wake()

    def _save(self, ready: ReadyTask, checkpoint: bytes) -> None:
        """Called by handlers, from their threads. The last of several checkpoints is the one that is sent."""
        self._checkpoints[ready.task_id, ready.attempt] = checkpoint
        self._finished.append(ready)
        self._log.wake()

    def _collect(self, now: int) -> None:
        while self._finished:
            item = self._finished.popleft()
            if isinstance(item, ReadyTask):
                self._send_checkpoint(item, now)
            else:
                self._end(item[0], item[1], now)

    def _end(self, call: Call, outcome: Outcome, now: int) -> None:
        """The slot is free; report the outcome, unless another one was decided before. Late words are ignored."""
        attempt = self._attempts.end(call)
        if attempt is None or attempt.is_disowned:
            return
        outcome = attempt.sealed or outcome
        ready = call.ready
        self._recent.put(attempt.key, stamp_of(ready))
        self._add(execution.report(ready, outcome, self._settings.worker_id, now), ready.shard, IfLost.REPEAT)
        counter = _COUNTERS[type(outcome)]
        setattr(self.stats, counter, getattr(self.stats, counter) + 1)

    def _send_checkpoint(self, ready: ReadyTask, now: int) -> None:
        checkpoint = self._checkpoints.pop((ready.task_id, ready.attempt), None)
        attempt = self._attempts.find((ready.task_id, ready.attempt))
        if checkpoint is None or attempt is None or attempt.call.ready is not ready:
            return
        message = AttemptCheckpointed(
            task_id=ready.task_id,
            attempt=ready.attempt,
            worker_id=self._settings.worker_id,
            checkpointed_at=now,
            checkpoint=checkpoint,
        )
        self._add(message, ready.shard, IfLost.FORGET)

    def _ring_alarms(self, now: int) -> None:
        for attempt, alarm in self._attempts.pop_due(now):
            if alarm is Alarm.KILL:
                self._kill(attempt, now)
            elif attempt.is_disowned or attempt.sealed is not None:
                continue
            elif alarm is Alarm.TIME_UP:
                self._terminate(attempt, self._time_up(attempt, now), now)
            else:
                self._terminate(attempt, Cancelled(), now)

    def _time_up(self, attempt: Attempt, now: int) -> Failed:
        ready = attempt.call.ready
        if ready.deadline_at is not None and now >= ready.deadline_at:
            return execution.deadline_passed()
        return execution.timed_out(ready.timeout_ms or attempt.call.handler.timeout_ms or 0)

    def _terminate(self, attempt: Attempt, outcome: Outcome, now: int) -> None:
        attempt.sealed = outcome
        self._executors[attempt.kind].terminate(attempt.call)
        self._attempts.set_alarm(now + self._settings.kill_grace_ms * 1000, attempt, Alarm.KILL)

    def _kill(self, attempt: Attempt, now: int) -> None:
        if self._executors[attempt.kind].kill(attempt.call):
            log.warning(
                "task %s (%s) can't be stopped and runs on in the background; executor 'process' can be killed",
                attempt.call.ready.task_id,
                attempt.call.ready.task_type,
            )
        self._end(attempt.call, attempt.sealed or Cancelled(), now)

    def _disown(self, attempt: Attempt, now: int) -> None:
        self._attempts.disown(attempt)
        self._executors[attempt.kind].terminate(attempt.call)
        self._attempts.set_alarm(now + self._settings.kill_grace_ms * 1000, attempt, Alarm.KILL)
        self.stats.revoked += 1

    def _on_start_stored(self, subject: object) -> None:
        """A start that had to be in the log first is there: whatever the attempt does to this process, it counts."""
        assert isinstance(subject, Attempt)
        self._to_start.append(subject)

    def _on_start_lost(self, subject: object) -> None:
        """Nobody knows whether the start is in the log: the attempt ends unheard, and the shard hands it out again."""
        assert isinstance(subject, Attempt)
        if not self._attempts.is_running(subject):
            self._recent.pop(subject.key)
        elif not subject.is_disowned:
            self._disown(subject, self._clock.now_us())
        if subject.is_awaited:
            self._to_start.append(subject)

    # --- slots --------------------------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        if not self.stats.is_healthy:
            return 0
        rooms = (executor.capacity * self._call_sizes[kind] for kind, executor in self._executors.items())
        return min(self._settings.slots, sum(rooms))

    def _find_call_sizes(self) -> dict[ExecutorKind, int]:
        """How many attempts one call can hold, by the kind of executor: the largest batch of its handlers."""
        sizes = dict.fromkeys(ExecutorKind, 1)
        for handler in self._registry:
            if handler.batch is not None:
                sizes[handler.executor] = max(sizes[handler.executor], handler.batch.size)
                if handler.batch.size > self._settings.slots:
                    log.warning(
                        "task %r: a batch of %d does not fit into %d slots, and so many are called at most",
                        handler.name,
                        handler.batch.size,
                        self._settings.slots,
                    )
        return sizes

    def _free_total(self) -> int:
        return max(0, self._capacity() - len(self._attempts))

    def _free(self, kind: ExecutorKind) -> int:
        free = self._executors[kind].capacity - self._attempts.busy[kind]
        return max(0, min(free, self._free_total()))

    def _give_back_overdue(self, now: int) -> None:
        if not self._intake:
            return
        for waiting in self._intake.pop_to_call_until(now - self._settings.give_back_after_ms * 1000):
            self._gave_back[waiting.handler.executor].add(waiting.ready.shard)
            self._give_back(waiting, NO_FREE_SLOT, now)

    def _give_back(self, waiting: Waiting, reason: str, now: int) -> None:
        message = execution.given_back(waiting.ready, self._settings.worker_id, now, reason)
        self._add(message, waiting.ready.shard, IfLost.REPEAT, waiting.progress, waiting.offset)
        self.stats.returned += 1

    def _update_stats(self) -> None:
        stats = self.stats
        stats.abandoned = sum(executor.abandoned for executor in self._executors.values())
        is_healthy = stats.abandoned <= self._settings.abandoned_max
        if is_healthy != stats.is_healthy:
            stats.is_healthy = is_healthy
            if is_healthy:
                log.warning("the worker takes tasks again: %d that could not be stopped are left", stats.abandoned)
            else:
                log.error(
                    "the worker takes no more tasks: %d that could not be stopped still run; restart it, and use "
                    "executor 'process' for handlers that may hang",
                    stats.abandoned,
                )
        stats.slots = self._capacity()
        stats.running = len(self._attempts)
        stats.waiting = len(self._intake)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _add(
        self,
        message: Report,
        shard: int,
        if_lost: IfLost,
        progress: Progress | None = None,
        offset: int = -1,
        subject: Attempt | None = None,
    ) -> None:
        name = message.worker_id if isinstance(message, WorkerHeartbeat) else message.task_id
        entry = Entry(TASK_REPORTS, shard, name.encode(), self._codec.encode(message))
        is_awaited = isinstance(message, AttemptStarted) and subject is not None and subject.is_awaited
        is_urgent = isinstance(message, AttemptReturned | WorkerHeartbeat) or self._stage is not _Stage.RUNNING
        outgoing = Outgoing(entry, if_lost, progress, offset, subject, is_awaited)
        self._outbox.add(outgoing, is_urgent=is_urgent or is_awaited)

    def _maybe_heartbeat(self, now: int) -> None:
        shards: set[int] = set()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._settings.heartbeat_ms * 1000
            shards.update(attempt.call.ready.shard for attempt in self._attempts.owned())
        for kind, waiting in self._gave_back.items():
            if waiting and self._stage is _Stage.RUNNING and self._free(kind):
                shards |= waiting
                waiting.clear()
        if shards:
            self._send_heartbeats(sorted(shards), now)

    def _send_heartbeats(self, shards: Sequence[int], now: int, *, is_last: bool = False) -> None:
        running: dict[int, list[RunningAttempt]] = {}
        for attempt in self._attempts.owned():
            ready = attempt.call.ready
            vouched = RunningAttempt(task_id=ready.task_id, attempt=ready.attempt)
            running.setdefault(ready.shard, []).append(vouched)
        is_taking = self._stage is _Stage.RUNNING
        free_slots = max(0, self._free_total() - len(self._intake)) if is_taking else 0
        for shard in shards:
            heartbeat = WorkerHeartbeat(
                worker_id=self._settings.worker_id,
                sent_at=now,
                free_slots=free_slots,
                running=tuple(running.get(shard, ())),
                is_last=is_last,
            )
            self._add(heartbeat, shard, IfLost.FORGET)

    def _commit(self) -> None:
        for place, member in enumerate(self._members):
            positions: dict[TopicPartition, int] = {}
            for partition in self._owned[place]:
                progress = self._progress[partition]
                if progress.position is not None and progress.position != progress.committed:
                    positions[partition] = progress.committed = progress.position
            if positions:
                member.commit(positions)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _advance_stop(self, now: int) -> None:
        if not self._stop_calls:
            return
        if self._stage is _Stage.RUNNING:
            self._stage = _Stage.LEAVING
            self._stop_at = now
            for waiting in self._intake.pop_all():
                self._give_back(waiting, SHUTDOWN, now)
        if self._stage is _Stage.LEAVING and self._may_leave(now):
            self._leave()
            self._stage = _Stage.FINISHING
        if self._stage is _Stage.FINISHING and now >= self._grace_over_at():
            self._stage = _Stage.STOPPING
            for attempt in list(self._attempts.owned()):
                if attempt.sealed is None:
                    self._terminate(attempt, GivenBack(SHUTDOWN), now)

    def _grace_over_at(self) -> int:
        return self._stop_at + (self._settings.grace_ms * 1000 if self._stop_calls < 2 else 0)

    def _may_leave(self, now: int) -> bool:
        is_settled = all(progress.is_settled for progress in self._progress.values())
        return is_settled or now >= self._stop_at + self._settings.acknowledge_ms * 1000

    def _leave(self) -> None:
        self._commit()
        for member in self._members:
            member.close()
        self._members.clear()
        self._owned.clear()
        self._progress.clear()
        self._held.clear()

    def _is_done(self) -> bool:
        is_out = self._stage in (_Stage.FINISHING, _Stage.STOPPING)
        return is_out and not len(self._attempts) and not self._finished

    def _say_goodbye(self) -> None:
        now = self._clock.now_us()
        deadline = now + self._settings.acknowledge_ms * 1000
        self._send_heartbeats(range(self._shards), now, is_last=True)
        while not self._outbox.is_settled and now < deadline:
            self._outbox.flush(now)
            self._log.poll(min(POLL_S_MAX, RETRY_PAUSE_S))
            now = self._clock.now_us()
        if not self._outbox.is_settled:
            log.warning("the last reports were not acknowledged in time; shards will notice by the lost heartbeats")
