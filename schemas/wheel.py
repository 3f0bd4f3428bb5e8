"""The shape of the delay wheel, which topics and shards share; `scheduler.core.wheel` tells how it works."""

from __future__ import annotations

import msgspec

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US


class WheelShape(msgspec.Struct, frozen=True, kw_only=True):
    """How long a window lasts and how long before it begins it is opened, by level; and the slots of each level.

    By default 16 slots of 1 minute, 15 minutes, 3 h 45 min and 56 h 15 min: 37.5 days; what is due later is parked
    again in the last level. Fixed for the life of a cluster: slots are found by arithmetic. ValueError: a task that is
    read from a level might not fit into the next finer one, or could be read only after it is due.
    """

    widths_us: tuple[int, ...] = (MINUTE_US, 15 * MINUTE_US, 225 * MINUTE_US, 3_375 * MINUTE_US)
    leads_us: tuple[int, ...] = (30 * SECOND_US, MINUTE_US, 10 * MINUTE_US, 120 * MINUTE_US)
    slots: int = 16

    def __post_init__(self) -> None:
        if len(self.widths_us) != len(self.leads_us) or not self.widths_us or self.slots < 2:
            raise ValueError("a wheel has at least one level, a lead for each, and at least two slots")
        if any(lead < 1 for lead in self.leads_us):
            raise ValueError("leads_us: a slot must be opened before its window begins")
        for level in range(1, len(self.widths_us)):
            finer, width = self.widths_us[level - 1], self.widths_us[level]
            if width % finer or width <= finer:
                raise ValueError(f"widths_us: {width} of level {level} is no multiple of {finer} below it")
            if self.leads_us[level] + width > self.leads_us[level - 1] + self.slots * finer:
                raise ValueError(f"leads_us: level {level - 1} does not reach to the end of a window of level {level}")

    @property
    def levels(self) -> range:
        """The levels, the finest first."""
        return range(len(self.widths_us))
