"""`Retry(retry_on=…, give_up_on=…)`: a class given there is the class that a worker reports."""

from __future__ import annotations

import pytest

from scheduler.core.policy import is_permanent
from schemas.messages import Verdict
from tidewheel import Retry, RetryableError
from workers.execution import error_of


class SoldOut(Exception):
    """A class of the application."""


class SoldOutForEver(SoldOut):
    """One that is caught by its base."""


@pytest.mark.parametrize(
    ("listed", "raised", "is_listed"),
    [
        (FileNotFoundError, FileNotFoundError(), True),
        (OSError, FileNotFoundError(), True),
        (FileNotFoundError, OSError(), False),
        (SoldOut, SoldOutForEver(), True),
        ("SoldOut", SoldOutForEver(), True),
        (RetryableError, RetryableError(), True),
        (ValueError, KeyError(), False),
    ],
)
def test_a_class_means_itself_and_what_derives_from_it(
    listed: type[BaseException] | str, raised: BaseException, is_listed: bool
) -> None:
    error = error_of(raised, Verdict.UNKNOWN)
    assert is_permanent(Retry(give_up_on=[listed]).policy, error) is is_listed
    assert is_permanent(Retry(retry_on=[listed]).policy, error) is not is_listed
