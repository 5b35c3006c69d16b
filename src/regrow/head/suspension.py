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
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from regrow.config import HeadConfig
from regrow.errors import ControlError, RegrowError, StatusError, StorageError, WaitTimeout
from regrow.head.asking import in_words
from regrow.head.guard import Tasks
from regrow.head.inventory import Sessions
from regrow.head.links import Link
from regrow.head.notices import Notices
from regrow.head.resumption import Resumption
from regrow.head.runtime import Runtime
from regrow.head.saving import Saving, Stored
from regrow.head.suspended import Slices, SuspendedSlices, Tell, named, until_gone
from regrow.slices import LIVE, StateSaved, Suspended, SuspendFailed
from regrow.suspend import Snapshots, open_storage
from regrow.suspend.abandoned import FOLDER, job_place
from regrow.suspend.points import reach

log = logging.getLogger(__name__)


@final
class Suspension:
    """Suspends the slices of a cluster, and looks after those that are suspended.

    Attributes:
        resumption: Brings them back.
    """

    def __init__(
        self,
        config: HeadConfig,
        runtime: Runtime,
        slices: Slices,
        sessions: Callable[[], Sessions],
        tell: Tell,
    ) -> None:
        self._tasks = Tasks()
        self._config = config
        self._runtime = runtime
        self._slices = slices
        self._saving = Saving(
            config, runtime, sessions, lambda index: slices.handle(StateSaved(index))
        )
        self._tell = tell
        self._suspended = SuspendedSlices(runtime.gate)
        self.resumption = Resumption(
            runtime, slices, sessions, self._suspended, tell, self._tasks.spawn
        )
        self._notices = Notices(
            config, slices, self._suspended, self.suspend, self.resumption.resume, self._tasks.spawn
        )
        self._used: set[str] = set()  # Places where there are snapshots.
        self._needed: set[str] = set()  # Those where one has what a lost slice held.
        runtime.suspension = self

    # --- what is known ---

    def place(self, url: str | None = None) -> str:
        """Where the state of this cluster goes: a folder of its own at `url`, or at the usual place."""
        config = self._config
        base = url or config.gcs_scratch_location or f"{config.home}/{FOLDER}"
        return job_place(base, config.name, config.run_id)

    def describe(self) -> dict[str, Any]:
        """What there is to know, as JSON values."""
        return {
            "slices": sorted(self._suspended.stored),
            "snapshot": self._suspended.number or None,
            "url": self._suspended.url,
            "place": self.place(),
            "waiting_clients": self._runtime.gate.waiting,
        }

    @property
    def stored(self) -> Stored:
        """For each suspended slice the parts of its hosts, by number of their buffer."""
        return self._suspended.stored

    # --- what happens to slices ---

    def slice_up(self, index: int, links: Sequence[Link]) -> None:
        """New hosts of a suspended slice are up: they are given its state."""
        self.resumption.slice_up(index, links)

    def noticed(self, index: int, why: str) -> None:
        """A host of a slice was told that it is going to be ended."""
        self._notices.noticed(index, why)

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
        work = self._tasks.keep(self._suspend(slices, why, store, grace_s))
        work.add_done_callback(_log_failure)
        return await asyncio.shield(work)

    async def _suspend(
        self, slices: Sequence[int] | None, why: str, store: Snapshots, grace_s: float | None
    ) -> dict[str, Any]:
        async with self._suspended.turn:
            began = time.monotonic()
            wanted, coming = self._wanted(slices, noticed=grace_s is not None)
            self._check_place(wanted, store)
            if coming:
                await self.resumption.take_back(coming, why)
            written = 0
            if wanted:
                written = await self._suspend_live(wanted, why, store, grace_s, coming)
            return {
                "snapshot": self._suspended.number,
                "url": self._suspended.url,
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
        before = self._suspended.number
        try:
            with self._suspended.gate_closed():
                reach("head-gate-closed")
                written = await self._save(wanted, why, store, grace_s)
        except (StatusError, StorageError, WaitTimeout, ControlError) as error:
            for index in wanted:
                self._slices.handle(SuspendFailed(index))
            told = self._not_suspended(wanted, before, error, coming)
            self._suspended.open_gate()
            # What was written in vain would keep a disk full.
            await self._sweep(store)
            raise told from None
        await self._leave(tuple(wanted), why)
        await self._sweep(store)
        return written

    def _size(self, slices: Sequence[int]) -> int:
        """How many bytes of slices are on storage."""
        hosts = (host for index in slices for host in self._suspended.stored[index].values())
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
            if index in self.resumption.coming:
                coming.append(index)
            elif index in self._suspended.stored:
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
        if wanted and self._suspended.stored and self._suspended.url != store.url:
            text = f"other slices are suspended to {self._suspended.url}; use that place"
            raise self._not_suspended(wanted, self._suspended.number, ControlError(text), ())

    def _not_suspended(
        self,
        wanted: Mapping[int, int],
        before: int,
        error: Exception,
        coming: Sequence[int],
    ) -> ControlError:
        """Why slices are not suspended, and what is no longer as it was before."""
        text, why = f"{named(tuple(wanted))} not suspended", in_words(error)
        if coming:
            why += f"; the resumption of {named(coming)} was taken back before"
        if self._suspended.number > before:
            at = f"snapshot {self._suspended.number} at {self._suspended.url}"
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
            tuple(wanted),
            why,
            store,
            grace_s=grace_s,
            others=self._suspended.stored,
            above=self._suspended.number,
        )
        self._suspended.number, self._suspended.store = saved.number, store
        self._used.add(store.url)
        reach("head-committed")
        if lost := self._lost(wanted):
            self._needed.add(store.url)
            raise ControlError(f"{named(lost)} had been lost meanwhile")
        self._suspended.stored |= saved.stored
        return saved.written

    async def _leave(self, wanted: Sequence[int], why: str) -> None:
        """The state is saved: the hosts leave, and are waited for."""
        membership = self._slices.membership
        for index in wanted:
            self._runtime.slice_leaves(index)
            self._slices.handle(Suspended(index, why))
            self._tell("slice_suspended", index, membership.info(index).incarnation, why)
        await until_gone(membership, wanted)
        for index in wanted:
            self._runtime.slice_left(index, membership.info(index).incarnation)
        reach("head-left")

    async def _sweep(self, store: Snapshots) -> None:
        """Removes what no snapshot needs: nobody writes to the store now."""
        try:
            gone = await asyncio.to_thread(store.sweep)
            log.info("%s: %d files swept", store.url, gone)
        except RegrowError as error:
            log.warning("%s is not swept: %s", store.url, error)
        reach("head-swept")

    # --- the end ---

    async def close(self) -> None:
        """The head ends: nothing goes on; a store that nobody needs is removed."""
        await self._tasks.close()
        if not self._used:
            return
        own, needed = open_storage(self.place()), set(self._needed)
        if self._suspended.stored and self._suspended.url is not None:
            needed.add(self._suspended.url)
        if own.url in self._used - needed:
            await asyncio.to_thread(own.clear)


def _log_failure(work: asyncio.Task[Any]) -> None:
    """Whoever asked may be gone, and is told as long as he is there."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("%s", error)
