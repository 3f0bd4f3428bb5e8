"""A producer that writes requests to the topic, as fast as it can, in a process of its own.

Nobody waits for replies: it is how applications hand over millions of tasks. `python -m benchmarks.producer` takes an
Order as JSON on stdin, and says on its last line how long it took.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec
from confluent_kafka import KafkaException, Producer

from benchmarks.cluster import ClusterStage
from benchmarks.contract import NothingMeasured
from benchmarks.stage import TASK_TYPE
from infra.kafka.settings import KafkaSettings
from schemas.codec import Codec
from schemas.messages import CreateSchedule, MisfirePolicy, OverlapPolicy, ScheduleSpec, SubmitTask, TaskSpec
from schemas.topics import TASK_REQUESTS

DAY_US = 86_400_000_000
FLUSH_S = 600.0
FULL_S = 0.05  # until the client's buffer is looked at again
ZONES = ("UTC", "Europe/Paris", "America/New_York", "Asia/Kolkata")
SETTINGS: dict[str, object] = {
    "acks": "all",
    "enable.idempotence": True,
    "partitioner": "murmur2_random",  # by the id, as the shards are found: no id here has a dot
    "linger.ms": 20,
    "batch.num.messages": 10_000,
    "batch.size": 900_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 262_144,
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written: `count` requests, number `first` first.

    `tasks` are due between `begin_us` and `begin_us + span_us`, evenly if `is_even`, else at random; a start is noted
    under `index`, or if it is None under the number of the task. `schedules` fire by `expression`, or if it is None at
    some minute of a weekday from `weekdays`.
    """

    kind: Literal["tasks", "schedules"]
    count: int
    first: int = 0
    index: int | None = None
    blob: str = ""
    begin_us: int = 0
    span_us: int = 0
    is_even: bool = False
    expression: str | None = None
    weekdays: tuple[int, ...] = ()
    seed: int = 1

    def due_us(self, number: int) -> int:
        """When the task of that number is due, if they are even."""
        return self.begin_us + (number - self.first) * self.span_us // self.count


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    order: Order
    bootstrap: str
    prefix: str


class Named(NamedTuple):
    """The bytes of a request, and the id by which it finds its shard."""

    name: bytes
    value: bytes


def requests_of(order: Order) -> Iterator[Named]:
    """The requests of an order, always the same ones."""
    rng = Random(order.seed)
    make = _tasks if order.kind == "tasks" else _schedules
    return make(order, rng)


def _tasks(order: Order, rng: Random) -> Iterator[Named]:
    """Encoded once: then the id, the instant and the index, whose lengths do not change, are put in their places."""
    numbers = range(order.first, order.first + order.count)
    before, between, after = _template(order)
    for number in numbers:
        due_us = order.due_us(number) if order.is_even else order.begin_us + round(rng.random() * order.span_us)
        name = b"bench%d-%09d" % (order.seed, number)
        yield Named(
            name, b"".join((before, _payload(order, number), between[0], _varint(due_us), between[1], name, after))
        )


def _template(order: Order) -> tuple[bytes, tuple[bytes, bytes], bytes]:
    number, due_us = 123_456_789, order.begin_us
    name, payload = f"bench{order.seed}-{number}", _payload(order, number)
    spec = TaskSpec(task_type=TASK_TYPE, payload=payload, scheduled_at=due_us)
    value = Codec.builtin().encode(SubmitTask(request_id="", spec=spec, submitted_at=1, task_id=name))
    before, rest = _halves(value, payload)
    between, rest = _halves(rest, _varint(due_us))
    after_due, after = _halves(rest, name.encode())
    return before, (between, after_due), after


def _halves(value: bytes, part: bytes) -> tuple[bytes, bytes]:
    before, _, after = value.partition(part)
    assert part in value and part not in after
    return before, after


def _varint(value: int) -> bytes:
    """As Avro writes a long that is not negative."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _schedules(order: Order, rng: Random) -> Iterator[Named]:
    for number in range(order.first, order.first + order.count):
        name = f"schedule{order.seed}-{number}"
        expression, zone = order.expression, "UTC"
        if expression is None:
            expression = f"{rng.randrange(60)} {rng.randrange(24)} * * {rng.choice(order.weekdays)}"
            zone = rng.choice(ZONES)
        spec = ScheduleSpec(
            name=name,
            task=TaskSpec(task_type=TASK_TYPE, payload=_payload(order, number)),
            cron_expression=expression,
            timezone=zone,
            overlap=OverlapPolicy.ALLOW,
            misfire=MisfirePolicy.ALL,
            misfire_max=1_000,
        )
        request = CreateSchedule(request_id="", schedule_id=name, spec=spec)
        yield Named(name.encode(), Codec.builtin().encode(request))


def _payload(order: Order, number: int) -> bytes:
    index = number if order.index is None else order.index
    return f'{{"index":{index:<9},"blob":"{order.blob}"}}'.encode()


def write(requests: Iterator[Named], kafka: KafkaSettings) -> int:
    """Write requests, and return how many once all are acknowledged. NothingMeasured: some were not."""
    failures: list[str] = []

    def on_delivery(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(str(error))

    producer = Producer(kafka.client(**SETTINGS))
    topic, count = kafka.prefix + TASK_REQUESTS, 0
    for name, value in requests:
        while True:
            try:
                producer.produce(topic, value, name, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(FULL_S)
        count += 1
        if count % 1_000 == 0:
            producer.poll(0)
    if producer.flush(FLUSH_S) or failures:
        raise NothingMeasured(f"requests were not taken by the brokers: {failures[:1] or 'no answer'}")
    return count


@contextmanager
def sending(stage: ClusterStage, order: Order) -> Iterator[subprocess.Popen[bytes]]:
    """Write an order in a process of its own; `wait_for` it within the block, after which it is no more."""
    job = _Work(order=order, bootstrap=stage.kafka.bootstrap, prefix=stage.kafka.prefix)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.producer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(job))
    process.stdin.close()
    process.stdin = None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(process: subprocess.Popen[bytes], timeout_s: float) -> float:
    """Until all is acknowledged by the brokers; how many seconds that took there. NothingMeasured: it failed."""
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise NothingMeasured(f"the producer did not end within {timeout_s:.0f} s") from error
    if process.returncode:
        raise NothingMeasured(f"the producer ended with code {process.returncode}")
    return float(said.splitlines()[-1])


def main() -> int:
    """Take an order from stdin."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Work)
    begun_s = time.perf_counter()
    try:
        write(requests_of(job.order), KafkaSettings(bootstrap=job.bootstrap, prefix=job.prefix))
    except (NothingMeasured, KafkaException) as error:
        print(error, file=sys.stderr)
        return 1
    print(round(time.perf_counter() - begun_s, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
