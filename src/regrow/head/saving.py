"""How the state of slices gets to storage: work in flight ends, hosts write, the head commits.

The hosts write their shards themselves, so nothing of them passes through the head. It puts together what
they tell of them, and writes the manifest that makes a snapshot of it (see `regrow.suspend`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from regrow import __version__
from regrow.channel import commands as c
from regrow.config import HeadConfig
from regrow.errors import Code, ControlError, StatusError, StorageError, WaitTimeout
from regrow.head.asking import ask_all, until
from regrow.head.inventory import Inventory, Sessions, part_entry, stateful
from regrow.head.links import Link
from regrow.head.runtime import Runtime
from regrow.suspend import Manifest, PartEntry, Snapshots
from regrow.suspend.judge import Facts, objection
from regrow.suspend.points import reach
from regrow.suspend.shards import CHUNK_BYTES
from regrow.suspend.snapshots import CHUNKS
from regrow.wire.schema import jaxlib_version

DRAIN_S: Final = 60.0
SAVE_S: Final = 600.0
GIVE_UP_S: Final = 10.0
_SLOW: Final = 20e6
_WORTH_MEASURING: Final = 8 << 20
_SPEED_WEIGHT: Final = 0.5

Stored: TypeAlias = dict[int, dict[int, dict[int, PartEntry]]]
"""By slice, host and number of the buffer, what was saved."""


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot that was committed.

    Attributes:
        number: Its number.
        stored: What the slices that were asked for have saved.
        written: How many bytes of it were not in storage before.
    """

    number: int
    stored: Stored
    written: int


