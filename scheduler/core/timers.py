"""One queue of keyed timers: each key has at most one instant. Derived from state on load, never stored."""

from __future__ import annotations

import heapq


class Timers:
    """Keys by the instant (microseconds) at which they are due; setting a key again moves it."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: str) -> bool:
        return key in self._due

    def set(self, key: str, at: int) -> None:
        """Let `key` be due at `at`, and at no other instant."""
        if self._due.get(key) != at:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            if len(self._heap) > 2 * len(self._due) + 64:
                self._compact()

    def cancel(self, key: str) -> None:
        """Forget `key`; nothing happens if it is not set."""
        self._due.pop(key, None)

    def next_at(self) -> int | None:
        """The earliest instant, or None if nothing is set."""
        while self._heap:
            at, key = self._heap[0]
            if self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: int, limit: int) -> list[str]:
        """Up to `limit` keys due at or before `now`, earliest first; they are not set any more."""
        due: list[str] = []
        while len(due) < limit:
            at = self.next_at()
            if at is None or at > now:
                break
            _, key = heapq.heappop(self._heap)
            del self._due[key]
            due.append(key)
        return due

    def _compact(self) -> None:
        # Moved and cancelled keys leave entries behind: without this the heap would grow with history.
        self._heap = [(at, key) for key, at in self._due.items()]
        heapq.heapify(self._heap)
