"""Rules of the design, each switched off: the simulation must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from scheduler.core import decisions
from scheduler.core.decisions import Decision
from scheduler.core.dispatch import Dispatch
from scheduler.core.gate import Gate, Word
from scheduler.core.limit_keys import Rate
from scheduler.core.limiter import Limiter
from scheduler.core.parking import Parking
from scheduler.core.shard import Shard
from scheduler.core.shard_schedules import ShardSchedules
from scheduler.core.shard_workflows import ShardWorkflows
from scheduler.core.timers import Timers
from scheduler.core.wheel import Wheel
from scheduler.host import Phase, ShardHost, _Batch
from scheduler.slots import Slots
from schemas.messages import (
    EndedTask,
    Event,
    LimitChanged,
    Outcome,
    ScheduleFired,
    ShardOpened,
    Status,
    Task,
)
from tests.simulation.world import SimStates

EARLY_US = 3_000_000


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a method by `wrapper(original, self, …)`."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _instead(owner: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """Replace a method by one that only returns `value`."""
    return patch.object(owner, name, lambda *_args, **_kwargs: value)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _release_at_once(send: Callable[..., None], host: ShardHost) -> None:
    batch = host._unsent
    send(host)
    if batch is not None and host._unsent is None:
        host._release(_Batch(batch.effects, None))


def _commit_at_once(capture: Callable[..., Any], host: ShardHost, now: int) -> None:
    checkpoint = capture(host, now)
    if checkpoint is not None:
        host._commit_checkpoint(checkpoint._replace(next_offset=host._next_offset))


def _as_if_valid(event_of: Callable[..., Event | None], host: ShardHost, record: Any) -> Event | None:
    event = event_of(host, record)
    is_opening = event is not None and isinstance(event.body, ShardOpened)
    return event if event is None or is_opening else replace(event, epoch=10**9)


def _from_the_start(take: Callable[..., Any], host: ShardHost) -> Any:
    if take(host) is None:
        return None
    host.shard.state.positions.clear()
    return {}


def _not_held_back(release: Callable[..., None], host: ShardHost, batch: _Batch) -> None:
    checkpoint, batch.checkpoint = batch.checkpoint, None
    release(host, batch)
    if checkpoint is not None:
        host._commit_checkpoint(checkpoint._replace(next_offset=host._next_offset))


def _owes_nothing_of_old(owed_by: Callable[..., Any], host: ShardHost, event: Event) -> Any:
    return owed_by(host, event) if host.phase is Phase.ACTIVE else ()


def _of_any_origin(handle: Callable[..., Any], shard: Shard, *args: Any) -> Any:
    shard.state.forwarded.clear()
    return handle(shard, *args)


def _of_any_version(decide: Callable[..., Any], known: Any, report: Any) -> Any:
    return decide(known, replace(report, task_version=known.version) if isinstance(known, Task) else report)


def _while_it_runs(known: Any, _report: Any) -> bool:
    return isinstance(known, Task) and known.status is Status.RUNNING


def _forget_now(shard: Shard, ended: Any, _offset: int) -> None:
    shard.state.ended.pop(ended.task_id, None)


def _believe(known: Any, *_args: Any) -> Decision | None:
    return None if known is None else Decision(None, Outcome.WRONG_STATUS)


def _ahead_of_time(decide: Callable[..., Any], task: Task, heard_at: int, now: int, rng: Any) -> Any:
    return decide(task, heard_at, now + EARLY_US, rng)


def _without(part: str, method: str) -> Callable[..., Iterator[None]]:
    def wrapper(derive: Callable[..., Iterator[None]], shard: Shard, now: int, offset: int) -> Iterator[None]:
        with _instead(getattr(shard, part), method, None):
            yield from derive(shard, now, offset)

    return wrapper


def _as_if_writable(partitions_of: Callable[..., int], host: ShardHost, queue: str, priority: Any) -> int:
    return max(1, partitions_of(host, queue, priority))


def _once(is_void: Callable[..., bool], parking: Parking, task: Task) -> bool:
    found = is_void(parking, task)
    if found:
        del parking.markers[task.task_id]
    return found


def _by_the_clock(evolve: Callable[..., None], shard: Shard, event: Event) -> None:
    evolve(shard, event)
    for task_id, marker in list(shard.parking.markers.items()):
        if marker.version < event.version or event.entity_id != task_id:
            del shard.parking.markers[task_id]


def _derive_nothing(workflows: ShardWorkflows) -> Iterator[None]:
    workflows._is_loaded = True
    return iter(())


def _as_it_was_considered(evolve: Callable[..., None], part: ShardSchedules, event: Event) -> None:
    before = part.schedules.get(event.entity_id)
    evolve(part, event)
    after = part.schedules.get(event.entity_id)
    if before is not None and after is not None and isinstance(event.body, ScheduleFired):
        part.schedules.put(replace(after, next_fire_at=before.next_fire_at))


def _for_its_key_alone(shard: Shard, ended: EndedTask) -> bool:
    return ended.keep_until > ended.ended_at + shard._settings.ended_kept_us


def _caught_up_or_not(forget: Callable[..., None], shard: Shard, now: int) -> None:
    with _instead(Shard, "_is_behind", False):
        forget(shard, now)


def _before_acknowledgement(park: Callable[..., None], slots: Slots, now: int) -> None:
    park(slots, now)
    for task in list(slots._shard.state.tasks.values()):
        slots._shard._offer_to_wheel(task)


def _after_reading(let_go: Callable[..., None], slots: Slots, now: int) -> None:
    if not slots._shard.next_to_open(now):
        let_go(slots, now)


def _used_when_granted(fold: Callable[..., None], limiter: Limiter, name: str, changed: LimitChanged, at: int) -> None:
    fold(limiter, name, changed, at)
    granted = tuple(attempt for grant in changed.granted for attempt in grant.attempts)
    if granted and isinstance(limiter._rule_of(name), Rate):
        fold(limiter, name, LimitChanged(used=granted), at)


def _asked_once(asks: Callable[..., Any], gate: Gate, now: int) -> Any:
    found = list(asks(gate, now))
    gate._again = Timers()
    return found


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "effects-before-acknowledgement": lambda: _around(ShardHost, "_send_unsent", _release_at_once),
    "no-gap-check": lambda: _instead(ShardHost, "_is_verified", True),
    "void-events-count": lambda: _around(ShardHost, "_event_of", _as_if_valid),
    "checkpoint-ahead-of-log": lambda: _around(ShardHost, "_maybe_capture", _commit_at_once),
    "checkpoint-not-fenced": lambda: patch.object(SimStates, "is_fencing", False),
    "checkpoint-ahead-of-effects": lambda: _around(ShardHost, "_release", _not_held_back),
    "effects-not-sent-again-after-load": lambda: _around(ShardHost, "_owed_by", _owes_nothing_of_old),
    "forwarded-again-counts": lambda: _around(Shard, "handle_forwarded", _of_any_origin),
    "inputs-decided-again": lambda: _around(ShardHost, "take_resume_positions", _from_the_start),
    "doubled-events-fold": lambda: _instead(Shard, "_is_next", True),
    "failed-append-ignored": lambda: patch.object(ShardHost, "reload", lambda host, reason: host._sent.popleft()),
    "stale-reports-count": lambda: patch.object(decisions, "is_current", _while_it_runs),
    "any-version-starts": lambda: _around(decisions, "decide_started", _of_any_version),
    "forgets-at-once": lambda: patch.object(Shard, "_will_forget", _forget_now),
    "view-always-believed": lambda: patch.object(decisions, "_refuse_ended", _believe),
    "timers-early": lambda: _both(
        _around(Timers, "pop_due", lambda pop, timers, now, limit: pop(timers, now + EARLY_US, limit)),
        _around(
            decisions, "decide_timer", lambda decide, task, heard, now, rng: decide(task, heard, now + EARLY_US, rng)
        ),
    ),
    "silent-workers-unnoticed": lambda: _both(_instead(Shard, "_judge_worker", None), _instead(Shard, "_lose", None)),
    "held-topics-are-written": lambda: _around(ShardHost, "_partitions_of", _as_if_writable),
    "no-resend": lambda: patch.object(Dispatch, "_pick_resends", lambda *_args: []),
    "pending-not-offered-after-load": lambda: _around(Shard, "derive", _without("_dispatch", "offer")),
    "timers-not-derived-after-load": lambda: _around(Shard, "derive", _without("_timers", "set")),
    "signals-without-epoch": lambda: patch.object(Shard, "_signed", lambda _shard, signal: signal),
    "ended-never-forgotten": lambda: _instead(Shard, "forget_ended", None),
    "no-markers": lambda: _instead(Parking, "mark", False),
    "marker-removed-at-first-hit": lambda: _around(Parking, "is_void", _once),
    "marker-expires-early": lambda: _around(Shard, "evolve", _by_the_clock),
    "late-record-accepted": lambda: _instead(Wheel, "is_late", False),
    "forgotten-before-catch-up": lambda: _around(Shard, "forget_ended", _caught_up_or_not),
    "parked-before-acknowledgement": lambda: _around(Slots, "park", _before_acknowledgement),
    "records-of-a-slot-passed-over": lambda: _around(
        Wheel, "has_read", lambda has_read, wheel, place, next_offset: has_read(wheel, place, next_offset + 1)
    ),
    "memory-before-slots": lambda: _around(Slots, "_let_go", _after_reading),
    "events-of-the-wheel-without-base": lambda: _instead(Shard, "_base", None),
    "any-hint-is-trusted": lambda: _instead(Parking, "is_parked_as", True),
    "schedules-not-in-the-checkpoint": lambda: _around(
        Shard, "entity", lambda entity, shard, key: None if key.startswith("schedule/") else entity(shard, key)
    ),
    "nominal-times-decided-again": lambda: _around(ShardSchedules, "evolve", _as_it_was_considered),
    "due-runs-are-forgotten": lambda: patch.object(ShardSchedules, "_submit_due", lambda *_args: False),
    "ended-not-stored-while-slots-are-overdue": lambda: patch.object(Shard, "_is_checkpointed", _for_its_key_alone),
    "loaded-without-proof": lambda: patch.object(ShardHost, "_prove", lambda _host, _token: iter(())),
    "workflows-not-in-the-checkpoint": lambda: _around(
        Shard, "entity", lambda entity, shard, key: None if key.startswith("workflow/") else entity(shard, key)
    ),
    "ends-of-nodes-are-forgotten": lambda: _instead(ShardWorkflows, "is_node", False),
    "what-follows-an-end-is-not-derived-after-load": lambda: patch.object(ShardWorkflows, "derive", _derive_nothing),
    "limits-not-in-the-checkpoint": lambda: _around(
        Shard, "entity", lambda entity, shard, key: None if key.startswith("limit/") else entity(shard, key)
    ),
    "tokens-come-back-from-the-grant-on": lambda: _around(Limiter, "fold", _used_when_granted),
    "time-between-owners-counts": lambda: _instead(Limiter, "change_clock", None),
    "tokens-of-starts-come-back": lambda: _around(
        Gate, "_say", lambda say, gate, keys, attempt, is_used: say(gate, keys, attempt, is_used=False)
    ),
    "held-for-ever": lambda: patch.object(Limiter, "to_check", lambda _limiter, _now: iter(())),
    "asked-once": lambda: _around(Gate, "asks", _asked_once),
    "what-an-owner-before-held-is-given-back": lambda: patch.object(
        Gate, "_adopt", lambda gate, key, attempt, _known, is_news: gate._words.append(Word(key, attempt, False))
    ),
    "windows-not-in-the-checkpoint": lambda: patch.object(Wheel, "resume", lambda _wheel, _marks: None),
}
