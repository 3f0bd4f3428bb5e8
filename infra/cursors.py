"""Places in lists of schedules, and the text that stands for one: the same in every view."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

import msgspec

from schemas.messages import Schedule


class ScheduleKey(NamedTuple):
    """A place in a list of schedules; keys have the order of the list."""

    tenant_id: str
    name: str
    schedule_id: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ScheduleKey).decode


def key_of(schedule: Schedule) -> ScheduleKey:
    """Where a schedule stands."""
    return ScheduleKey(schedule.spec.task.tenant_id, schedule.spec.name, schedule.schedule_id)


def cursor_of(key: ScheduleKey) -> str:
    """The text that stands for a place."""
    return base64.urlsafe_b64encode(_encode(key)).decode().rstrip("=")


def parse_cursor(cursor: str) -> ScheduleKey:
    """The place that `cursor_of` gave. ValueError: it never gave that."""
    try:
        return _decode(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error) as error:  # msgspec's errors are ValueErrors
        raise ValueError("cursor: not one that a list of this server gave") from error
