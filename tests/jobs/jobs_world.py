"""A cluster without a machine: hosts and jobs that obey the manager, late, badly, or not at all.

It judges each instruction as it comes, by what the hosts really run, and checks after each call of
the manager that nobody is wronged. Time is simulated.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from regrow.jobs import records
from regrow.jobs.manager import Manager
from regrow.jobs.model import (
    AskBack,
    Event,
    Fence,
    Grant,
    Instruction,
    JobEnded,
    JobReport,
    JobSpec,
    JobSubmitted,
    JobSuspended,
    Policy,
    Shape,
    SliceFailed,
    SliceIdle,
    SliceReport,
    SliceReturned,
    Start,
    Stop,
    Suspend,
    SuspendRefused,
    Withdraw,
)

HOUR_S = 3600.0


@dataclass
class Hosts:
    """The hosts of a slice, and what truly runs on them."""

    index: int
    shape: Shape
    running: dict[int, str] = field(default_factory=dict)
    fenced: int = 0
    pending: int | None = None
    broken: bool = False


@dataclass
class Client:
    """A job: its head and its supervisor."""

    spec: JobSpec
    leases: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    attempt: int = 0
    suspended: bool = False
    running: bool = False


@dataclass(frozen=True)
class Manners:
    """How often things go wrong."""

    seed: int
    refuses: float = 0.2
    hangs: float = 0.1
    mean_life_s: float = 600.0
    repair_s: float = 900.0
    manager_life_s: float = 1800.0


class World:
    """Simulated time, hosts, jobs and a manager that may die."""

    def __init__(self, shapes: list[Shape], policy: Policy, manners: Manners) -> None:
        self.random = random.Random(manners.seed)
        self.manners = manners
        self.policy = policy
        self.now = 1000.0
        self.calm = False
        self.manager: Manager | None = Manager(policy)
        self.saved = self.manager.to_json()
        self.hosts = {index: Hosts(index, shape) for index, shape in enumerate(shapes)}
        self.clients: dict[str, Client] = {}
        self.dropped: set[str] = set()
        self.grants = 0
        self.preemptions = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._watch: float | None = None
        for index, shape in enumerate(shapes):
            self.tell(SliceReport(index, shape))

    # --- time ---

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, do))

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while True:
            due = self.manager.deadline() if self.manager is not None else None
            first = self._queue[0][0] if self._queue else None
            at = min((time for time in (due, first) if time is not None), default=end + 1)
            if at > end:
                break
            self.now = max(self.now, at)
            if self.manager is not None and due is not None and due <= self.now:
                self.obey(self.manager.tick(self.now))
                later = self.manager and self.manager.deadline()
                assert later is None or later > self.now, "a tick that leaves itself due spins"
            else:
                heapq.heappop(self._queue)[2]()
        self.now = end

    def soon(self, low: float = 0.01, high: float = 2.0) -> float:
        return self.random.uniform(low, high)

    # --- the manager ---

    def tell(self, event: Event) -> None:
        """An event; lost if the manager is down."""
        if self.manager is not None:
            again = isinstance(event, JobReport)
            self.obey(self.manager.handle(event, self.now), again=again)

    def obey(self, instructions: tuple[Instruction, ...], *, again: bool = False) -> None:
        """`again`: grants among them may have been said before."""
        assert self.manager is not None
        self.saved = self.manager.to_json()
        self.manager.take_changes()
        self.check(instructions, again)
        for instruction in instructions:
            if isinstance(instruction, Grant):
                self.judge_grant(instruction)
            self.after(self.soon(0.001, 0.5), lambda one=instruction: self.carry_out(one))

    def kill_manager(self, down_s: float) -> None:
        """SIGKILL: what it was about to say is lost with it, or was said already."""
        if self.manager is None:
            return
        self.manager = None
        lost = [one for one in self._queue if self.random.random() < 0.5 and is_said(one[2])]
        self._queue = [one for one in self._queue if one not in lost]
        heapq.heapify(self._queue)
        self.after(down_s, self.start_manager)

    def start_manager(self) -> None:
        self.saved = json.loads(json.dumps(self.saved))
        self.manager, instructions = Manager.recover(self.saved, self.now, self.policy)
        self.obey(instructions, again=True)
        for hosts in self.hosts.values():
            self.after(self.soon(), lambda one=hosts: self.report_hosts(one))
        for client in list(self.clients.values()):
            self.after(self.soon(), lambda one=client: self.report_client(one))

    def report_hosts(self, hosts: Hosts) -> None:
        if hosts.broken:
            newest = max(hosts.running, default=hosts.fenced)
            self.tell(SliceFailed(hosts.index, newest, "its hosts are down"))
        else:
            self.tell(SliceReport(hosts.index, hosts.shape, tuple(hosts.running)))

    def report_client(self, client: Client) -> None:
        if self.clients.get(client.spec.name) is client:
            leases = tuple(client.leases.items())
            name, attempt = client.spec.name, client.attempt
            self.tell(JobReport(name, attempt, client.suspended, leases))

    # --- instructions ---

    def judge_grant(self, grant: Grant) -> None:
        hosts = self.hosts[grant.index]
        others = {number: job for number, job in hosts.running.items() if job != grant.job}
        assert not others, f"{grant} while {others} run there"

    def carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Fence):
            self.fence(instruction)
            return
        client = self.clients.get(instruction.job)
        if client is None:
            return
        match instruction:
            case Grant():
                self.grant(client, instruction)
            case Withdraw(_, index, incarnation):
                if client.leases.get(index) == incarnation:
                    self.leave(client, index)
            case AskBack():
                self.maybe(lambda: self.hand_back(client, instruction))
            case Start(_, attempt, restore):
                self.start(client, attempt, restore)
            case Suspend(_, attempt):
                self.maybe(lambda: self.suspend(client, attempt))
            case Stop(_, attempt, _, again):
                self.maybe(lambda: self.stop(client, attempt, again))

    def maybe(self, do: Callable[[], None]) -> None:
        """Does it after a while, or never."""
        if self.calm or self.random.random() >= self.manners.hangs:
            self.after(self.soon(0.1, 20.0), do)

    def fence(self, fence: Fence) -> None:
        hosts = self.hosts[fence.index]
        if hosts.broken:
            hosts.pending = max(fence.incarnation, hosts.pending or 0)
            return
        hosts.fenced = max(hosts.fenced, fence.incarnation)
        for incarnation in [one for one in hosts.running if one <= fence.incarnation]:
            del hosts.running[incarnation]
        self.tell(SliceIdle(fence.index, fence.incarnation))

    def grant(self, client: Client, grant: Grant) -> None:
        if grant.incarnation < client.newest.get(grant.index, 0):
            return
        if client.leases.get(grant.index) == grant.incarnation:
            return
        self.grants += 1
        hosts = self.hosts[grant.index]
        again = client.newest.get(grant.index) == grant.incarnation
        client.newest[grant.index] = grant.incarnation
        if again or hosts.broken or grant.incarnation <= hosts.fenced:
            # Also one that it had and has lost: an incarnation is used once.
            self.tell(SliceFailed(grant.index, grant.incarnation, "its hosts do not start"))
            return
        client.leases[grant.index] = grant.incarnation
        assert all(job == client.spec.name for job in hosts.running.values())
        hosts.running[grant.incarnation] = client.spec.name

    def leave(self, client: Client, index: int) -> None:
        incarnation = client.leases.pop(index)
        self.hosts[index].running.pop(incarnation, None)

    def hand_back(self, client: Client, ask: AskBack) -> None:
        if client.leases.get(ask.index) == ask.incarnation:
            self.leave(client, ask.index)
        self.tell(SliceReturned(client.spec.name, ask.index, ask.incarnation))

    def start(self, client: Client, attempt: int, restore: bool) -> None:
        if attempt <= client.attempt:
            return
        assert client.suspended or not restore
        client.attempt, client.suspended, client.running = attempt, False, True

    def suspend(self, client: Client, attempt: int) -> None:
        self.preemptions += 1
        name = client.spec.name
        if client.attempt < attempt:
            # It overtook the start, which a connection would not let it.
            return
        if not self.calm and self.random.random() < self.manners.refuses:
            self.tell(SuspendRefused(name, attempt, "it runs Python of its own"))
            return
        if client.attempt == attempt:
            self.leave_all(client)
            client.suspended, client.running = True, False
        self.tell(JobSuspended(name, attempt))

    def stop(self, client: Client, attempt: int, again: bool) -> None:
        self.preemptions += 1
        if client.attempt < attempt:
            return
        if client.attempt == attempt:
            # A state that is saved already stays so.
            self.leave_all(client)
            client.running = False
            if not again:
                self.clients.pop(client.spec.name, None)
        self.tell(JobEnded(client.spec.name, ok=False, cause="stopped", attempt=attempt))

    def leave_all(self, client: Client) -> None:
        for index in list(client.leases):
            self.leave(client, index)

    # --- what happens ---

    def submit(self, spec: JobSpec) -> None:
        if self.manager is None:
            self.after(1.0, lambda: self.submit(spec))
            return
        self.clients[spec.name] = Client(spec)
        self.tell(JobSubmitted(spec))

    def end(self, name: str, *, ok: bool = True) -> None:
        client = self.clients.pop(name, None)
        if client is not None:
            self.leave_all(client)
            self.tell(JobEnded(name, ok=ok))

    def fail_slice(self, index: int, repair_s: float) -> None:
        hosts = self.hosts[index]
        if hosts.broken:
            return
        hosts.broken = True
        newest = max(hosts.running, default=hosts.fenced)
        if self.random.random() < 0.5:
            hosts.running.clear()
        for client in self.clients.values():
            client.leases.pop(index, None)
        self.after(self.soon(), lambda: self.tell(SliceFailed(index, newest, "SIGKILL (signal 9)")))
        self.after(repair_s, lambda: self.repair(index))

    def repair(self, index: int) -> None:
        hosts = self.hosts[index]
        if not hosts.broken:
            return
        hosts.broken = False
        hosts.running.clear()
        self.tell(SliceReport(index, hosts.shape))
        if hosts.pending is not None:
            hosts.fenced = max(hosts.fenced, hosts.pending)
            self.tell(SliceIdle(index, hosts.pending))
            hosts.pending = None

    def storm(self, duration_s: float) -> None:
        """Failures of slices and of the manager for so long, then calm."""
        end = self.now + duration_s

        def fail() -> None:
            if self.now < end:
                index = self.random.choice(list(self.hosts))
                self.fail_slice(index, self.random.expovariate(1 / self.manners.repair_s))
                self.after(self.random.expovariate(1 / self.manners.mean_life_s), fail)

        def die() -> None:
            if self.now < end:
                self.kill_manager(self.random.choice([0.0, 0.5, 20.0]))
                self.after(self.random.expovariate(1 / self.manners.manager_life_s), die)

        self.after(self.random.expovariate(1 / self.manners.mean_life_s), fail)
        self.after(self.random.expovariate(1 / self.manners.manager_life_s), die)
        self.run(duration_s)

    def settle(self) -> None:
        """Everything obeys and is repaired, and time passes."""
        self.calm = True
        for index in self.hosts:
            self.after(1.0, lambda one=index: self.repair(one))
        self.run(HOUR_S)

    def check_served(self) -> None:
        """Once slices are enough, everyone who still wants them has them, and runs."""
        assert self.manager is not None
        status = self.manager.status()
        for shape in {str(hosts.shape) for hosts in self.hosts.values()}:
            room = sum(str(hosts.shape) == shape for hosts in self.hosts.values())
            room -= self.policy.spares
            jobs = [job for job in status["jobs"] if job["shape"] == shape]
            enough = sum(job["wanted"] for job in jobs) <= room
            for job in jobs:
                client = self.clients[job["name"]]
                # Those of its own priority may have come first.
                rivals = [other for other in jobs if other["priority"] >= job["priority"]]
                fits = sum(other["wanted"] for other in rivals) <= room
                if not (enough or (fits and client.spec.preempts)):
                    continue
                assert job["phase"] == "running", status
                assert len(job["leases"]) == job["wanted"], status
                assert client.running, status
                assert client.leases == {index: number for _, index, number in job["leases"]}

    # --- nobody is wronged ---

    def check(self, instructions: tuple[Instruction, ...], again: bool) -> None:
        assert self.manager is not None
        status = self.manager.status()
        assert records.to_json(*records.from_json(self.saved)).items() <= self.saved.items()
        self.check_leases(status)
        for shape in {str(hosts.shape) for hosts in self.hosts.values()}:
            self.check_priorities(status, shape, instructions, again)

    def check_leases(self, status: dict[str, Any]) -> None:
        owners: dict[int, str] = {}
        for job in status["jobs"]:
            ranks = [rank for rank, _, _ in job["leases"]]
            assert len(ranks) == len(set(ranks)), f"two slices of one rank: {job}"
            for _, index, _ in job["leases"]:
                assert index not in owners, f"slice {index} is leased twice"
                owners[index] = job["name"]

    def check_priorities(
        self,
        status: dict[str, Any],
        shape: str,
        instructions: tuple[Instruction, ...],
        again: bool,
    ) -> None:
        slices = [one for one in status["slices"] if one["shape"] == shape]
        idle = sum(one["state"] == "idle" for one in slices)
        coming = sum(one["state"] in ("asked", "fencing") for one in slices)
        held: dict[str, int] = {}
        for one in slices:
            if one["state"] == "leased":
                held[one["job"]] = held.get(one["job"], 0) + 1
        specs = {name: client.spec for name, client in self.clients.items()}
        jobs = [job for job in status["jobs"] if str(job["shape"]) == shape]
        granted = {one.job for one in instructions if isinstance(one, Grant) and not again}
        above = 0
        for place, job in enumerate(jobs):
            has = held.get(job["name"], 0)
            missing = job["wanted"] - has
            if job["phase"] in ("suspending", "stopping") or job["held"] or missing <= 0:
                continue
            spec = specs.get(job["name"])
            required = max(1, job["least"] - has)
            below = sum(
                held.get(other["name"], 0)
                for other in jobs[place + 1 :]
                if other["priority"] < job["priority"] and other["phase"] == "running"
            )
            free = max(0, idle - self.policy.spares) + coming - above
            coming_to_it = sum(
                one["reserved_for"] == job["name"] and one["state"] != "failed" for one in slices
            )
            if spec is not None and spec.preempts and below > 0 and coming_to_it < required:
                assert free + below < required, (
                    f"{job['name']} waits for {required}, and lower jobs hold {below}: {status}"
                )
            if job["phase"] == "running" and job["lost"] and required == 1 and not again:
                lower = {other["name"] for other in jobs[place + 1 :]}
                assert not granted & lower, (
                    f"{lower & granted} got what {job['name']} is about to get back"
                )
            above += missing


def is_said(do: Callable[[], None]) -> bool:
    """Whether a thing in the queue is an instruction on its way."""
    defaults = getattr(do, "__defaults__", None)
    return bool(defaults) and isinstance(defaults[0], Instruction)
