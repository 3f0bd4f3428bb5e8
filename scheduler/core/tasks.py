"""The live tasks of one shard. Those that only wait for their turn are packed: they need a third of the memory so."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import cast

from schemas.codec import Codec
from schemas.messages import Task

_CODEC = Codec.builtin()


class Tasks(MutableMapping[str, Task]):
    """Tasks by id. What is read is always a whole task; one that is changed is unpacked until it is packed again."""

    def __init__(self) -> None:
        self._kept: dict[str, Task | bytes] = {}
        self.packed = 0
        self.bytes = 0  # of payloads and checkpoints, and of what is packed: all that has no bound by number

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __getitem__(self, task_id: str) -> Task:
        return _unpacked(self._kept[task_id])

    def get(self, task_id: str, default: Task | None = None) -> Task | None:  # type: ignore[override]
        """The task, if there is one. Safe from any thread."""
        kept = self._kept.get(task_id)
        return default if kept is None else _unpacked(kept)

    def __setitem__(self, task_id: str, task: Task) -> None:
        self._count(self._kept.get(task_id), -1)
        self._kept[task_id] = task
        self._count(task, 1)

    def __delitem__(self, task_id: str) -> None:
        self._count(self._kept.pop(task_id), -1)

    def pack(self, task_id: str) -> None:
        """Keep a task as the bytes of its Avro record; what reads it makes a new one of them."""
        kept = self._kept[task_id]
        if isinstance(kept, Task):
            packed = _CODEC.encode(kept)
            self._count(kept, -1)
            self._kept[task_id] = packed
            self._count(packed, 1)

    def kept(self, task_id: str) -> Task | bytes | None:
        """The task as it is kept: if it is packed, the bytes of its record by the built-in schema."""
        return self._kept.get(task_id)

    def unpack(self, task_id: str) -> Task:
        """The task, which is kept as it is read from now on: something is about to happen to it."""
        kept = self._kept[task_id]
        if isinstance(kept, Task):
            return kept
        self[task_id] = task = _unpacked(kept)
        return task

    def size(self, task_id: str) -> int:
        """About how many bytes a task has."""
        return _size(self._kept[task_id])

    def unpacked(self) -> list[Task]:
        """Those that are not packed, as they are now. Safe from any thread."""
        return [kept for kept in list(self._kept.values()) if isinstance(kept, Task)]

    def snapshot(self) -> Iterator[Task]:
        """Each task, as all of them are now. Safe from any thread."""
        return map(_unpacked, list(self._kept.values()))

    def _count(self, kept: Task | bytes | None, difference: int) -> None:
        if kept is not None:
            self.bytes += difference * _size(kept)
            self.packed += difference * isinstance(kept, bytes)


def _size(kept: Task | bytes) -> int:
    return len(kept.spec.payload) + len(kept.checkpoint or b"") if isinstance(kept, Task) else len(kept)


def _unpacked(kept: Task | bytes) -> Task:
    return kept if isinstance(kept, Task) else cast(Task, _CODEC.decode(kept))
