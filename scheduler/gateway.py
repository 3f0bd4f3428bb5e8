"""The way of requests into the log, and of the shards' replies back to those who wait for them.

A gateway has a partition of the topic `replies` for itself; every request says so in `reply_to`. Requests are appended
in the caller's thread. One thread of the gateway's own polls the connection, reads the replies and ends each wait: with
the reply, with what went wrong, or with Undecided when the deadline passed. It never waits longer than that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple, TypeAlias

import structlog
from msgspec.structs import replace

from scheduler.core.policies import Policies
from scheduler.core.routing import entity_id_of
from scheduler.policy_topic import PolicyFollower, policy_entry
from scheduler.ports import Entry, Log, MessageCodec, Reader, TopicPartition
from scheduler.queue_stats import Amounts, StatsFollower
from schemas.errors import DecodeError, Fatal, Retriable, TidewheelIOError
from schemas.ids import routing_key, shard_of
from schemas.limits import REQUESTS_PENDING_MAX
from schemas.messages import Policy, Replies, Reply, Request
from schemas.topics import REPLIES, TASK_REQUESTS

_log = structlog.get_logger(__name__)

IDLE_POLL_S = 0.25  # the grain of deadlines when nothing is going on
TAKE_MAX = 1_000  # reply records at a time; each holds those of a whole batch
SLICE = 100  # requests appended at a time on an event loop, so that a bulk call does not hold it up
RETRY_PAUSE_S = 0.05  # between tries when the log fails


class Undecided(Retriable):
    """A request was sent and no decision was seen: it may have been accepted, or still be."""


Answer: TypeAlias = Reply | TidewheelIOError
OnReply: TypeAlias = Callable[[Answer], None]


class _Waiter(NamedTuple):
    on_reply: OnReply
    loop: asyncio.AbstractEventLoop | None  # whose thread calls `on_reply`; None: the gateway's
    give_up_at: float


class _Said:
    """A policy that is on its way to its topic and back."""

    def __init__(self) -> None:
        self.offset: int | None = None
        self.failure: TidewheelIOError | None = None
        self.is_over = threading.Event()

    def end(self, failure: TidewheelIOError | None = None) -> None:
        self.failure = failure
        self.is_over.set()


class _Gathered(NamedTuple):
    requests: list[Request]
    takers: list[OnReply]


class Gateway:
    """Sends requests and resolves them by their replies. `run` owns the connection and closes it at its end."""

    def __init__(
        self,
        log: Log,
        codec: MessageCodec,
        *,
        shards: int,
        partition: int,
        deadline_s: float = 10.0,
        pending_max: int = REQUESTS_PENDING_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partition = partition
        self.shards = shards
        self._log = log
        self._codec = codec
        self._deadline_s = deadline_s
        self._pending_max = pending_max
        self._monotonic = monotonic
        self._pending: dict[str, _Waiter] = {}  # in the order of their deadlines
        self._said: list[_Said] = []
        self._following: PolicyFollower | None = None
        self._stats: StatsFollower | None = None
        self._gathered: dict[asyncio.AbstractEventLoop, _Gathered] = {}  # each entry is its loop's alone
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._failure: TidewheelIOError | None = Retriable("the gateway is not running")
        self._thread: threading.Thread | None = None
        self._turned_at = monotonic()

    # --- asking -------------------------------------------------------------------------------------------------------

    def send(self, requests: Sequence[Request], on_reply: OnReply) -> None:
        """Append requests now; `on_reply` is called once for each, from the gateway's thread, in no given order.

        Thread-safe. Raises Retriable if too many are pending or the log's buffer is full: then nothing was sent.
        """
        self._append(requests, [on_reply] * len(requests), None)

    def ask(self, request: Request) -> Reply:
        """Send a request and wait for its decision. Raises Undecided at the deadline, or what went wrong."""
        return _reply_of(self.ask_many([request])[0])

    def ask_many(self, requests: Sequence[Request]) -> list[Answer]:
        """Send requests and wait for all decisions; in the order of the requests, errors in place of replies."""
        done = threading.Event()
        answers = _Answers(len(requests), done.set)
        for start in range(0, len(requests), SLICE):
            part = requests[start : start + SLICE]
            self._append_or_refuse(part, [partial(answers.put, start + i) for i in range(len(part))], None)
        # The gateway's thread ends every wait; the margin is for the case that it is stuck itself.
        if requests and not done.wait(self._deadline_s + 2.0):
            return answers.so_far(Undecided("the gateway made no progress; the request may still be accepted"))
        return answers.so_far()

    async def ask_async(self, request: Request) -> Reply:
        """`ask` for an event loop."""
        return _reply_of((await self.ask_many_async([request]))[0])

    async def ask_many_async(self, requests: Sequence[Request]) -> list[Answer]:
        """`ask_many` for an event loop."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        answers = _Answers(len(requests), partial(_complete, done))
        for start in range(0, len(requests), SLICE):
            if start:
                await asyncio.sleep(0)
            self._gather(requests[start : start + SLICE], start, answers, loop)
        if requests:
            await done
        return answers.so_far()

    def _gather(
        self, requests: Sequence[Request], start: int, answers: _Answers, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Append at once, or with all that others on the loop ask in the same turn: many cost little more than one."""
        takers = [partial(answers.put, start + i) for i in range(len(requests))]
        gathered = self._gathered.get(loop)
        if gathered is None:
            self._gathered[loop] = _Gathered([], [])
            loop.call_soon(self._append_gathered, loop)
            self._append_or_refuse(requests, takers, loop)
        else:
            gathered.requests.extend(requests)
            gathered.takers.extend(takers)

    def _append_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        gathered = self._gathered.pop(loop)
        if not gathered.requests:
            return
        try:
            self._append_or_refuse(gathered.requests, gathered.takers, loop)
        except Exception as error:  # one request's fault must not leave the others of this turn without an answer
            for take in gathered.takers:
                take(Fatal(f"a request could not be sent: {error!r}"))

    def _append_or_refuse(
        self, requests: Sequence[Request], takers: Sequence[OnReply], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        try:
            self._append(requests, takers, loop)
        except TidewheelIOError as error:
            for take in takers:
                take(error)

    def _append(
        self, requests: Sequence[Request], takers: Sequence[OnReply], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        entries = [self._entry(request) for request in requests]
        request_ids = [request.request_id for request in requests]
        with self._lock:
            self._raise_failure()
            if len(self._pending) + len(requests) > self._pending_max:
                raise Retriable(
                    f"{len(self._pending)} requests wait for a decision, which is all that one gateway takes"
                )
            give_up_at = self._monotonic() + self._deadline_s
            for request_id, take in zip(request_ids, takers, strict=True):
                self._pending[request_id] = _Waiter(take, loop, give_up_at)
        try:
            self._log.append(entries, partial(self._on_appended, request_ids))
        except TidewheelIOError:
            self._pop(request_ids)
            raise

    def _entry(self, request: Request) -> Entry:
        if request.reply_to != self.partition:
            request = replace(request, reply_to=self.partition)
        task_id = entity_id_of(request)
        if not task_id:
            raise ValueError("a submission through a gateway needs a task id")
        key = routing_key(task_id).encode()
        return Entry(TASK_REQUESTS, shard_of(task_id, self.shards), key, self._codec.encode(request))

    # --- policies -----------------------------------------------------------------------------------------------------

    @property
    def policies(self) -> Policies:
        """What operators say. Raises Retriable as long as not all of it was read."""
        self._raise_failure()
        following = self._following
        if following is None or not following.is_current:
            raise Retriable("policies are still being read")
        return following.policies

    def amounts(self) -> Amounts:
        """What waits and runs in all shards, as far as it was heard of lately. Raises Retriable."""
        self._raise_failure()
        if (stats := self._stats) is None:
            raise Retriable("the gateway has just begun to listen to the shards")
        now_s = self._monotonic()
        return Amounts(tuple(stats.amounts(now_s)), stats.limits(now_s), stats.shards(now_s), self.shards)

    def say(self, policy: Policy) -> None:
        """Write a policy; wait until it is in the log, and holds here.

        Raises ValueError (it could not hold; nothing was written), Retriable (nothing was written) and Undecided.
        """
        if problem := self.policies.problem_of(policy):
            raise ValueError(problem)
        said = _Said()

        def on_ack(result: Sequence[int] | TidewheelIOError) -> None:
            if isinstance(result, TidewheelIOError):
                said.end(Undecided(f"the log did not confirm it; it may hold or not: {result}"))
            else:
                said.offset = result[0]

        with self._lock:
            self._raise_failure()
            self._said.append(said)
        try:
            self._log.append([policy_entry(policy, self._codec)], on_ack)
            if not said.is_over.wait(self._deadline_s):
                raise Undecided(f"the log did not confirm it within {self._deadline_s:g} s; it may hold or not")
        finally:
            with self._lock:
                self._said.remove(said)
        if said.failure is not None:
            raise said.failure

    def _follow(self) -> None:
        following, stats = self._following, self._stats
        if following is None or stats is None:
            return
        now_s = self._monotonic()
        stats.follow(now_s)
        following.follow(round(now_s * 1e6))
        for said in self._said.copy():
            if said.offset is not None and said.offset < following.read_to:
                said.end()

    # --- the gateway's thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in a thread of its own; returns once replies are read. Raises what the log raised meanwhile."""
        self._thread = threading.Thread(target=self.run, name="tidewheel-gateway", daemon=True)
        self._thread.start()
        if not self._ready.wait(self._deadline_s):
            raise Retriable("the log did not answer when the gateway started")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))

    def run(self) -> None:
        """Poll until `close`, in the calling thread; then fail what still waits and close the connection."""
        failure: TidewheelIOError = Retriable("the gateway was closed")
        try:
            with ExitStack() as readers:
                replies = self._opened(readers)
                while not self._closing.is_set():
                    self._turn(replies)
        except TidewheelIOError as error:
            _log.error("gateway_failed", error=str(error))
            failure = error
        except Exception as error:
            _log.exception("gateway_failed")
            failure = Fatal(f"the gateway failed: {error!r}")
        finally:
            self._end(failure)

    def _opened(self, readers: ExitStack) -> Reader:
        own = TopicPartition(REPLIES, self.partition)
        reader = readers.enter_context(closing(self._log.reader()))
        reader.seek(own, self._log.end_offset(own))
        self._following = readers.enter_context(closing(PolicyFollower(self._log, self._codec)))
        self._stats = readers.enter_context(closing(StatsFollower(self._log, self._codec)))
        with self._lock:
            self._failure = None
        self._ready.set()
        return reader

    def _turn(self, reader: Reader) -> None:
        try:
            self._log.poll(IDLE_POLL_S)
            replies = self._decoded(record.value for record in reader.take(TAKE_MAX))
            self._follow()
        except Retriable as error:
            _log.warning("gateway_retries", error=str(error))
            self._closing.wait(RETRY_PAUSE_S)
            replies = []
        self._resolve([(reply.request_id, reply) for reply in replies])
        self._expire()
        self._turned_at = self._monotonic()

    def _decoded(self, values: Iterable[bytes | None]) -> list[Reply]:
        replies: list[Reply] = []
        for value in values:
            try:
                message = self._codec.decode(value or b"")
            except DecodeError as error:
                _log.error("reply_not_decoded", error=str(error))  # whoever waits for it is told at the deadline
                continue
            if isinstance(message, Replies):
                replies.extend(message.replies)
        return replies

    def _on_appended(self, request_ids: Sequence[str], result: Sequence[int] | TidewheelIOError) -> None:
        if isinstance(result, TidewheelIOError):
            error = Undecided(f"the log did not confirm the request, which may still be accepted: {result}")
            self._resolve([(request_id, error) for request_id in request_ids])

    def _expire(self) -> None:
        now = self._monotonic()
        with self._lock:
            late = []
            for request_id, waiter in self._pending.items():
                if waiter.give_up_at > now:
                    break
                late.append(request_id)
        if late:
            error = Undecided(
                f"no decision within {self._deadline_s:g} s; the request may still be accepted: ask how its task or "
                "schedule stands, or repeat it with the same id, idempotency key or name"
            )
            self._resolve([(request_id, error) for request_id in late])

    def _resolve(self, answers: Sequence[tuple[str, Answer]]) -> None:
        """End the waits: here, or with one call per event loop for all that wait there."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OnReply, Answer]]] = {}
        here: list[tuple[OnReply, Answer]] = []
        with self._lock:
            for request_id, answer in answers:
                waiter = self._pending.pop(request_id, None)
                if waiter is None:
                    continue  # it was told before, or asked by an earlier process
                group = here if waiter.loop is None else by_loop.setdefault(waiter.loop, [])
                group.append((waiter.on_reply, answer))
        _settle(here)
        for loop, group in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, group)
            except RuntimeError:
                _log.info("replies_unclaimed", count=len(group), reason="the event loop was closed")

    def _pop(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._pending.pop(request_id, None)

    def _end(self, failure: TidewheelIOError) -> None:
        with self._lock:
            self._failure = failure
            waiting, said = list(self._pending), self._said.copy()
        error = Undecided(f"{failure}; the request may still be accepted")
        self._resolve([(request_id, error) for request_id in waiting])
        for one in said:
            one.end(Undecided(f"{failure}; it may hold or not"))
        self._ready.set()
        self._log.close()

    # --- its state ----------------------------------------------------------------------------------------------------

    def pending(self) -> int:
        """How many requests wait for a decision."""
        return len(self._pending)

    @property
    def failure(self) -> TidewheelIOError | None:
        """Why it takes no requests; None while it does."""
        return self._failure

    def stalled_s(self) -> float:
        """Seconds since the gateway's thread last went through its loop; more than a few mean that it is stuck."""
        return self._monotonic() - self._turned_at

    def close(self) -> None:
        """Stop; what still waits is told that it is undecided. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._log.wake()
        if self._thread is not None:
            self._thread.join(self._deadline_s)


def _complete(done: asyncio.Future[None]) -> None:
    if not done.done():  # whoever waited may have been cancelled
        done.set_result(None)


def _settle(group: Sequence[tuple[OnReply, Answer]]) -> None:
    for on_reply, answer in group:
        try:
            on_reply(answer)
        except Exception:
            _log.exception("reply_callback_failed")


def _reply_of(answer: Answer) -> Reply:
    if isinstance(answer, TidewheelIOError):
        raise answer
    return answer


class _Answers:
    """The answers to one call, by the place of the request."""

    def __init__(self, count: int, on_complete: Callable[[], object]) -> None:
        self._answers: list[Answer | None] = [None] * count
        self._missing = count
        self._on_complete = on_complete
        self._lock = threading.Lock()  # the caller puts what was not sent, the gateway's thread the rest

    def put(self, place: int, answer: Answer) -> None:
        with self._lock:
            self._answers[place] = answer
            self._missing -= 1
            is_complete = self._missing == 0
        if is_complete:
            self._on_complete()

    def so_far(self, missing: Answer | None = None) -> list[Answer]:
        """All answers; `missing` stands for those that did not come."""
        return [answer for place in self._answers if (answer := place or missing) is not None]
