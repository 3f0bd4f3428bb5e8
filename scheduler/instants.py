"""Instants at the surface: RFC 3339 text with an offset outside, integer microseconds of Unix time inside."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

INSTANT_RULE = (
    "an RFC 3339 date and time with its offset, for example 2026-06-01T12:00:00Z or 2026-06-01T14:00:00+02:00"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,30}))?"
    r"(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)


def parse_instant(text: str) -> int:
    """Microseconds of Unix time of an RFC 3339 instant; finer digits are rounded up, so that nothing is ever early.

    `-00:00` means UTC. Raises ValueError for text without an offset, for what is no date, and for a leap second.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"must be {INSTANT_RULE}")
    year, month, day, hour, minute, second, fraction, sign, offset_hours, offset_minutes = match.groups()
    try:
        local = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=UTC)
    except ValueError as error:
        raise ValueError(f"is not a date and time: {error}") from error
    microseconds = (local - _EPOCH) // _MICROSECOND + _fraction_us(fraction or "")
    if sign is None:
        return microseconds
    if int(offset_hours) > 23 or int(offset_minutes) > 59:
        raise ValueError("has an offset beyond 23:59")
    offset_us = (int(offset_hours) * 60 + int(offset_minutes)) * 60_000_000
    return microseconds - offset_us if sign == "+" else microseconds + offset_us


def _fraction_us(digits: str) -> int:
    finer = 1 if digits[6:].strip("0") else 0
    return int(digits[:6].ljust(6, "0")) + finer


def instant_of(when: datetime) -> int:
    """Microseconds of Unix time of an aware datetime; raises ValueError for a naive one."""
    if when.tzinfo is None or when.utcoffset() is None:
        raise ValueError("has no time zone; give an aware datetime")
    return (when - _EPOCH) // _MICROSECOND


def format_instant(microseconds: int) -> str:
    """RFC 3339 text in UTC, always with six digits of fraction, for example 2026-06-01T12:00:00.000000Z."""
    when = _EPOCH + timedelta(microseconds=microseconds)
    return when.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
