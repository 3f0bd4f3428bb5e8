"""Why a service is not there.

schemas.errors.Fatal
└── ServiceError
    ├── ServiceMissing   this machine lacks what is needed to have it: Java, Maven, a network
    └── ServiceFailed    it could be had, but did not start, answer or end
"""

from __future__ import annotations

from schemas.errors import Fatal


class ServiceError(Fatal):
    """A service is not there; `hint` says what to do, `log` has the last lines of whoever failed."""

    def __init__(self, message: str, *, hint: str, log: str = "") -> None:
        super().__init__("\n".join(filter(None, (message, log))))
        self.message, self.hint, self.log = message, hint, log


class ServiceMissing(ServiceError):
    """This machine cannot run the service as it is."""


class ServiceFailed(ServiceError):
    """The service was started, or told to end, and did not."""
