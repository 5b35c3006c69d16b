"""Slices that leave with their state saved, and come back with it: the client sees only a pause.

A suspension has these steps, and until the manifest is there the cluster is as it was:

1. The gate is closed: requests of clients wait. What is under way ends.
2. The hosts of the slices write their shards to storage and tell of what.
3. The head commits the manifest. From here on the slices are suspended: their hosts leave.
4. When they are wanted again, new hosts read the shards under the same numbers; when no slice is
   suspended any longer, programs are loaded again and the gate is opened.

If a slice is lost while its state is being saved, the suspension is given up and the loss is a loss as any
other; once the slice has saved it is none, unless the others or the manifest fail. If new hosts are lost
while they read, the slice is started again. What cannot be read leaves the slice suspended, and so does a
suspension of a slice that is on its way back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

from regrow.config import HeadConfig
from regrow.errors import ControlError, RegrowError, StatusError, StorageError, WaitTimeout
from regrow.head.asking import in_words, until
from regrow.head.guard import watch
from regrow.head.inventory import Inventory, Sessions
from regrow.head.links import Link
from regrow.head.loading import load
from regrow.head.regrouping import regrouped
from regrow.head.runtime import Runtime
from regrow.head.saving import Saving, Stored
from regrow.head.topology import Topology
from regrow.slices import (
    LIVE,
    Event,
    Membership,
    Resumed,
    ResumeFailed,
    ResumeRequested,
    StateSaved,
    Suspended,
    SuspendFailed,
)
from regrow.suspend import Snapshots, open_storage
from regrow.suspend.abandoned import FOLDER, job_folder
from regrow.suspend.points import reach

log = logging.getLogger(__name__)

LEAVE_S: Final = 15.0
RESUME_S: Final = 600.0
_GATHER_S: Final = 0.05

Tell: TypeAlias = "Callable[[str, int, int, str], None]"


class Slices(Protocol):
    """What is needed of the fleet."""

    membership: Membership

    def handle(self, event: Event) -> None:
        """Feeds the membership."""
        ...

    def dismiss(self, index: int) -> None:
        """Has the hosts of a slice end as a notice to them would have ended them."""
        ...

    def regroup(self, hosts_per_slice: int) -> None:
        """Slices have so many hosts from now on; raises `ControlError` where they cannot."""
        ...


@final
class Suspension:
    """The suspended slices of a cluster.

    Attributes:
        stored: For each suspended slice the parts of its hosts, by number of their buffer.
        number: The latest snapshot that was committed, 0: none.
    """

    def __init__(
        self,
        config: HeadConfig,
        runtime: Runtime,
        slices: Slices,
        sessions: Callable[[], Sessions],
        tell: Tell,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._slices = slices
        self._sessions = sessions
        self._saving = Saving(
            config, runtime, sessions, lambda index: slices.handle(StateSaved(index))
        )
        self._tell = tell
        self.stored: Stored = {}
        self.number = 0
        self._store: Snapshots | None = None
        self._used: set[str] = set()  # Places where there are snapshots.
        self._needed: set[str] = set()  # Those where one has what a lost slice held.
        self._turn = asyncio.Lock()
        self._saves = False
        self._awaited: dict[int, asyncio.Future[None]] = {}  # Of the slices on their way back.
        self._former_hosts: int | None = None  # Until one is back with another number of them.
        self._noticed: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        runtime.suspension = self

    # --- what is known ---

    def place(self, url: str | None = None) -> str:
        """Where the state of this cluster goes: a folder of its own at `url`, or at the usual place."""
        config = self._config
        base = url or config.gcs_scratch_location or f"{config.home}/{FOLDER}"
        return f"{base.rstrip('/')}/{job_folder(config.name, config.run_id)}"

    def describe(self) -> dict[str, Any]:
        """What there is to know, as JSON values."""
        return {
            "slices": sorted(self.stored),
            "snapshot": self.number or None,
            "url": None if self._store is None else self._store.url,
            "waiting_clients": self._runtime.gate.waiting,
        }

    # --- suspending ---

    async def suspend(
        self,
        slices: Sequence[int] | None,
        why: str,
        *,
        url: str | None = None,
        grace_s: float | None = None,
    ) -> dict[str, Any]:
        """Suspends slices; returns when their state is committed and their hosts are gone.

        Once begun it goes on, also when the caller is cancelled: half of it would be neither the old
        state nor the new one.

        Args:
            slices: Which; None: all that are not suspended yet. One that is being resumed is
                suspended again, as it was.
            why: What asked for it.
            url: Where the state goes; None: to the place of this cluster.
            grace_s: When the hosts will be ended by others; None: nobody is in a hurry.

        Returns:
            The snapshot's number and url, the slices, bytes, bytes written and seconds.

        Raises:
            UsageError: There is no such slice or storage.
            ControlError: It is not possible, or failed: says what has become of slices and state.
        """
        store = Snapshots(open_storage(self.place(url)))
        work = self._keep(self._suspend(slices, why, store, grace_s))
        work.add_done_callback(_log_failure)
        return await asyncio.shield(work)

    async def _suspend(
        self, slices: Sequence[int] | None, why: str, store: Snapshots, grace_s: float | None
    ) -> dict[str, Any]:
        async with self._turn:
            began = time.monotonic()
            wanted, coming = self._wanted(slices, noticed=grace_s is not None)
            self._check_place(wanted, store)
            if coming:
                await self._take_back(coming, why)
            written = 0
            if wanted:
                written = await self._suspend_live(wanted, why, store, grace_s, coming)
            return {
                "snapshot": self.number,
                "url": self.describe()["url"],
                "slices": sorted([*wanted, *coming]),
                "bytes": self._size([*wanted, *coming]),
                "written": written,
                "took_s": time.monotonic() - began,
            }

    async def _suspend_live(
        self,
        wanted: Mapping[int, int],
        why: str,
        store: Snapshots,
        grace_s: float | None,
        coming: Sequence[int],
    ) -> int:
        """Suspends slices that are up; returns how many bytes were written."""
        before = self.number
        try:
            with self._gate_closed():
                reach("head-gate-closed")
                written = await self._save(wanted, why, store, grace_s)
        except (StatusError, StorageError, WaitTimeout, ControlError) as error:
            for index in wanted:
                self._slices.handle(SuspendFailed(index))
            told = self._not_suspended(wanted, before, error, coming)
            self._open_gate()
            # What was written in vain would keep a disk full.
            await self._sweep(store)
            raise told from None
        await self._leave(tuple(wanted), why)
        await self._sweep(store)
        return written

    @contextlib.contextmanager
    def _gate_closed(self) -> Iterator[None]:
        """Clients wait, also when the last slice that was suspended comes back meanwhile."""
        self._saves = True
        self._runtime.gate.close()
        try:
            yield
        finally:
            self._saves = False

    def _open_gate(self) -> None:
        """Lets clients go on, if everything that they have is there."""
        if not self.stored and not self._saves:
            self._runtime.gate.open()

    def _size(self, slices: Sequence[int]) -> int:
        """How many bytes of slices are on storage."""
        hosts = (host for index in slices for host in self.stored[index].values())
        return sum(one.nbytes for host in hosts for part in host.values() for one in part.shards)

    def _wanted(
        self, slices: Sequence[int] | None, *, noticed: bool
    ) -> tuple[dict[int, int], list[int]]:
        """Slices that can be suspended, with their incarnations, and those that are on their way back.

        What has got a notice and is not there any longer holds up none of the others.
        """
        membership, every = self._slices.membership, slices is None
        wanted, coming = {}, []
        for index in sorted(set(range(len(membership)) if slices is None else slices)):
            info = membership.info(index)
            if index in self._awaited:
                coming.append(index)
            elif index in self.stored:
                if not (every or noticed):
                    raise ControlError(f"slice {index} is suspended already")
            elif info.state in LIVE:
                wanted[index] = info.incarnation
            elif not noticed:
                raise ControlError(
                    f"slice {index} is {info.state}; only a slice that is up is suspended"
                )
        if not wanted and not coming:
            raise ControlError("all slices are suspended already" if every else "no slice is up")
        return wanted, coming

    def _check_place(self, wanted: Mapping[int, int], store: Snapshots) -> None:
        """Checks that all that is suspended is in one place."""
        if wanted and self.stored and self._store is not None and self._store.url != store.url:
            text = f"other slices are suspended to {self._store.url}; use that place"
            raise self._not_suspended(wanted, self.number, ControlError(text), ())

    def _not_suspended(
        self,
        wanted: Mapping[int, int],
        before: int,
        error: Exception,
        coming: Sequence[int],
    ) -> ControlError:
        """Why slices are not suspended, and what is no longer as it was before."""
        text, why = f"{_named(tuple(wanted))} not suspended", in_words(error)
        if coming:
            why += f"; the resumption of {_named(coming)} was taken back before"
        if self.number > before:
            at = f"snapshot {self.number} at {self.describe()['url']}"
            return ControlError(
                f"{text}: {why}; {at} was committed before that, and holds the state"
            )
        if self._lost(wanted):
            latest = f"snapshot {before} is still the latest" if before else "there is no snapshot"
            return ControlError(f"{text}: {why}; {latest}")
        return ControlError(f"{text}, everything is as it was: {why}")

    def _lost(self, wanted: Mapping[int, int]) -> list[int]:
        """Those that are not what they were any more."""
        is_live = self._slices.membership.is_live
        return [index for index, incarnation in wanted.items() if not is_live(index, incarnation)]

    async def _save(
        self, wanted: Mapping[int, int], why: str, store: Snapshots, grace_s: float | None
    ) -> int:
        """Saves and commits; then `number` is that of the new snapshot, also if it raises.

        Returns:
            How many bytes were written.
        """
        saved = await self._saving.save(
            tuple(wanted), why, store, grace_s=grace_s, others=self.stored, above=self.number
        )
        self.number, self._store = saved.number, store
        self._used.add(store.url)
        reach("head-committed")
        if lost := self._lost(wanted):
            self._needed.add(store.url)
            raise ControlError(f"{_named(lost)} had been lost meanwhile")
        self.stored |= saved.stored
        return saved.written

    async def _leave(self, wanted: Sequence[int], why: str) -> None:
        """The state is saved: the hosts leave, and are waited for."""
        membership = self._slices.membership
        for index in wanted:
            self._runtime.slice_leaves(index)
            self._slices.handle(Suspended(index, why))
            self._tell("slice_suspended", index, membership.info(index).incarnation, why)
        await self._until_gone(wanted)
        for index in wanted:
            self._runtime.slice_left(index, membership.info(index).incarnation)
        reach("head-left")

    async def _until_gone(self, slices: Sequence[int]) -> None:
        """Waits for the hosts of slices, which have been told to leave."""
        membership = self._slices.membership

        def gone() -> bool:
            infos = [membership.info(index) for index in slices]
            return all(host.state == "gone" for info in infos for host in info.hosts)

        with contextlib.suppress(WaitTimeout):
            await until(gone, LEAVE_S, f"the hosts of {_named(slices)} to leave")

    async def _sweep(self, store: Snapshots) -> None:
        """Removes what no snapshot needs: nobody writes to the store now."""
        try:
            gone = await asyncio.to_thread(store.sweep)
            log.info("%s: %d files swept", store.url, gone)
        except RegrowError as error:
            log.warning("%s is not swept: %s", store.url, error)
        reach("head-swept")

    # --- notices ---

    def noticed(self, index: int, why: str) -> None:
        """A host of a slice was told that it is going to be ended."""
        if index in self._noticed:
            return
        if not self._noticed:
            self._spawn(self._answer_notices(why))
        self._noticed.add(index)

    async def _answer_notices(self, why: str) -> None:
        await asyncio.sleep(_GATHER_S)  # Who is ended together is suspended together.
        noticed, self._noticed = sorted(self._noticed), set()
        began = time.monotonic()
        try:
            done = await self.suspend(noticed, f"a notice: {why}", grace_s=self._config.grace_s)
        except RegrowError as error:
            log.warning("after a notice: %s", error)
            for index in noticed:
                self._dismiss(index)
            return
        log.info("suspended %.2f s after the notice", time.monotonic() - began)
        if self._config.resume_after_s is not None:
            await asyncio.sleep(self._config.resume_after_s)
            again = [index for index in done["slices"] if index in self.stored]
            if again:
                await self._resume_by_itself(again)

    def _dismiss(self, index: int) -> None:
        if index not in self.stored and self._slices.membership.info(index).state in LIVE:
            self._slices.dismiss(index)

    async def _resume_by_itself(self, slices: Sequence[int]) -> None:
        try:
            await self.resume(slices)
        except RegrowError as error:
            log.error("%s", error)

    # --- resuming ---

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
        async with self._turn:
            wanted = sorted(self.stored) if slices is None else sorted(set(slices))
            for index in wanted:
                info = self._slices.membership.info(index)
                if index not in self.stored:
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
            raise WaitTimeout(f"{_named(wanted)} to come back: {text}", timeout_s) from None
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
        stored = regrouped(self.stored, inventory.buffers.values(), after)
        self._slices.regroup(hosts)
        self._runtime.buffers.regroup(hosts)
        self.stored = stored

    async def _take_back(self, slices: Sequence[int], why: str) -> None:
        """Has slices that are on their way back be suspended, as they were."""
        for index in slices:
            self._not_back(index, f"its resumption was taken back: {why}")
            incarnation = self._slices.membership.info(index).incarnation
            self._tell("slice_suspended", index, incarnation, why)
        await self._until_gone(slices)
        whole = len(self.stored) == len(self._slices.membership) and not self._awaited
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
        assert self._store is not None, "a slice is stored somewhere"
        is_live, incarnation = self._slices.membership.is_live, links[0].incarnation
        if not is_live(index, incarnation):
            return
        inventory = Inventory(self._sessions(), self._runtime.buffers)
        failure = None
        try:
            await load(links, self.stored[index], inventory, self._store.url)
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
        wait = self._awaited.pop(index, None)
        if wait is not None and not wait.done():
            wait.set_exception(error)

    def _back(self, index: int) -> None:
        del self.stored[index]
        self._former_hosts = None
        self._slices.handle(Resumed(index))
        incarnation = self._slices.membership.info(index).incarnation
        self._tell("slice_resumed", index, incarnation, "")
        # Programs are loaded again as they are used, as after a loss.
        self._open_gate()
        reach("head-resumed")
        wait = self._awaited.pop(index, None)
        if wait is not None and not wait.done():
            wait.set_result(None)

    # --- the end ---

    async def close(self) -> None:
        """The head ends: nothing goes on; a store that nobody needs is removed."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._used:
            return
        own, needed = open_storage(self.place()), set(self._needed)
        if self.stored and self._store is not None:
            needed.add(self._store.url)
        if own.url in self._used - needed:
            await asyncio.to_thread(own.clear)

    def _spawn(self, work: Any) -> None:
        watch(self._keep(work))

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _log_failure(work: asyncio.Task[Any]) -> None:
    """Whoever asked may be gone, and is told as long as he is there."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("%s", error)


def _named(slices: Sequence[int]) -> str:
    names = ", ".join(map(str, slices))
    return f"slice {names}" if len(slices) == 1 else f"slices {names}"
