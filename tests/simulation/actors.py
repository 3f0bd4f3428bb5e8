"""Those who use a shard, behaving as badly as they may: clients, and workers that die, freeze and speak late."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from scheduler.core.routing import entity_id_of
from scheduler.policy_topic import policy_entry
from scheduler.ports import Entry, TopicPartition
from schemas.codec import Codec
from schemas.ids import keyed_task_id, routing_key, shard_of, unique_root_of
from schemas.messages import (
    EVERY_WORKER,
    AttemptCancelled,
    AttemptCheckpointed,
    AttemptCrashed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    Backoff,
    CancelTask,
    ControlSchedule,
    CreateSchedule,
    DiscardTask,
    ErrorKind,
    Jitter,
    LimitPolicy,
    Message,
    MisfirePolicy,
    OverlapPolicy,
    Policy,
    Priority,
    QueuePolicy,
    ReadyTask,
    RedriveTask,
    Request,
    RetryPolicy,
    RunningAttempt,
    RunSchedule,
    ScheduleAction,
    ScheduleSpec,
    SignalKind,
    Status,
    SubmitTask,
    TaskError,
    TaskSpec,
    Uniqueness,
    UniqueScope,
    UpdateSchedule,
    UpdateTask,
    Verdict,
    WorkerHeartbeat,
    WorkerSignal,
)
from schemas.topics import TASK_REPORTS, TASK_REQUESTS, WORKER_SIGNALS, ready_topic, worker_group
from tests.simulation import workflows
from tests.simulation.invariants import Facts, Violated
from tests.simulation.world import SimLog, World

QUEUES = ("default", "bulk")
HEARTBEAT_US = 2_000_000
SECOND = 1_000_000
SCHEDULES = 4
CHANGING = (
    LimitPolicy(name="a-queue", set_at=1, key="{queue}", count=2),
    LimitPolicy(name="a-queue", set_at=1, key="{queue}", count=4),
    LimitPolicy(name="a-queue", set_at=1, count=1, is_removed=True),
    LimitPolicy(name="b-account", set_at=1, key="{metadata.account}", count=1),
    LimitPolicy(name="b-account", set_at=1, key="{metadata.account}", count=3, period_ms=1_000),
    LimitPolicy(name="b-account", set_at=1, count=1, is_removed=True),
)


class Client:
    """Submits, cancels, updates, redrives and discards at random; repeats itself.

    Some of what it sends has no id, or is in the wrong partition, or is junk, or holds what is not allowed.
    """

    def __init__(self, world: World, codec: Codec, facts: Facts, *, has_workflows: bool) -> None:
        self._world, self._codec, self._facts = world, codec, facts
        self._has_workflows, self._newest = has_workflows, 0
        self._log = SimLog(world, "client")
        self._ids: list[str] = []
        self._requests = 0
        self._is_paused = False

    @property
    def log(self) -> SimLog:
        """Its connection."""
        return self._log

    def act(self) -> None:
        """Send one request, or an old one again."""
        rng = self._world.rng
        if self._has_workflows and rng.random() < 0.15:
            self._newest += rng.random() < 0.4
            self._send(workflows.request_of(rng, self._next_request_id(), self._world.now, self._newest))
            return
        if rng.random() < 0.06:
            self._send_junk()
            return
        if rng.random() < 0.12:
            self._send(self._of_schedule())
            return
        if rng.random() < 0.08:
            self._pause_or_resume() if rng.random() < 0.6 else self._change_a_limit()
            return
        request = self._submission() if not self._ids or rng.random() < 0.5 else self._change(rng.choice(self._ids))
        if request is None:
            return
        self._send(request)

    def leave(self) -> None:
        """At the end nothing fires any more."""
        for number in range(SCHEDULES):
            request_id = self._next_request_id()
            self._send(
                ControlSchedule(request_id=request_id, schedule_id=f"cron-{number}", action=ScheduleAction.DELETE)
            )

    def _pause_or_resume(self) -> None:
        self._is_paused = not self._is_paused
        policy = QueuePolicy(queue="bulk", set_at=self._world.now, is_paused=self._is_paused)
        self._world.say("client", f"bulk is {'paused' if policy.is_paused else 'resumed'}")
        self._world.land(policy_entry(policy, self._codec))

    def _change_a_limit(self) -> None:
        """Beside those that always hold: limits that come, change their kind, and go."""
        limit = self._world.rng.choice(CHANGING)
        self._world.say("client", f"limit {limit.name} is {limit}")
        self._world.land(policy_entry(limit, self._codec))

    def settled(self) -> list[Entry]:
        """At the end no queue is paused, and of the changing limits none holds."""
        policies: list[Policy] = [QueuePolicy(queue="bulk", set_at=self._world.now)]
        policies += [limit for limit in CHANGING if limit.is_removed]
        return [policy_entry(policy, self._codec) for policy in policies]

    def _send(self, request: Request) -> None:
        rng, task_id = self._world.rng, entity_id_of(request)
        is_misplaced = rng.random() < 0.12
        shard = rng.randrange(self._world.shards) if is_misplaced else shard_of(task_id, self._world.shards)
        entry = Entry(TASK_REQUESTS, shard, routing_key(task_id).encode(), self._codec.encode(request))
        self._world.say("client", f"{type(request).__name__} {task_id} → {shard}")
        self._log.append([entry, entry] if rng.random() < 0.05 else [entry])

    def _of_schedule(self) -> Request:
        rng, request_id = self._world.rng, self._next_request_id()
        schedule_id = f"cron-{rng.randrange(SCHEDULES)}"
        kind = rng.random()
        if kind < 0.15:
            return RunSchedule(request_id=request_id, schedule_id=schedule_id, reply_to=0)
        if kind < 0.4:
            action = rng.choice(
                (ScheduleAction.PAUSE, ScheduleAction.RESUME, ScheduleAction.RESUME, ScheduleAction.DELETE)
            )
            return ControlSchedule(request_id=request_id, schedule_id=schedule_id, action=action, reply_to=0)
        retry = RetryPolicy(max_attempts=2, delay_ms=500)
        spec = ScheduleSpec(
            name=schedule_id,
            task=TaskSpec(task_type="work", tenant_id="t", lease_ms=5_000, retry=retry),
            every_ms=rng.choice((1_000, 3_000, 8_000)),
            jitter_ms=rng.choice((0, 0, 2_000)),
            overlap=rng.choice([one for one in OverlapPolicy if one is not OverlapPolicy.UNKNOWN]),
            misfire=rng.choice([one for one in MisfirePolicy if one is not MisfirePolicy.UNKNOWN]),
            misfire_max=2,
            misfire_grace_ms=rng.choice((1_000, 20_000)),
        )
        if kind < 0.6:
            return UpdateSchedule(request_id=request_id, schedule_id=schedule_id, spec=spec, reply_to=0)
        return CreateSchedule(request_id=request_id, schedule_id=schedule_id, spec=spec, reply_to=0)

    def _send_junk(self) -> None:
        rng = self._world.rng
        misfit = AttemptCancelled(task_id="x", attempt=1, worker_id="w", finished_at=0)
        cut = self._codec.encode(CancelTask(request_id="r", task_id="x"))[: rng.randint(5, 8)]
        value = rng.choice((None, b"", b"{}", rng.randbytes(9), cut, self._codec.encode(misfit)))
        topic = TASK_REQUESTS if rng.random() < 0.7 else TASK_REPORTS
        if topic == TASK_REPORTS and value == self._codec.encode(misfit):
            value = self._codec.encode(CancelTask(request_id="r", task_id="x"))
        self._world.say("client", f"junk {value!r} to {topic}")
        self._log.append([Entry(topic, rng.randrange(self._world.shards), rng.choice((None, b"junk")), value)])

    def _next_request_id(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def _submission(self) -> SubmitTask:
        rng, now = self._world.rng, self._world.now
        key = f"k{rng.randint(0, 5)}" if rng.random() < 0.15 else None
        task_id: str | None = keyed_task_id("t", key) if key else f"task-{len(self._ids)}"
        if rng.random() < 0.08:
            task_id = None
        elif task_id not in self._ids:
            self._ids.append(task_id or "")
        is_invalid = task_id is not None and key is None and rng.random() < 0.05
        unique = (
            self._uniqueness()
            if key is None and task_id is not None and not is_invalid and rng.random() < 0.15
            else None
        )
        if unique is not None:
            task_id = f"{unique_root_of('t', unique.key)}.{len(self._ids)}"
            self._ids.append(task_id)
        spec = TaskSpec(
            task_type="no name" if is_invalid else "work",
            tenant_id="t",
            queue=rng.choice(QUEUES),
            priority=rng.choice(list(Priority)),
            scheduled_at=rng.choice((None, None, now + rng.choice((3, 10, 30, 60, 300)) * SECOND, now - SECOND)),
            start_deadline_at=now + 40 * SECOND if rng.random() < 0.1 else None,
            timeout_ms=rng.choice((None, None, 4_000)),
            total_timeout_ms=60_000 if rng.random() < 0.1 else None,
            lease_ms=rng.choice((5_000, 300_000)),
            retry=RetryPolicy(
                max_attempts=rng.randint(1, 4),
                delay_ms=rng.choice((0, 500, 3_000)),
                backoff=rng.choice(list(Backoff)),
                jitter=rng.choice(list(Jitter)),
            ),
            idempotency_key=key,
            unique=unique,
            metadata={"account": f"a{rng.randrange(2)}"} if rng.random() < 0.4 else {},
        )
        fingerprint = f"f{rng.randint(0, 1)}" if key else None
        return SubmitTask(
            request_id=self._next_request_id(),
            spec=spec,
            submitted_at=now,
            task_id=task_id,
            fingerprint=fingerprint,
            reply_to=rng.choice((0, None)),
        )

    def _uniqueness(self) -> Uniqueness:
        rng = self._world.rng
        scope = rng.choice((UniqueScope.LIVE, UniqueScope.WAITING, UniqueScope.WINDOW, UniqueScope.DEBOUNCE))
        window_ms = rng.choice((2_000, 10_000)) if scope in (UniqueScope.WINDOW, UniqueScope.DEBOUNCE) else 0
        max_ms = window_ms * 2 if scope is UniqueScope.DEBOUNCE and rng.random() < 0.5 else None
        return Uniqueness(key=f"{scope}-{rng.randrange(2)}", scope=scope, window_ms=window_ms, max_ms=max_ms)

    def _change(self, task_id: str) -> Request | None:
        rng, request_id = self._world.rng, self._next_request_id()
        kind = rng.random()
        shown, _ = self._facts.view(task_id, rng.choice((0, 0, 3, 50))) if rng.random() < 0.6 else (None, 0)
        if kind < 0.35:
            return CancelTask(request_id=request_id, task_id=task_id, reply_to=0, task=shown)
        if kind < 0.7:
            return UpdateTask(
                request_id=request_id,
                task_id=task_id,
                task=shown,
                scheduled_at=self._world.now + rng.randint(-5, 90) * SECOND if rng.random() < 0.7 else None,
                priority=rng.choice((None, *Priority)),
                payload=rng.choice((None, b"new")),
                reply_to=0,
            )
        lag = rng.choice((0, 0, 3, 50))
        candidates = [self._facts.view(task_id, lag) for task_id in self._ids]
        ended = [(t, offset) for t, offset in candidates if t and t.status in (Status.DEAD, Status.FAILED)]
        if not ended:
            return None
        shown, view_offset = rng.choice(ended)
        request = RedriveTask if rng.random() < 0.8 or shown.status is Status.FAILED else DiscardTask
        return request(request_id=request_id, task=shown, view_offset=view_offset, reply_to=0)


@dataclass
class Running:
    """An attempt on a worker."""

    ready: ReadyTask
    ends_at: int
    is_cancelled: bool = False


class Worker:
    """Takes ready records, reports, beats; obeys signals when it hears them."""

    def __init__(self, world: World, codec: Codec, name: str, slots: int) -> None:
        self._world, self._codec, self.name, self._slots = world, codec, name, slots
        self.log = SimLog(world, name)
        self._ready = [self.log.member(worker_group(q), [ready_topic(q, p) for p in Priority]) for q in QUEUES]
        self._signals = self.log.reader()
        signals = TopicPartition(WORKER_SIGNALS, 0)
        self._signals.seek(signals, self.log.end_offset(signals))
        self._running: dict[tuple[str, int], Running] = {}
        self._revoked: deque[tuple[str, int, int]] = deque(maxlen=500)
        self._cancelled: deque[tuple[str, int]] = deque(maxlen=500)
        self._epochs: defaultdict[int, int] = defaultdict(int)
        self._beat_at = 0
        self.wakes_at = 0

    def act(self) -> None:
        """One turn: signals, new records, ends of attempts, heartbeat."""
        self.log.poll(0)
        self._hear()
        self._take()
        self._end_some()
        if self._world.now >= self._beat_at:
            self._beat()

    def leave(self) -> None:
        """An ordered shutdown: what runs is given back."""
        self._world.say(self.name, "leaves")
        for running in list(self._running.values()):
            self._report(running.ready, self._returned(running.ready, is_started=True, reason="shutdown"))
        self._running.clear()
        self._beat(is_last=True)
        for member in self._ready:
            member.close()

    def _report(self, ready: ReadyTask, report: Message) -> None:
        self.log.append([Entry(TASK_REPORTS, ready.shard, None, self._codec.encode(report))])

    def _hear(self) -> None:
        for record in self._signals.take(100):
            signal = self._codec.decode(record.value or b"")
            if not isinstance(signal, WorkerSignal) or self._is_superseded(signal):
                continue
            if signal.worker_id not in (self.name, EVERY_WORKER):
                continue
            key = signal.task_id, signal.attempt
            if signal.kind is SignalKind.REVOKE:
                if signal.task_version is not None:
                    self._revoked.append((*key, signal.task_version))
                running = self._running.get(key)
                if running and signal.task_version in (None, running.ready.task_version):
                    if signal.epoch < running.ready.epoch:
                        raise Violated(f"an attempt was revoked by an owner before the one that sent it out: {signal}")
                    del self._running[key]
            else:
                self._cancelled.append(key)
                if key in self._running:
                    self._running[key].is_cancelled = True
                    self._running[key].ends_at = self._world.now + self._world.rng.randint(0, 2) * SECOND

    def _is_superseded(self, signal: WorkerSignal) -> bool:
        shard = shard_of(signal.task_id, self._world.shards)
        is_old = 0 < signal.epoch < self._epochs[shard]
        self._epochs[shard] = max(self._epochs[shard], signal.epoch)
        return is_old

    def _take(self) -> None:
        for member in self._ready:
            for partition in sorted(member.assigned()):
                if not member.is_begun(partition):
                    member.resume(partition)
            for record in member.take(4):
                ready = self._codec.decode(record.value or b"")
                assert isinstance(ready, ReadyTask)
                self._pick(ready)
                member.commit({TopicPartition(record.topic, record.partition): record.offset + 1})

    def _pick(self, ready: ReadyTask) -> None:
        key, rng = (ready.task_id, ready.attempt), self._world.rng
        self._epochs[ready.shard] = max(self._epochs[ready.shard], ready.epoch)
        if key in self._running or (*key, ready.task_version) in self._revoked:
            return
        if len(self._running) >= self._slots:
            self._report(ready, self._returned(ready, is_started=False, reason="no free slot"))
            return
        if rng.random() < 0.01:
            return  # lost on the way: taken, committed, never started
        started = AttemptStarted(
            task_id=ready.task_id,
            task_version=ready.task_version,
            attempt=ready.attempt,
            worker_id=self.name,
            started_at=self._world.now,
        )
        self._report(ready, started)
        ends_at = self._world.now + rng.choice((0, 0, 100_000, SECOND, 20 * SECOND))
        if ready.timeout_ms is not None:
            ends_at = min(ends_at, self._world.now + ready.timeout_ms * 1000)
        self._running[key] = Running(ready, ends_at, key in self._cancelled)

    def _returned(self, ready: ReadyTask, *, is_started: bool, reason: str) -> AttemptReturned:
        return AttemptReturned(
            task_id=ready.task_id,
            attempt=ready.attempt,
            worker_id=self.name,
            returned_at=self._world.now,
            is_started=is_started,
            reason=reason,
        )

    def _end_some(self) -> None:
        rng = self._world.rng
        for key, running in list(self._running.items()):
            if running.ends_at <= self._world.now:
                report = self._outcome(running)
                if not isinstance(report, AttemptCheckpointed):
                    del self._running[key]
                else:
                    running.ends_at = self._world.now + SECOND
                self._report(running.ready, report)
                if rng.random() < 0.05:
                    self._report(running.ready, report)  # told twice

    def _outcome(self, running: Running) -> Message:
        rng, ready = self._world.rng, running.ready
        about = {"task_id": ready.task_id, "attempt": ready.attempt, "worker_id": self.name}
        now = self._world.now
        if running.is_cancelled and rng.random() < 0.9:
            return AttemptCancelled(**about, finished_at=now)  # type: ignore[arg-type]
        kind = rng.random()
        if kind < 0.55:
            return AttemptSucceeded(**about, finished_at=now, result=b"1")  # type: ignore[arg-type]
        if kind < 0.85:
            verdict = Verdict.PERMANENT if kind > 0.8 else Verdict.UNKNOWN
            error = TaskError(kind=ErrorKind.RAISED, type="ValueError", message="no", verdict=verdict)
            return AttemptFailed(**about, finished_at=now, error=error)  # type: ignore[arg-type]
        if kind < 0.9:
            return AttemptSnoozed(**about, finished_at=now, delay_ms=1_000)  # type: ignore[arg-type]
        if kind < 0.95:
            return AttemptCrashed(**about, finished_at=now, detail="exit code -9")  # type: ignore[arg-type]
        return AttemptCheckpointed(**about, checkpointed_at=now, checkpoint=b"7")  # type: ignore[arg-type]

    def _beat(self, *, is_last: bool = False) -> None:
        self._beat_at = self._world.now + HEARTBEAT_US
        for shard in range(self._world.shards):
            mine = [r.ready for r in self._running.values() if r.ready.shard == shard]
            heartbeat = WorkerHeartbeat(
                worker_id=self.name,
                sent_at=self._world.now,
                free_slots=self._slots - len(self._running),
                running=tuple(RunningAttempt(task_id=r.task_id, attempt=r.attempt) for r in mine),
                is_last=is_last,
            )
            self.log.append([Entry(TASK_REPORTS, shard, None, self._codec.encode(heartbeat))])
