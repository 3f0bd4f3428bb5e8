"""The delay wheel of one shard: in which slot a task waits that is due far ahead, and which slots are to be read when.

Time is cut into windows, at several levels of coarseness. A window of a level belongs to one of its slots, in rotation;
a slot is a partition of the level's topic. A task that is due later than memory reaches is *parked*: its record lies in
the finest slot in reach. Before a window begins its slot is *opened*: it is read to its end, and each of its tasks goes
to a finer slot or back to memory. docs/decisions/0016-delay-wheel.md tells why each rule is needed.

Pure: instants are arguments, in microseconds; nothing is read or written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from schemas.wheel import WheelShape


class Place(NamedTuple):
    """Where a record is parked."""

    level: int
    window: int


class Marks(NamedTuple):
    """What a checkpoint keeps of a wheel.

    The last window opened, by level; by "level/slot" the offset of what is read next; by "level/window" what waits.
    """

    opened: tuple[int, ...]
    next_offsets: dict[str, int]
    waiting: dict[str, int]


class Hand(msgspec.Struct):
    """How far a level is: no record is parked at or before window `closed`, and all up to `opened` were read.

    `next_offsets` says by slot which record of it is read next; `waiting` about how many lie there, by window.
    After an outage `leap` is set: once every slot was read to its end there is nothing in what lies between.
    """

    closed: int
    opened: int
    next_offsets: dict[int, int]
    waiting: dict[int, int]
    leap: tuple[int, int] | None = None


class Wheel:
    """What a shard knows of its wheel. All of it but what is being read is in the checkpoint."""

    def __init__(self, shape: WheelShape, now: int) -> None:
        """A wheel on which nothing waits: what is due before the first windows end stays in memory."""
        self.shape = shape
        ends = [self._to_be_closed(level, now) for level in shape.levels]
        self.hands = [Hand(closed=end, opened=end, next_offsets={}, waiting={}) for end in ends]
        self._note_hands()

    def resume(self, marks: Marks) -> None:
        """Go on where a checkpoint stands."""
        for hand, opened in zip(self.hands, marks.opened, strict=True):
            hand.closed = hand.opened = opened
            hand.next_offsets.clear()
            hand.waiting.clear()
        for place, offset in marks.next_offsets.items():
            level, slot = map(int, place.split("/"))
            self.hands[level].next_offsets[slot] = offset
        for place, count in marks.waiting.items():
            level, window = map(int, place.split("/"))
            self.hands[level].waiting[window] = count
        self._note_hands()

    def marks(self) -> Marks:
        """What a checkpoint keeps."""
        levels = list(enumerate(self.hands))
        return Marks(
            tuple(hand.opened for hand in self.hands),
            {f"{level}/{slot}": offset for level, hand in levels for slot, offset in hand.next_offsets.items()},
            {f"{level}/{window}": count for level, hand in levels for window, count in hand.waiting.items()},
        )

    # --- where a task waits --------------------------------------------------------------------------------------

    def place_for(self, due_at: int) -> Place | None:
        """The finest slot in reach, or None: it is due so soon that it stays in memory."""
        slots = self.shape.slots
        for level, hand in enumerate(self.hands):
            window = due_at // self.shape.widths_us[level]
            if window <= hand.closed:
                return None
            if window <= hand.closed + slots:
                return Place(level, window)
        return Place(level, hand.closed + slots)  # beyond the horizon: from there it is parked again

    def slot_of(self, place: Place) -> int:
        """The slot of a level that a window belongs to."""
        return place.window % self.shape.slots

    def note_parked(self, place: Place) -> None:
        """Count a record that stands for its task."""
        waiting = self.hands[place.level].waiting
        waiting[place.window] = waiting.get(place.window, 0) + 1

    # --- opening -------------------------------------------------------------------------------------------------

    def _to_be_closed(self, level: int, now: int) -> int:
        return (now + self.shape.leads_us[level]) // self.shape.widths_us[level]

    def close_due(self, now: int) -> None:
        """Let no more be parked where it would be read too late. A clock that was set back changes nothing."""
        for level, hand in enumerate(self.hands):
            hand.closed = max(hand.closed, self._to_be_closed(level, now))
            last_slot = hand.opened + self.shape.slots
            if hand.closed > last_slot and hand.leap is None:
                hand.leap = last_slot, hand.closed

    def next_to_open(self) -> Place | None:
        """The window to be read now, the coarse ones first, which feed the finer ones; None if all were."""
        for level in reversed(self.shape.levels):
            hand = self.hands[level]
            if hand.opened < hand.closed:
                return Place(level, hand.opened + 1)
        return None

    def next_offset(self, place: Place) -> int:
        """The first record of the slot that was not read yet."""
        return self.hands[place.level].next_offsets.get(self.slot_of(place), 0)

    def has_read(self, place: Place, next_offset: int) -> None:
        """The records of the slot below `next_offset` were taken."""
        self.hands[place.level].next_offsets[self.slot_of(place)] = next_offset

    def has_opened(self, place: Place) -> None:
        """The slot was read to its end."""
        hand = self.hands[place.level]
        hand.opened = place.window
        if hand.leap is not None and hand.leap[0] == place.window:
            _, hand.opened = hand.leap
            hand.leap = None
        hand.waiting = {window: count for window, count in hand.waiting.items() if window > hand.opened}
        self._note_hands()

    def is_late(self, due_at: int, place: Place) -> bool:
        """Whether a record in the slot was due before the window being read: whoever wrote it was too late.

        It was a stale owner, or one that kept the task; its id and its marker may be forgotten by now.
        """
        return due_at // self.shape.widths_us[place.level] < place.window

    # --- what was read -------------------------------------------------------------------------------------------

    def was_opened(self, due_at: int) -> bool:
        """Whether every slot that may hold a task due then was read: it is in memory, has changed, or has ended."""
        widths = self.shape.widths_us
        return all(due_at // widths[level] <= hand.opened for level, hand in enumerate(self.hands))

    def read_until(self) -> int:
        """All slots that may hold a task due before this instant were read."""
        return self._read_until

    def next_at(self) -> int:
        """When the next window is to be opened; an instant that has passed if one waits to be."""
        return self._next_at

    def _note_hands(self) -> None:
        """What the loop asks for at every turn is computed when a hand has moved."""
        shape = self.shape
        ends = [(hand.opened + 1) * width for hand, width in zip(self.hands, shape.widths_us, strict=True)]
        self._read_until = min(ends)
        self._next_at = min(end - lead for end, lead in zip(ends, shape.leads_us, strict=True))

    def waiting(self) -> Iterator[tuple[int, int, int]]:
        """Level, beginning of the window, and about how many tasks wait in it. Safe from any thread."""
        for level, hand in enumerate(self.hands):
            for window, count in hand.waiting.copy().items():
                yield level, window * self.shape.widths_us[level], count
