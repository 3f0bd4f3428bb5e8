"""The bounds of what is computed here, each with its reason. `_s` is in seconds of Unix time, `_us` in microseconds."""

from __future__ import annotations

SECOND_US = 1_000_000
DAY_S = 86_400

EARLIEST_S = 0  # 1970: no schedule fires before, and no zone need be known before
LATEST_YEAR = 2400  # exclusive. The rarest date, a 29 February on a given weekday, is at most 40 years away
LATEST_S = 13_569_465_600  # when that year begins
EARLIEST_US = EARLIEST_S * SECOND_US
LATEST_US = LATEST_S * SECOND_US

TEXT_MAX = 512  # characters of an expression: every second and every minute written out are 340
EVERY_US_MIN = SECOND_US  # of an interval: cron's finest grain too; each fire is a task
EVERY_US_MAX = 100 * 366 * DAY_S * SECOND_US  # beyond, one unit was mistaken for another
CALENDAR_MAX = 1_000  # instants of a calendar: it travels in one message, and is held in memory
JITTER_US_MAX = DAY_S * SECOND_US
