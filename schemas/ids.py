"""Ids and names: which are allowed, how they are made, and which shard they belong to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from struct import unpack_from

NAME_MAX = 128
NAME_RULE = "1 to 128 characters of A-Z a-z 0-9 _ . : -"
_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def is_name(text: str) -> bool:
    """Whether `text` may name a task, a queue, a task type or a tenant; not `.` and `..`, which are places in a URL."""
    return _NAME.fullmatch(text) is not None and text not in (".", "..")


def uuid7(unix_ms: int, random_bits: Callable[[int], int]) -> str:
    """A time-ordered UUID (RFC 9562, version 7) of `unix_ms` and 74 random bits."""
    chance = random_bits(74)
    value = (unix_ms & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | (chance >> 62) << 64 | 0b10 << 62 | chance & (1 << 62) - 1
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def keyed_task_id(tenant_id: str, idempotency_key: str) -> str:
    """The task id that stands for (tenant, key): the same submission meets itself in its own shard."""
    digest = hashlib.sha256(f"{len(tenant_id)}:{tenant_id}{idempotency_key}".encode()).hexdigest()
    return f"key-{digest[:32]}"


UNIQUE_PREFIX = "uniq-"  # of the ids that share a unique key: its root, a dot, and what is their own


def unique_root_of(tenant_id: str, key: str) -> str:
    """The root of the ids of all tasks that are submitted under one unique key of a tenant."""
    digest = hashlib.sha256(f"{len(tenant_id)}:{tenant_id}{key}".encode()).hexdigest()
    return f"{UNIQUE_PREFIX}{digest[:32]}"


def unique_root(task_id: str) -> str | None:
    """The root of an id that was made of a unique key."""
    if not task_id.startswith(UNIQUE_PREFIX):
        return None
    root, dot, _ = task_id.partition(".")
    return root if dot else None


def record_task_id(topic: str, partition: int, offset: int) -> str:
    """The task id of a submission that names none: the same however often the record at this place is read."""
    digest = hashlib.sha256(f"{topic}/{partition}/{offset}".encode()).hexdigest()
    return f"rec-{digest[:32]}"


def routing_key(task_id: str) -> str:
    """The part of an id that decides its shard: up to the first dot, so that children share their parent's."""
    return task_id.partition(".")[0]


def shard_of(task_id: str, shards: int) -> int:
    """The shard of a task: what Kafka's default partitioner does with the routing key."""
    return (murmur2(routing_key(task_id).encode()) & 0x7FFF_FFFF) % shards


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 (seed 0x9747b28c), as its Java default partitioner computes it."""
    mask, m = 0xFFFF_FFFF, 0x5BD1_E995
    length = len(data)
    h = 0x9747_B28C ^ length
    for k in unpack_from(f"<{length >> 2}I", data):
        k = k * m & mask
        h = (h * m ^ (k ^ k >> 24) * m) & mask
    if length & 3:
        h = (h ^ int.from_bytes(data[length & ~3 :], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15
