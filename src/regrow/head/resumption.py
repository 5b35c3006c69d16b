"""Slices that come back with the state that they were suspended with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any, Final, final

from regrow.errors import ControlError, StatusError, WaitTimeout
from regrow.head.asking import in_words
from regrow.head.inventory import Inventory, Sessions
from regrow.head.links import Link
from regrow.head.loading import load
from regrow.head.regrouping import regrouped
from regrow.head.runtime import Runtime
from regrow.head.suspended import Slices, SuspendedSlices, Tell, named, until_gone
from regrow.head.topology import Topology
from regrow.slices import Resumed, ResumeFailed, ResumeRequested
from regrow.suspend.points import reach

log = logging.getLogger(__name__)

RESUME_S: Final = 600.0


@final
class Resumption:
    """Brings suspended slices back, or has them suspended again on their way."""

    def __init__(
        self,
        runtime: Runtime,
        slices: Slices,
        sessions: Callable[[], Sessions],
        suspended: SuspendedSlices,
        tell: Tell,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """No slice is on its way.

        Args:
            runtime: Of the head.
            slices: The slices.
            sessions: Tells of all clients' sessions.
            suspended: What is suspended.
            tell: Is told of each change.
            spawn: Runs a coroutine until it ends.
        """
        self._runtime = runtime
        self._slices = slices
        self._sessions = sessions
        self._suspended = suspended
        self._tell = tell
        self._spawn = spawn
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self._former_hosts: int | None = None  # Until one is back with another number of them.

    @property
    def coming(self) -> Container[int]:
        """The slices that are on their way back."""
        return self._awaited

    async def resume(
        self,
        slices: Sequence[int] | None,
        timeout_s: float | None = None,
        hosts_per_slice: int | None = None,
    ) -> dict[str, Any]:
        """Starts suspended slices; returns when their state is back.

        Args:
            slices: Which; None: all that are suspended.
            timeout_s: How long it may take; None: ten minutes.
            hosts_per_slice: With how many hosts each; None: as many as before.

        Raises:
            UsageError: There is no such slice, or it cannot have so many hosts.
            ControlError: Nothing is suspended, or the state cannot be read: it stays suspended.
            WaitTimeout: It takes too long, and goes on.
        """
        began = time.monotonic()
        async with self._suspended.turn:
            wanted = sorted(self._suspended.stored) if slices is None else sorted(set(slices))
            for index in wanted:
                info = self._slices.membership.info(index)
                if index not in self._suspended.stored:
                    raise ControlError(f"slice {index} is {info.state} and not suspended")
            if not wanted:
                raise ControlError("no slice is suspended")
            if hosts_per_slice not in (None, self._runtime.topology.hosts_per_slice):
                self._regroup(wanted, hosts_per_slice)
            waits = [self._ask_back(index) for index in wanted]
            reach("head-resume-asked")
        done = asyncio.gather(*(asyncio.shield(wait) for wait in waits), return_exceptions=True)
        timeout_s = RESUME_S if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await done
        except TimeoutError:
            text = self._slices.membership.describe_wait(time.monotonic())
            raise WaitTimeout(f"{named(wanted)} to come back: {text}", timeout_s) from None
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return {"slices": wanted, "took_s": time.monotonic() - began}

    def _regroup(self, wanted: Sequence[int], hosts: int) -> None:
        """Has slices come back with another number of hosts.

        Raises:
            UsageError: Their devices cannot be divided so.
            ControlError: It is not possible here or now; nothing has changed.
        """
        topology, membership = self._runtime.topology, self._slices.membership
        topology.check_hosts(hosts)
        for index in range(len(membership)):
            state = membership.info(index).state
            if index in self._awaited:
                why = "is being resumed already (regrow suspend takes that back)"
            elif state != "suspended":
                why = f"is {state}"
            elif index not in wanted:
                why = "is not to be resumed"
            else:
                continue
            raise ControlError(
                f"slice {index} {why}: all slices come back with another number of hosts, or none"
            )
        former = topology.hosts_per_slice
        self._arrange(hosts)
        if self._former_hosts is None:
            self._former_hosts = former

    def _arrange(self, hosts: int) -> None:
        """What all slices have saved is for so many hosts of each from now on."""
        topology = self._runtime.topology
        inventory = Inventory(self._sessions(), self._runtime.buffers)
        after = Topology(topology.slices, hosts, topology.devices_per_slice)
        stored = regrouped(self._suspended.stored, inventory.buffers.values(), after)
        self._slices.regroup(hosts)
        self._runtime.buffers.regroup(hosts)
        self._suspended.stored = stored

    async def take_back(self, slices: Sequence[int], why: str) -> None:
        """Has slices that are on their way back be suspended, as they were."""
        for index in slices:
            self._not_back(index, f"its resumption was taken back: {why}")
            incarnation = self._slices.membership.info(index).incarnation
            self._tell("slice_suspended", index, incarnation, why)
        await until_gone(self._slices.membership, slices)
        whole = len(self._suspended.stored) == len(self._slices.membership) and not self._awaited
        if whole and self._former_hosts is not None:
            self._arrange(self._former_hosts)
            self._former_hosts = None

    def _ask_back(self, index: int) -> asyncio.Future[None]:
        wait = self._awaited.get(index)
        if wait is None:
            wait = self._awaited[index] = asyncio.get_running_loop().create_future()
            # An error that nobody waits for any longer has been logged.
            wait.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._slices.membership.info(index).state == "suspended":
            hosts = self._runtime.topology.hosts_per_slice
            self._slices.handle(ResumeRequested(index, hosts))
        return wait

    def slice_up(self, index: int, links: Sequence[Link]) -> None:
        """New hosts of a suspended slice are up: they are given its state."""
        reach("head-slice-up")
        self._spawn(self._load(index, links))

    async def _load(self, index: int, links: Sequence[Link]) -> None:
        assert self._suspended.store is not None, "a slice is stored somewhere"
        is_live, incarnation = self._slices.membership.is_live, links[0].incarnation
        if not is_live(index, incarnation):
            return
        inventory = Inventory(self._sessions(), self._runtime.buffers)
        failure = None
        try:
            await load(links, self._suspended.stored[index], inventory, self._suspended.store.url)
        except (StatusError, WaitTimeout) as error:
            failure = in_words(error)
        if not is_live(index, incarnation):
            # The membership starts it again, unless it is to be suspended.
            log.warning("slice %d was lost while it was given its state: %s", index, failure)
        elif failure is not None:
            self._not_back(index, f"its state cannot be read: {failure}")
        else:
            reach("head-loads-in")
            self._back(index)

    def _not_back(self, index: int, why: str) -> None:
        """The slice is suspended as it was."""
        log.error("slice %d stays suspended: %s", index, why)
        incarnation = self._slices.membership.info(index).incarnation
        self._runtime.slice_leaves(index)
        self._slices.handle(ResumeFailed(index, why))
        self._runtime.slice_left(index, incarnation)
        error = ControlError(f"slice {index} stays suspended, nothing is lost: {why}")
        self._settle(index, error)

    def _back(self, index: int) -> None:
        del self._suspended.stored[index]
        self._former_hosts = None
        self._slices.handle(Resumed(index))
        incarnation = self._slices.membership.info(index).incarnation
        self._tell("slice_resumed", index, incarnation, "")
        # Programs are loaded again as they are used, as after a loss.
        self._suspended.open_gate()
        reach("head-resumed")
        self._settle(index, None)

    def _settle(self, index: int, error: ControlError | None) -> None:
        """Tells whoever waits for a slice what has become of it."""
        wait = self._awaited.pop(index, None)
        if wait is None or wait.done():
            return
        if error is None:
            wait.set_result(None)
        else:
            wait.set_exception(error)
