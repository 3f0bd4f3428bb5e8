"""One seed: several schedulers and workers, a client, chaos, and then calm until everything must have ended."""

from __future__ import annotations

from random import Random

from schemas.codec import Codec
from scheduler.core.shard import ShardSettings
from scheduler.runtime import RuntimeSettings, SchedulerRuntime, ShardHost
from tests.simulation.actors import Client, Worker
from tests.simulation.invariants import CLOCK_ERROR_US, Facts, check_checkpoint, check_end, check_hosts
from tests.simulation.world import Faults, SimClock, SimLog, SimStates, World

CHAOS_STEPS, CALM_STEPS_MAX = 400, 3_000
SCHEDULERS, WORKERS, SHARDS = 2, 3, 2
SETTINGS = ShardSettings(ready_partitions=SHARDS, ended_kept_us=20_000_000, idempotency_window_us=120_000_000)


class Scheduler:
    """A scheduler process: it may be paused, killed and replaced."""

    def __init__(self, world: World, states: SimStates, codec: Codec, name: str) -> None:
        self.name = name
        self.log = SimLog(world, name)
        self.clock = SimClock(world, world.rng.randint(-CLOCK_ERROR_US, CLOCK_ERROR_US))
        settings = RuntimeSettings(owner=name, shard=SETTINGS, checkpoint_us=3_000_000)
        rng = Random(world.rng.getrandbits(32))
        self.runtime = SchedulerRuntime(self.log, states.of(self.log), codec, self.clock, rng, settings)
        self.wakes_at = 0


class Simulation:
    """A world with its actors."""

    def __init__(self, seed: int, codec: Codec) -> None:
        self.seed, self.codec = seed, codec
        self.world = World(seed, SHARDS)
        self.states = SimStates(self.world)
        self.facts = Facts(self.world, codec)
        self.client = Client(self.world, codec, self.facts)
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
        self.world.faults = Faults(0, 0, 0, 0, 0)
        for actor in (*self.schedulers, *self.workers):
            actor.wakes_at = 0
        for step in range(CALM_STEPS_MAX):
            self.client.log.poll(0)
            self._turn(200_000 if step < 300 else 2_000_000)
            if step > 400 and step % 50 == 0 and self._is_over():
                break
        check_end(self.facts, self.world, self._hosts())

    def _turn(self, passes_us: int) -> None:
        self.world.now += passes_us
        for group in list(self.world.groups):
            self.world.assign(group)
        actors = [*self.schedulers, *self.workers]
        self.world.rng.shuffle(actors)
        for actor in actors:
            if actor.wakes_at <= self.world.now:
                actor.runtime.step(0) if isinstance(actor, Scheduler) else actor.act()
        for connection in list(self.world.connections):
            connection.land_some()
        self.states.apply_some()
        self.facts.read()
        check_hosts(self.facts, self._hosts())
        if self.world.chance(0.05):
            check_checkpoint(self.facts, self.states, self.codec, self.world.rng.randrange(SHARDS), self.world)

    def _disturb(self) -> None:
        chance, rng, now = self.world.chance, self.world.rng, self.world.now
        if chance(0.02):
            self.world.move("schedulers")
        for number, scheduler in enumerate(self.schedulers):
            if chance(0.006):
                self.world.say(scheduler.name, "killed")
                scheduler.log.die()
                self.schedulers[number] = self._scheduler()
            elif chance(0.006):
                scheduler.wakes_at = now + rng.choice((1, 5, 15)) * 1_000_000
                self.world.say(scheduler.name, f"paused for {(scheduler.wakes_at - now) / 1e6:.0f} s")
                for shard in range(SHARDS):
                    if chance(0.7):
                        self._take_over(shard, scheduler)
        for number, worker in enumerate(self.workers):
            if chance(0.006):
                self.world.say(worker.name, "killed")
                worker.log.die()
                self.workers[number] = self._worker()
            elif chance(0.003):
                worker.leave()
                worker.log.land_some()
                worker.log.die()
                self.workers[number] = self._worker()
            elif chance(0.006):
                worker.wakes_at = now + rng.choice((3, 10, 20)) * 1_000_000
                self.world.say(worker.name, "frozen")

    def _take_over(self, shard: int, paused: Scheduler) -> None:
        """The group takes a shard from a paused member, who does not know."""
        others = [m for m in self.world.members("schedulers") if m.log is not paused.log]
        if others:
            for partition in self.world.groups["schedulers"]:
                if partition.partition == shard:
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
