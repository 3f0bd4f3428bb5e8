"""What the shards log while everything around them breaks is of no interest: the transcript tells it better."""

from __future__ import annotations

import logging

import structlog


def be_quiet() -> None:
    """Drop all log lines below critical."""
    structlog.reset_defaults()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
