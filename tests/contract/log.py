"""The contract of `ports.Log`, for any adapter."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import pytest

from scheduler.ports import Entry, Log, Member, Reader, Record, TopicPartition
from schemas.errors import Fatal, TidewheelIOError
from tests.harness import eventually

POLLS_MAX = 3_000
POLL_S = 0.01
WAIT_S = 30.0  # until what should have ended is given up


class LogWorld(Protocol):
    """What a test is given: connections to one log, and names that nothing used before."""

    def connect(self) -> Log:
        """A new connection, closed at the end of the test."""

    def topic(self) -> str:
        """A topic with at least two partitions and no records."""

    def group(self) -> str:
        """A group that nobody joined yet."""


def poll_until(condition: Callable[[], bool], *logs: Log) -> None:
    """Poll `logs` in turn until `condition` holds."""
    for _ in range(POLLS_MAX):
        if condition():
            return
        for log in logs:
            log.poll(POLL_S)
    raise AssertionError(f"still not after {POLLS_MAX} polls")


def append_and_wait(log: Log, entries: Sequence[Entry]) -> list[int]:
    """Append and return the acknowledged offsets."""
    acks: list[Sequence[int] | TidewheelIOError] = []
    log.append(entries, acks.append)
    poll_until(lambda: bool(acks), log)
    (ack,) = acks
    assert not isinstance(ack, TidewheelIOError), ack
    return list(ack)


def take_count(log: Log, source: Reader | Member, count: int, *, limit: int = 1_000) -> list[Record]:
    """Take exactly `count` records; more would be found out too."""
    taken: list[Record] = []

    def has_all() -> bool:
        taken.extend(source.take(limit))
        return len(taken) >= count

    poll_until(has_all, log)
    assert len(taken) == count
    return taken


def numbered(topic: str, partition: int, numbers: Iterable[int]) -> list[Entry]:
    """Entries that can be told apart."""
    return [Entry(topic, partition, b"k%d" % number, b"v%d" % number) for number in numbers]


def values_of(records: Iterable[Record]) -> list[bytes | None]:
    """The values, in the order of the records."""
    return [record.value for record in records]


class LogContract:
    """Every adapter of `Log` passes these; a subclass gives the fixture `world`."""

    members_agree = False  # whether nobody is given anything before all members of the group were polled

    def test_a_ready_topic_can_be_written_soon_after_it_is_first_asked_for(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        poll_until(lambda: log.ready_partitions(topic) > 0, log)
        assert log.ready_partitions(topic) == log.partitions(topic)

    # --- appending and acknowledgements -------------------------------------------------------------------------------

    def test_acknowledged_offsets_are_where_readers_find_the_entries(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        entries = [*numbered(topic, 0, range(3)), *numbered(topic, 1, range(3, 5)), *numbered(topic, 0, [5])]
        offsets = append_and_wait(log, entries)
        reader = log.reader()
        for partition in (0, 1):
            reader.seek(TopicPartition(topic, partition), 0)
        found = {(record.partition, record.offset): record for record in take_count(log, reader, len(entries))}
        for entry, offset in zip(entries, offsets, strict=True):
            record = found[entry.partition, offset]
            assert (record.topic, record.key, record.value) == (entry.topic, entry.key, entry.value)

    def test_acknowledgements_come_once_each_and_in_order_for_each_partition(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        called: list[int] = []
        for number in range(50):
            log.append(numbered(topic, number % 2, [number]), functools.partial(note, called, number))
        poll_until(lambda: len(called) >= 50, log)
        log.poll(0)
        for partition in (0, 1):
            assert [number for number in called if number % 2 == partition] == list(range(partition, 50, 2))

    def test_acknowledgements_come_from_poll_alone(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        threads: list[int] = []
        appending = threading.Thread(
            target=log.append, args=(numbered(topic, 0, [1]), lambda _: threads.append(threading.get_ident()))
        )
        appending.start()
        appending.join()
        poll_until(lambda: bool(threads), log)
        assert threads == [threading.get_ident()]

    def test_an_append_of_nothing_is_acknowledged(self, world: LogWorld) -> None:
        assert append_and_wait(world.connect(), []) == []

    def test_a_callback_may_append(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        acks: list[str] = []
        log.append(
            numbered(topic, 0, [1]), lambda _: log.append(numbered(topic, 1, [2]), lambda _: acks.append("second"))
        )
        poll_until(lambda: bool(acks), log)
        assert acks == ["second"]

    def test_keys_and_values_may_be_absent_empty_or_large(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        pairs = [(None, None), (b"", b""), (None, b"v"), (b"k", None), (b"\x00", bytes(300_000))]
        append_and_wait(log, [Entry(topic, 0, key, value) for key, value in pairs])
        reader = log.reader()
        reader.seek(TopicPartition(topic, 0), 0)
        assert [(record.key, record.value) for record in take_count(log, reader, len(pairs))] == pairs

    def test_threads_append_through_one_connection_without_loss_and_each_in_its_order(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        threads, per_thread = 4, 200
        acked: list[int] = []

        def append(thread: int) -> None:
            for number in range(per_thread):
                entry = Entry(topic, number % 2, b"%d" % thread, b"%d" % number)
                log.append([entry], lambda offsets: acked.extend(offsets))  # type: ignore[arg-type]

        running = [threading.Thread(target=append, args=(thread,)) for thread in range(threads)]
        for one in running:
            one.start()
        poll_until(lambda: len(acked) == threads * per_thread, log)
        for one in running:
            one.join()
        reader = log.reader()
        for partition in (0, 1):
            reader.seek(TopicPartition(topic, partition), 0)
        records = take_count(log, reader, threads * per_thread)
        for thread in range(threads):
            for partition in (0, 1):
                own = [r.value for r in records if r.key == b"%d" % thread and r.partition == partition]
                assert own == [b"%d" % number for number in range(partition, per_thread, 2)]

    # --- readers ------------------------------------------------------------------------------------------------------

    def test_a_reader_gets_each_partition_in_order_however_little_it_takes(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        append_and_wait(log, [*numbered(topic, 0, range(40)), *numbered(topic, 1, range(40))])
        reader = log.reader()
        for partition in (0, 1):
            reader.seek(TopicPartition(topic, partition), 0)
        records = take_count(log, reader, 80, limit=7)
        for partition in (0, 1):
            own = [record for record in records if record.partition == partition]
            assert values_of(own) == [b"v%d" % number for number in range(40)]
            assert [record.offset for record in own] == sorted({record.offset for record in own})

    def test_take_keeps_to_its_limit(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        append_and_wait(log, numbered(topic, 0, range(20)))
        reader = log.reader()
        reader.seek(TopicPartition(topic, 0), 0)
        sizes: list[int] = []

        def has_all() -> bool:
            sizes.append(len(reader.take(3)))
            return sum(sizes) == 20

        poll_until(has_all, log)
        assert max(sizes) <= 3

    def test_a_reader_begins_where_it_seeks_and_may_seek_again(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        offsets = append_and_wait(log, numbered(topic, 0, range(10)))
        reader = log.reader()
        reader.seek(TopicPartition(topic, 0), offsets[6])
        assert values_of(take_count(log, reader, 4)) == [b"v6", b"v7", b"v8", b"v9"]
        reader.seek(TopicPartition(topic, 0), offsets[8])
        assert values_of(take_count(log, reader, 2)) == [b"v8", b"v9"]

    def test_readers_do_not_disturb_each_other(self, world: LogWorld) -> None:
        writer, first, second, topic = world.connect(), world.connect(), world.connect(), world.topic()
        append_and_wait(writer, numbered(topic, 0, range(5)))
        readers = [log.reader() for log in (first, second)]
        for log, reader in zip((first, second), readers, strict=True):
            reader.seek(TopicPartition(topic, 0), 0)
            assert len(take_count(log, reader, 5)) == 5

    def test_a_reader_at_the_end_sees_what_comes_later_and_nothing_else(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        partition = TopicPartition(topic, 0)
        offsets = append_and_wait(log, numbered(topic, 0, range(5)))
        end = log.end_offset(partition)
        assert end > offsets[-1]
        reader = log.reader()
        reader.seek(partition, end)
        append_and_wait(log, numbered(topic, 0, [5]))
        assert values_of(take_count(log, reader, 1)) == [b"v5"]

    def test_a_reader_may_be_closed_after_its_connection(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        reader = log.reader()
        reader.seek(TopicPartition(topic, 0), 0)
        append_and_wait(log, numbered(topic, 0, range(3)))
        log.close()
        reader.close()
        assert not reader.take(10)

    def test_a_closed_reader_can_be_closed_again(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        partition = TopicPartition(topic, 0)
        append_and_wait(log, numbered(topic, 0, range(3)))
        closed, other = log.reader(), log.reader()
        for reader in (closed, other):
            reader.seek(partition, 0)
        closed.close()
        closed.close()
        with pytest.raises(Fatal, match="closed"):
            closed.seek(partition, 0)
        assert values_of(take_count(log, other, 3)) == [b"v0", b"v1", b"v2"]
        assert not closed.take(10)

    def test_trim_takes_nothing_from_its_offset_on(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        partition = TopicPartition(topic, 0)
        offsets = append_and_wait(log, numbered(topic, 0, range(20)))
        log.trim(partition, offsets[12])
        append_and_wait(log, numbered(topic, 0, [20]))
        reader = log.reader()
        reader.seek(partition, 0)
        taken: list[Record] = []

        def has_last() -> bool:
            taken.extend(reader.take(100))
            return bool(taken) and taken[-1].value == b"v20"

        poll_until(has_last, log)
        assert values_of(taken)[-9:] == [b"v%d" % number for number in range(12, 21)]
        assert values_of(taken) == [b"v%d" % number for number in range(21 - len(taken), 21)]

    # --- waiting ------------------------------------------------------------------------------------------------------

    def test_wake_ends_the_next_poll(self, world: LogWorld) -> None:
        log = world.connect()
        poll_until(lambda: True, log)
        log.wake()
        polling = polling_for_long(log)
        polling.join(WAIT_S)
        assert not polling.is_alive(), "it was woken before it began"

    def test_wake_ends_a_waiting_poll(self, world: LogWorld) -> None:
        log = world.connect()
        polling = polling_for_long(log)

        def has_ended() -> bool:
            log.wake()
            return not polling.is_alive()

        assert polling.is_alive(), "nothing else ends it"
        eventually(has_ended, "the end of the poll")
        assert not polling.is_alive()

    @pytest.mark.timeout(60)
    def test_no_record_is_slept_over(self, world: LogWorld) -> None:
        writer, log, topic = world.connect(), world.connect(), world.topic()
        reader = log.reader()
        reader.seek(TopicPartition(topic, 0), 0)
        heard = threading.Semaphore(0)
        is_done = threading.Event()

        def write() -> None:
            for number in range(40):
                writer.append(numbered(topic, 0, [number]))
                poll_until(lambda: heard.acquire(blocking=False), writer)
            is_done.set()

        writing = threading.Thread(target=write)
        writing.start()
        count = 0
        while count < 40:
            log.poll(60)
            for _ in reader.take(10):
                count += 1
                heard.release()
        writing.join()
        assert is_done.is_set()

    # --- groups -------------------------------------------------------------------------------------------------------

    def test_one_member_has_all_partitions_and_they_are_silent_until_begun(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        append_and_wait(log, numbered(topic, 0, range(3)))
        member = log.member(world.group(), [topic])
        everything = {TopicPartition(topic, number) for number in range(log.partitions(topic))}
        poll_until(lambda: member.assigned() == everything, log)
        for _ in range(5):
            assert not member.take(100)
            log.poll(POLL_S)
        member.resume(TopicPartition(topic, 0))
        assert values_of(take_count(log, member, 3)) == [b"v0", b"v1", b"v2"]

    def test_members_share_the_partitions_and_inherit_those_of_who_left(self, world: LogWorld) -> None:
        first, second, topic, group = world.connect(), world.connect(), world.topic(), world.group()
        everything = {TopicPartition(topic, number) for number in range(first.partitions(topic))}
        one, two = first.member(group, [topic]), second.member(group, [topic])

        def is_shared() -> bool:
            return (
                one.assigned() | two.assigned() == everything
                and not one.assigned() & two.assigned()
                and abs(len(one.assigned()) - len(two.assigned())) <= 1
            )

        poll_until(is_shared, first, second)
        one.close()
        one.close()
        poll_until(lambda: two.assigned() == everything, second)
        assert one.assigned() == frozenset()

    def test_a_member_gets_nothing_more_of_a_partition_that_went_to_another(self, world: LogWorld) -> None:
        first, second, topic, group = world.connect(), world.connect(), world.topic(), world.group()
        one = first.member(group, [topic])
        begin_all(first, one, topic)
        everything = one.assigned()
        two = second.member(group, [topic])
        poll_until(lambda: len(one.assigned()) < len(everything) and bool(two.assigned()), first, second)
        for partition in two.assigned():
            two.resume(partition)
        append_and_wait(second, [entry for key in everything for entry in numbered(topic, key.partition, [1])])
        taken: dict[Member, set[TopicPartition]] = {one: set(), two: set()}

        def has_all() -> bool:
            for member, own in taken.items():
                own |= {TopicPartition(record.topic, record.partition) for record in member.take(100)}
            return taken[one] | taken[two] == everything

        poll_until(has_all, first, second)
        assert taken == {one: one.assigned(), two: two.assigned()}

    def test_a_partition_that_was_away_for_a_moment_is_begun_anew(self, world: LogWorld) -> None:
        first, second, topic, group = world.connect(), world.connect(), world.topic(), world.group()
        one = first.member(group, [topic])
        begin_all(first, one, topic)
        begun = everything = one.assigned()
        two = second.member(group, [topic])
        poll_until(lambda: bool(two.assigned()), second, *([first] if self.members_agree else []))
        two.close()
        append_and_wait(second, [entry for key in everything for entry in numbered(topic, key.partition, [1])])
        found: dict[TopicPartition, bytes | None] = {}

        def has_all() -> bool:
            nonlocal begun
            assigned = one.assigned()
            for partition in assigned - begun:
                one.resume(partition)
            begun = assigned
            found.update((TopicPartition(topic, record.partition), record.value) for record in one.take(100))
            return found.keys() == everything

        poll_until(has_all, first)
        assert found == dict.fromkeys(everything, b"v1")

    def test_groups_do_not_disturb_each_other(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        append_and_wait(log, numbered(topic, 0, range(3)))
        for member in (log.member(world.group(), [topic]), log.member(world.group(), [topic])):
            begin_all(log, member, topic)
            assert len(take_count(log, member, 3)) == 3

    def test_the_next_owner_gets_what_was_not_committed(self, world: LogWorld) -> None:
        first, second, topic, group = world.connect(), world.connect(), world.topic(), world.group()
        append_and_wait(first, numbered(topic, 0, range(10)))
        one = first.member(group, [topic])
        begin_all(first, one, topic)
        records = take_count(first, one, 10)
        one.commit({TopicPartition(topic, 0): records[4].offset + 1})
        one.commit({TopicPartition(topic, 0): records[1].offset + 1})  # never backwards
        one.close()
        two = second.member(group, [topic])
        begin_all(second, two, topic)
        assert values_of(take_count(second, two, 5)) == [b"v%d" % number for number in range(5, 10)]

    def test_a_member_may_begin_elsewhere(self, world: LogWorld) -> None:
        log, topic = world.connect(), world.topic()
        partition = TopicPartition(topic, 1)
        offsets = append_and_wait(log, numbered(topic, 1, range(10)))
        member = log.member(world.group(), [topic])
        poll_until(lambda: partition in member.assigned(), log)
        member.seek(partition, offsets[7])
        assert values_of(take_count(log, member, 3)) == [b"v7", b"v8", b"v9"]

    def test_closing_a_connection_leaves_its_groups(self, world: LogWorld) -> None:
        first, second, topic, group = world.connect(), world.connect(), world.topic(), world.group()
        everything = {TopicPartition(topic, number) for number in range(first.partitions(topic))}
        one, two = first.member(group, [topic]), second.member(group, [topic])
        poll_until(lambda: bool(one.assigned() and two.assigned()), first, second)
        first.close()
        first.close()
        poll_until(lambda: two.assigned() == everything, second)
        assert not one.assigned()


def polling_for_long(log: Log) -> threading.Thread:
    """A thread that polls once, for longer than a test lasts."""
    polling = threading.Thread(target=log.poll, args=(60,), daemon=True)
    polling.start()
    return polling


def note(called: list[int], number: int, _: object) -> None:
    """An `on_ack` that tells its number."""
    called.append(number)


def begin_all(log: Log, member: Member, topic: str) -> None:
    """Wait for all partitions of the topic and resume them."""
    everything = {TopicPartition(topic, number) for number in range(log.partitions(topic))}
    poll_until(lambda: member.assigned() == everything, log)
    for partition in everything:
        member.resume(partition)