@final
class Saving:
    """Saves the state of slices, and knows how fast the storage is."""

    def __init__(
        self,
        config: HeadConfig,
        runtime: Runtime,
        sessions: Callable[[], Sessions],
        on_saved: Callable[[int], None],
    ) -> None:
        """Knows nothing of any storage yet.

        Args:
            config: Of the head.
            runtime: Of the head.
            sessions: Tells of all clients' sessions.
            on_saved: Is told of each slice that has nothing to save any more.
        """
        self._config = config
        self._runtime = runtime
        self._sessions = sessions
        self._on_saved = on_saved
        self._speed: float | None = None

    async def save(
        self,
        wanted: Sequence[int],
        why: str,
        store: Snapshots,
        *,
        grace_s: float | None,
        others: Stored,
        above: int,
    ) -> Saved:
        """Has what lives on some slices written, and commits it.

        Args:
            wanted: The slices, which are up, and get no work from clients meanwhile.
            why: What asked for it.
            store: Where to.
            grace_s: How long it may take; None: nobody is in a hurry.
            others: What other slices had saved before; it belongs to the snapshot, too.
            above: The snapshot gets a higher number than this.

        Raises:
            ControlError: It cannot be done, or not in time.
            StatusError: A slice was lost, or could not write.
            StorageError: The place cannot be used, or not by all.
            WaitTimeout: Something took too long.
        """
        began = time.monotonic()
        self._check(wanted, None, grace_s)
        # An unusable place shows before anything waits for it.
        numbers = await asyncio.to_thread(store.numbers)
        await self._drain(DRAIN_S if grace_s is None else grace_s)
        reach("head-drained")
        inventory = Inventory(self._sessions(), self._runtime.buffers)
        left_s = None if grace_s is None else grace_s - (time.monotonic() - began)
        await self._measure(wanted, store, inventory.size(wanted), left_s)
        self._check(wanted, inventory, left_s)
        answers = await self._ask_to_save(wanted, store, inventory, left_s)
        reach("head-saves-in")
        stored = {index: await self._parts(answers, index) for index in wanted}
        await asyncio.to_thread(_check_common, store, stored)
        number = max([above, *numbers]) + 1
        manifest = self._manifest(number, why, others | stored, inventory)
        reach("head-manifest-made")
        await asyncio.to_thread(store.commit, manifest)
        written = sum(answer[2] for answer in answers.values())
        self._learn(written, max((answer[3] for answer in answers.values()), default=0.0))
        return Saved(number, stored, written)

    def _check(
        self, wanted: Sequence[int], inventory: Inventory | None, grace_s: float | None
    ) -> None:
        facts = Facts(
            stateful=stateful(self._sessions()),
            unsaved=() if inventory is None else inventory.unsaved,
            nbytes=0 if inventory is None else inventory.size(wanted),
            speed=self._speed,
            grace_s=grace_s,
        )
        refused = objection(facts)
        if refused is not None:
            raise ControlError(refused)

    async def _drain(self, timeout_s: float) -> None:
        """Waits until nothing is under way, on any host."""
        links = self._runtime.buffers.links
        what = "the work in flight to end"
        began = time.monotonic()
        await ask_all([(link, c.Drain) for link in links.values()], timeout_s, what)
        left_s = max(0.1, timeout_s - (time.monotonic() - began))
        await until(lambda: not any(link.waiting for link in links.values()), left_s, what)
        await self._settle_statuses(left_s)

    async def _settle_statuses(self, timeout_s: float) -> None:
        """What stands for the end of an execution becomes how it ended."""
        waits = []
        for tables in self._sessions().values():
            for handle, status in list(tables.statuses.items()):
                if isinstance(status, list) and status:
                    waits.append((tables.statuses, handle, status))
        left = len(waits)

        def ended(statuses: Any, handle: int, error: StatusError | None, _: Any) -> None:
            nonlocal left
            left -= 1
            if handle in statuses:
                statuses[handle] = [] if error is None else error.fresh()

        for statuses, handle, status in waits:
            self._runtime.transfers.ready(status, functools.partial(ended, statuses, handle))
        await until(lambda: not left, timeout_s, "the ends of executions")

    def _links(self, slices: Sequence[int]) -> dict[int, Link]:
        topology = self._runtime.topology
        links = self._runtime.buffers.links
        return {host: links[host] for host in links if topology.slice_of_host(host) in slices}

    async def _measure(
        self, wanted: Sequence[int], store: Snapshots, size: int, grace_s: float | None
    ) -> None:
        """Has the speed of the storage measured, where it decides."""
        if grace_s is None or self._speed is not None or size / _SLOW < grace_s / 4:
            return
        link = next(iter(self._links(wanted).values()))
        url = store.url
        what = f"a measurement of {url}"
        answers = await ask_all([(link, lambda rid: c.Measure(rid, url))], grace_s, what)
        self._speed = float(answers[0])

    def _learn(self, written: int, took_s: float) -> None:
        """Keeps in mind how fast the storage was."""
        if written < _WORTH_MEASURING or took_s <= 0:
            return
        speed, known = written / took_s, self._speed
        weight = _SPEED_WEIGHT
        self._speed = speed if known is None else weight * speed + (1 - weight) * known

    async def _ask_to_save(
        self, wanted: Sequence[int], store: Snapshots, inventory: Inventory, grace_s: float | None
    ) -> dict[int, Any]:
        links = self._links(wanted)
        count = len(links)
        left = Counter(link.slice_index for link in links.values())

        def question(turn: int, host: int) -> Callable[[int], Any]:
            aids = inventory.on_host(host)
            return lambda rid: c.Save(rid, store.url, aids, turn / count)

        def heard(link: Link) -> None:
            left[link.slice_index] -= 1
            if not left[link.slice_index]:
                self._on_saved(link.slice_index)

        questions = [
            (link, question(turn, host)) for turn, (host, link) in enumerate(links.items())
        ]
        timeout_s = SAVE_S if grace_s is None else grace_s
        try:
            what = f"state to be written to {store.url}"
            answers = await ask_all(questions, timeout_s, what, heard)
        except (StatusError, WaitTimeout):
            await self._give_up(links.values())
            raise
        return dict(zip(links, answers, strict=True))

    async def _give_up(self, links: Iterable[Link]) -> None:
        """Has hosts stop saving; when it returns nobody writes, unless one does not answer."""
        left = [link for link in links if link.lost is None]
        for link in left:
            link.send(c.GiveUp())

        def over() -> bool:
            return not any(link.waiting for link in left)

        with contextlib.suppress(WaitTimeout):
            await until(over, GIVE_UP_S, "hosts to give up saving")

    async def _parts(self, answers: dict[int, Any], index: int) -> dict[int, dict[int, PartEntry]]:
        """By host and buffer, what the hosts of a slice have saved."""
        found: dict[int, dict[int, PartEntry]] = {}
        for host, answer in answers.items():
            if self._runtime.topology.slice_of_host(host) != index:
                continue
            parts = found[host] = {}
            for aid, shards, error in answer[0]:
                told = None if error is None else await self._judged(*error)
                parts[aid] = part_entry(aid, shards, told)
        return found

    async def _judged(self, code: int, message: str, epoch: int) -> tuple[int, str]:
        """What the error of a part really is."""
        if not epoch:
            return code, message
        verdict: asyncio.Future[StatusError] = asyncio.get_running_loop().create_future()
        error = StatusError(Code(code), message)
        self._runtime.epochs.judge(epoch, error, verdict.set_result)
        async with asyncio.timeout(self._config.hang_after_s * 2):
            told = await verdict
        return int(told.code), told.message

    def _manifest(
        self,
        number: int,
        why: str,
        stored: Stored,
        inventory: Inventory,
    ) -> Manifest:
        topology = self._runtime.topology
        merged: dict[int, PartEntry] = {}
        for hosts in stored.values():
            for parts in hosts.values():
                for aid, part in parts.items():
                    other = merged.get(aid)
                    merged[aid] = part if other is None else _merged(other, part)
        return Manifest(
            number=number,
            job=self._config.name,
            when=time.time(),
            why=why,
            versions={"regrow": __version__, "jaxlib": jaxlib_version()},
            slices=tuple(sorted(stored)),
            topology={
                "slices": topology.slices,
                "hosts_per_slice": topology.hosts_per_slice,
                "devices_per_slice": topology.devices_per_slice,
            },
            chunk_bytes=CHUNK_BYTES,
            arrays=inventory.entries(),
            parts=tuple(merged.values()),
        )


def _check_common(store: Snapshots, stored: Stored) -> None:
    """Looks here for one chunk of each host, which may have written to its own machine's disk.

    Raises:
        StorageError: It is not there, and would be gone with the host.
    """
    for host, parts in (item for hosts in stored.values() for item in hosts.items()):
        names = (name for part in parts.values() for one in part.shards for name in one.chunks)
        name = next(names, None)
        if name is not None and store.storage.size(f"{CHUNKS}/{name}") is None:
            raise StorageError(
                f"what host {host} has written to {store.url} is not there for the head: name a place "
                "that all machines reach, by --gcs_scratch_location"
            )


def _merged(one: PartEntry, other: PartEntry) -> PartEntry:
    error = one.error or other.error
    return PartEntry(one.buffer, () if error else one.shards + other.shards, error)
