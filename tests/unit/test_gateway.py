"""The gateway: every wait ends once, with the reply, with what went wrong, or with Undecided at the deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.gateway import Answer, Gateway, Undecided
from scheduler.ports import Entry, OnAck, Record, TopicPartition
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable
from schemas.ids import routing_key, shard_of
from schemas.messages import CancelTask, Outcome, Replies, Reply, Request, SubmitTask, TaskSpec
from schemas.topics import REPLIES, TASK_REQUESTS

SHARDS = 4
OWN = 1  # partition of the gateway under test
CODEC = Codec.builtin()
WAIT_S = 20.0


class Shards(threading.Thread):
    """Answers requests as a script says: the replies to the requests taken together go out together."""

    def __init__(self, broker: LocalBroker, reply: Callable[[Request], Reply | None]) -> None:
        super().__init__(name="shards")
        self.seen: list[tuple[Record, Request]] = []
        self._log = broker.connect(commits=True)
        self._reply = reply
        self._is_over = threading.Event()
        self._reader = self._log.reader()
        for shard in range(SHARDS):
            self._reader.seek(TopicPartition(TASK_REQUESTS, shard), 0)

    def run(self) -> None:
        while not self._is_over.is_set():
            self._log.poll(1.0)
            replies: dict[int, list[Reply]] = {}
            for record in self._reader.take(100):
                request = CODEC.decode(record.value)
                assert isinstance(request, SubmitTask | CancelTask)
                self.seen.append((record, request))
                reply = self._reply(request)
                if reply is not None and request.reply_to is not None:
                    replies.setdefault(request.reply_to, []).append(reply)
            for partition, batch in replies.items():
                self._log.append([Entry(REPLIES, partition, None, CODEC.encode(Replies(replies=tuple(batch))))])

    def close(self) -> None:
        self._is_over.set()
        self._log.wake()
        self.join(WAIT_S)


class Stopwatch:
    """A monotonic clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A broker with scripted shards and one gateway."""

    def __init__(self) -> None:
        self.broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(SHARDS))
        self.stopwatch = Stopwatch()
        self.reply: Callable[[Request], Reply | None] = accepted
        self.shards = Shards(self.broker, lambda request: self.reply(request))
        self.gateway = self.gateway_on(self.broker.connect())

    def gateway_on(self, log: LocalLog, *, pending_max: int = 1_000) -> Gateway:
        return Gateway(log, CODEC, shards=SHARDS, partition=OWN, pending_max=pending_max, monotonic=self.stopwatch)

    def close(self) -> None:
        self.gateway.close()
        self.shards.close()
        self.broker.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.shards.start()
    world.gateway.start()
    yield world
    world.close()


def accepted(request: Request) -> Reply:
    assert isinstance(request, SubmitTask | CancelTask)
    return Reply(request_id=request.request_id, outcome=Outcome.ACCEPTED, task_id=request.task_id or "")


def cancel(number: int, task_id: str = "") -> CancelTask:
    return CancelTask(request_id=f"r{number}", task_id=task_id or f"task-{number}.child")


class Answers:
    """Collects answers, and knows when so many are there."""

    def __init__(self, count: int) -> None:
        self.taken: list[Answer] = []
        self._count = count
        self._complete = threading.Event()

    def __call__(self, answer: Answer) -> None:
        self.taken.append(answer)
        if len(self.taken) == self._count:
            self._complete.set()

    def wait(self) -> list[Answer]:
        assert self._complete.wait(WAIT_S)
        return self.taken


def test_a_request_goes_to_its_shard_and_its_reply_comes_back(world: World) -> None:
    reply = world.gateway.ask(cancel(7))
    assert (reply.request_id, reply.outcome) == ("r7", Outcome.ACCEPTED)
    ((record, request),) = world.shards.seen
    assert request.reply_to == OWN
    assert record.partition == shard_of("task-7.child", SHARDS) == shard_of("task-7", SHARDS)
    assert record.key == routing_key("task-7.child").encode() == b"task-7"
    assert world.gateway.pending() == 0


def test_many_answers_come_in_the_order_of_their_requests(world: World) -> None:
    answers = world.gateway.ask_many([cancel(i) for i in range(350)])
    assert [answer.request_id for answer in answers if isinstance(answer, Reply)] == [f"r{i}" for i in range(350)]
    assert world.gateway.ask_many([]) == []


def test_event_loops_are_answered_in_their_own_thread(world: World) -> None:
    async def ask() -> list[Answer]:
        singles = await asyncio.gather(*(world.gateway.ask_async(cancel(i)) for i in range(100)))
        assert [reply.request_id for reply in singles] == [f"r{i}" for i in range(100)]
        return await world.gateway.ask_many_async([cancel(i) for i in range(1000, 1350)])

    answers = asyncio.run(ask())
    assert [answer.request_id for answer in answers if isinstance(answer, Reply)] == [
        f"r{i}" for i in range(1000, 1350)
    ]


def test_a_cancelled_wait_and_a_closed_loop_harm_nobody(world: World) -> None:
    world.reply = lambda request: None
    held: list[Request] = []

    async def give_up() -> None:
        waiting = asyncio.ensure_future(world.gateway.ask_async(cancel(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.append(cancel(1))

    asyncio.run(give_up())
    world.reply = accepted
    world.shards._log.append([Entry(REPLIES, OWN, None, CODEC.encode(Replies(replies=(accepted(held[0]),))))])
    assert world.gateway.ask(cancel(2)).request_id == "r2"


def test_without_a_decision_the_wait_ends_at_the_deadline(world: World) -> None:
    world.reply = lambda request: None if request.request_id in ("r1", "r2") else accepted(request)
    answers = Answers(2)
    world.gateway.send([cancel(1), cancel(2)], answers)
    world.stopwatch.now_s += 9.9
    assert world.gateway.ask(cancel(3)).request_id == "r3"
    assert answers.taken == []
    world.stopwatch.now_s += 0.2
    assert world.gateway.ask(cancel(4)).request_id == "r4"
    late = answers.wait()
    assert all(isinstance(error, Undecided) and "may still be accepted" in str(error) for error in late)
    assert world.gateway.pending() == 0


def test_a_reply_that_comes_late_or_twice_or_broken_is_passed_over(world: World) -> None:
    def twice(request: Request) -> Reply:
        log = world.shards._log
        log.append([Entry(REPLIES, OWN, None, value) for value in (b"\0junk", None, CODEC.encode(cancel(1)))])
        log.append([Entry(REPLIES, OWN, None, CODEC.encode(Replies(replies=(accepted(request),))))])
        return accepted(request)

    world.reply = twice
    assert [world.gateway.ask(cancel(i)).request_id for i in range(3)] == ["r0", "r1", "r2"]


def test_replies_of_an_earlier_process_are_not_read(world: World) -> None:
    world.gateway.ask(cancel(1))
    later = world.gateway_on(world.broker.connect())
    later.start()
    assert later.ask(cancel(1, "other")).task_id == "other"
    later.close()


def test_what_waits_is_bounded(world: World) -> None:
    world.reply = lambda request: None
    small = world.gateway_on(world.broker.connect(), pending_max=150)
    small.start()
    answers = Answers(150)
    small.send([cancel(i) for i in range(100)], answers)
    with pytest.raises(Retriable, match="100 requests wait"):
        small.send([cancel(i) for i in range(200, 251)], answers)
    small.send([cancel(i) for i in range(100, 150)], answers)
    (refused,) = small.ask_many([cancel(999)])
    assert isinstance(refused, Retriable)
    assert not isinstance(refused, Undecided)
    small.close()
    assert all(isinstance(answer, Undecided) for answer in answers.wait())


def test_a_closed_gateway_refuses_and_leaves_nobody_waiting(world: World) -> None:
    world.reply = lambda request: None
    answers = Answers(1)
    world.gateway.send([cancel(1)], answers)
    world.gateway.close()
    (error,) = answers.wait()
    assert isinstance(error, Undecided)
    with pytest.raises(Retriable, match="closed"):
        world.gateway.ask(cancel(2))
    world.gateway.close()


def test_a_gateway_that_never_ran_refuses(world: World) -> None:
    with pytest.raises(Retriable, match="not running"):
        world.gateway_on(world.broker.connect()).ask(cancel(1))


def test_a_submission_must_have_an_id(world: World) -> None:
    with pytest.raises(ValueError, match="task id"):
        world.gateway.ask(SubmitTask(request_id="r", spec=TaskSpec(task_type="a"), submitted_at=0))


class FailingLog(LocalLog):
    """Fails as it is told to."""

    refuses_appends = False
    loses_appends = False
    poll_failure: Exception | None = None
    polled = threading.Event()

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        if self.refuses_appends:
            raise Retriable("the buffer is full")
        if self.loses_appends and on_ack is not None:
            on_ack(Retriable("the disk is full"))
            return
        super().append(entries, on_ack)

    def poll(self, timeout_s: float) -> None:
        failure, self.poll_failure = self.poll_failure, None
        if failure is not None:
            raise failure
        super().poll(timeout_s)


@pytest.fixture
def failing(world: World) -> Iterator[tuple[FailingLog, Gateway]]:
    log = FailingLog(world.broker, commits=False)
    world.broker._connections.append(log)
    gateway = world.gateway_on(log)
    gateway.start()
    yield log, gateway
    gateway.close()


def test_a_full_buffer_is_told_at_once_and_nothing_waits(failing: tuple[FailingLog, Gateway]) -> None:
    log, gateway = failing
    log.refuses_appends = True
    with pytest.raises(Retriable, match="buffer"):
        gateway.send([cancel(1)], Answers(1))
    with pytest.raises(Retriable, match="buffer"):
        asyncio.run(gateway.ask_async(cancel(1)))
    assert gateway.pending() == 0


def test_a_failed_append_is_undecided(failing: tuple[FailingLog, Gateway]) -> None:
    log, gateway = failing
    log.loses_appends = True
    with pytest.raises(Undecided, match="the disk is full"):
        gateway.ask(cancel(1))


def test_a_log_that_fails_for_a_moment_is_polled_again(failing: tuple[FailingLog, Gateway]) -> None:
    log, gateway = failing
    log.poll_failure = Retriable("for a moment")
    log.wake()
    assert gateway.ask(cancel(1)).request_id == "r1"


@pytest.mark.parametrize("failure", [Fatal("the disk is gone"), RuntimeError("a defect")])
def test_a_log_that_failed_for_good_ends_all_waits(
    failing: tuple[FailingLog, Gateway], world: World, failure: Exception
) -> None:
    log, gateway = failing
    world.reply = lambda request: None
    answers = Answers(1)
    gateway.send([cancel(1)], answers)
    log.poll_failure = failure
    log.wake()
    (error,) = answers.wait()
    assert isinstance(error, Undecided)
    with pytest.raises(Fatal):
        gateway.ask(cancel(2))
