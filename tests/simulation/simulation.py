"""One seed: several schedulers and workers, a client, chaos, and then calm until everything must have ended."""

from __future__ import annotations

import traceback
from random import Random

from msgspec.structs import replace

from scheduler.core.admission import AdmissionSettings
from scheduler.core.shard import ShardSettings
from scheduler.host import RuntimeSettings, ShardHost
from scheduler.policy_topic import policy_entry
from scheduler.runtime import SchedulerRuntime
from schemas.codec import Codec
from schemas.topics import SHARD_MESSAGES, delay_topic
from tests.simulation.actors import Client, Worker
from tests.simulation.invariants import (
    CLOCK_ERROR_US,
    LIMITS,
    SETTINGS,
    Facts,
    check_at_once,
    check_checkpoint,
    check_due,
    check_end,
    check_hosts,
)
from tests.simulation.world import Faults, SimClock, SimLog, SimStates, World

CHAOS_STEPS, CALM_STEPS_MAX = 400, 3_000
SCHEDULERS, WORKERS, SHARDS = 2, 3, 2
TRANSCRIPT_SHOWN = 80


def shard_settings(seed: int) -> ShardSettings:
    """In some worlds memory is so small that slots must wait to be read, or that what is low must wait there."""
    if seed % 4 == 0:
        return replace(SETTINGS, near_max=8)
    return replace(SETTINGS, admission=AdmissionSettings(queue_overflow_at=2)) if seed % 4 == 1 else SETTINGS


class Scheduler:
    """A scheduler process: it may be paused, killed and replaced."""

    def __init__(self, world: World, states: SimStates, codec: Codec, name: str) -> None:
        self.name = name
        self.log = SimLog(world, name)
        self.clock = SimClock(world, world.rng.randint(-CLOCK_ERROR_US, CLOCK_ERROR_US))
        settings = RuntimeSettings(owner=name, shard=shard_settings(world.seed), checkpoint_us=3_000_000)
        rng = Random(world.rng.getrandbits(32))
        self.runtime = SchedulerRuntime(self.log, states.of(self.log), codec, self.clock, rng, settings)
        self.wakes_at = 0


class Simulation:
    """A world with its actors."""

    def __init__(self, seed: int, codec: Codec) -> None:
        self.seed, self.codec = seed, codec
        wheel = SETTINGS.wheel
        sizes = {delay_topic(level): SHARDS * wheel.slots for level in wheel.levels}
        self.world = World(seed, SHARDS, sizes, {SHARD_MESSAGES})
        for limit in LIMITS:
            self.world.land(policy_entry(limit, codec))
        self.states = SimStates(self.world)
        self.facts = Facts(self.world, codec)
        self.client = Client(self.world, codec, self.facts, has_workflows=seed % 4 == 2)
        self._born = 0
        self.schedulers = [self._scheduler() for _ in range(SCHEDULERS)]
        self.workers = [self._worker() for _ in range(WORKERS)]

    def run(self) -> None:
        """Play the seed; raises Violated."""
        for _ in range(CHAOS_STEPS):
            self._disturb()
            if self.world.chance(0.4):
                self.client.act()
            self.client.log.poll(0)
            self._turn(self.world.rng.choice((1_000, 10_000, 100_000, 400_000)))
        self.world.say("world", "calm")
        self.world.faults = Faults.none()
        for entry in self.client.settled():
            self.world.land(entry)
        for scheduler in self.schedulers:
            scheduler.wakes_at = 0
        for worker in self.workers:
            worker.wakes_at = 0
        for step in range(CALM_STEPS_MAX):
            if step in (100, 150):  # twice: what follows a failed append is lost with it
                check_due(self.facts, self.world)
                self.client.leave()
            self.client.log.poll(0)
            self._turn(200_000 if step < 300 else 500_000)
            if step > 400 and step % 50 == 0 and self._is_over():
                break
        check_end(self.facts, self.world, self._hosts())

    def _turn(self, passes_us: int) -> None:
        self.world.now += passes_us
        for group in list(self.world.groups):
            self.world.assign(group)
        actors: list[Scheduler | Worker] = [*self.schedulers, *self.workers]
        self.world.rng.shuffle(actors)
        for actor in actors:
            if actor.wakes_at <= self.world.now:
                actor.runtime.step(0) if isinstance(actor, Scheduler) else actor.act()
        self.world.land_late()
        for connection in list(self.world.connections):
            connection.land_some()
        self.states.apply_some()
        self.facts.read()
        check_at_once(self.facts)
        check_hosts(self.facts, self._hosts())
        if self.world.chance(0.05):
            check_checkpoint(self.facts, self.states, self.codec, self.world.rng.randrange(SHARDS), self.world)

    def _disturb(self) -> None:
        if self.world.chance(0.02):
            self.world.move("schedulers")
        if self.world.chance(0.002):
            self._leave_alone()
        for number, scheduler in enumerate(self.schedulers):
            if self.world.chance(0.006):
                self._kill(scheduler)
                self.schedulers[number] = self._scheduler()
            elif self.world.chance(0.006):
                self._pause(scheduler, (1, 5, 15))
                self._take_over(scheduler)
        for number, worker in enumerate(self.workers):
            if self.world.chance(0.009):
                if self.world.chance(0.3):
                    worker.leave()
                self._kill(worker)
                self.workers[number] = self._worker()
            elif self.world.chance(0.006):
                self._pause(worker, (3, 10, 20))

    def _leave_alone(self) -> None:
        """For a while there is no scheduler."""
        for scheduler in self.schedulers:
            self._pause(scheduler, (30, 60))

    def _kill(self, actor: Scheduler | Worker) -> None:
        self.world.say(actor.name, "killed")
        actor.log.die()

    def _pause(self, actor: Scheduler | Worker, seconds: tuple[int, ...]) -> None:
        actor.wakes_at = self.world.now + self.world.rng.choice(seconds) * 1_000_000
        self.world.say(actor.name, f"paused until {(actor.wakes_at - self.world.began) / 1e6:.3f}")

    def _take_over(self, paused: Scheduler) -> None:
        """The group may take shards from a paused member, who does not know."""
        others = [m for m in self.world.members("schedulers") if m.log is not paused.log]
        taken = {shard for shard in range(SHARDS) if self.world.chance(0.7)}
        for partition in self.world.groups["schedulers"] if others else ():
            if partition.partition in taken:
                self.world.groups["schedulers"][partition] = others[0]

    def _hosts(self) -> list[ShardHost]:
        return [host for scheduler in self.schedulers for host in scheduler.runtime.hosts.values()]

    def _is_over(self) -> bool:
        hosts = self._hosts()
        return all(not any(host.shard.memory().values()) for host in hosts) and not self.client.log.in_transit

    def _scheduler(self) -> Scheduler:
        self._born += 1
        return Scheduler(self.world, self.states, self.codec, f"scheduler-{self._born}")

    def _worker(self) -> Worker:
        self._born += 1
        return Worker(self.world, self.codec, f"worker-{self._born}", slots=self.world.rng.choice((1, 4, 20)))


def play(seed: int, codec: Codec) -> str | None:
    """None if all invariants held; else what broke, with the seed and the end of the transcript."""
    simulation = Simulation(seed, codec)
    try:
        simulation.run()
    except Exception:  # whatever goes wrong, the seed that shows it is the finding
        lines = "\n".join(list(simulation.world.transcript)[-TRANSCRIPT_SHOWN:])
        again = f"seed {seed}: python -m tests.simulation --seed {seed} --seeds 1"
        return f"{lines}\n\n{traceback.format_exc(limit=-6)}\n{again}"
    return None
