"""The hosts of one node, as processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, final

from regrow.cloud.hosts.spec import AgentState, HostSpec, run_id
from regrow.cloud.machine import Event, HostsDown, HostsFailed, HostsUp
from regrow.cloud.resources import Power
from regrow.processes import Child, end_run, python_argv, server_environ, spawn, telling_line

logger = logging.getLogger(__name__)

_AGENT: Final = "regrow.cloud.hosts.agent"
_MARGIN_S: Final = 2.0


@final
class SliceHosts:
    """Starts and ends the hosts of one node, and reports what becomes of them.

    What it is to do may change at any time: it then drops what it was at.
    """

    def __init__(self, uid: int, directory: Path, report: Callable[[Event], None]) -> None:
        """Knows a node whose hosts have not been started.

        Args:
            uid: The node's number.
            directory: Where its hosts' directories are.
            report: Is told what happens.
        """
        self._uid = uid
        self._directory = directory
        self._report = report
        self._boot: tuple[int, int] = (0, 0)
        self._agents: dict[int, Child] = {}
        # Hosts that were told to end; kept until they are reaped, whoever is interrupted meanwhile.
        self._leaving: list[Child] = []
        self._task: asyncio.Task[None] | None = None
        # The mark is the same for all boots, so that nothing of a former one can be overlooked.
        self._run_id = run_id(str(uid))

    # --- what it is told ---

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Starts the hosts anew: at once, however many of a former boot run."""
        self._begin(self._start(specs))

    def tell(self, specs: Sequence[HostSpec]) -> None:
        """Tells hosts that run what has changed for them."""
        for worker, spec in enumerate(specs):
            spec.write()
            agent = self._agents.get(worker)
            if agent is not None:
                agent.send(signal.SIGHUP)

    def stop(self, boot: tuple[int, int], power: Power, *, polite_s: float | None) -> None:
        """Ends the hosts.

        Args:
            boot: The incarnation and boot that this is about.
            power: OFF, or GONE to remove their disks as well.
            polite_s: SIGTERM to SIGKILL; None: SIGKILL at once.
        """
        self._begin(self._stop(boot, power, polite_s))

    def adopt(self, specs: Sequence[HostSpec]) -> str | None:
        """Takes over hosts that an earlier server has started.

        Returns:
            None if all of them run in the boot that they should; else what is wrong.
        """
        self._boot = (specs[0].incarnation, specs[0].boot)
        for worker, spec in enumerate(specs):
            state = AgentState.read(Path(spec.directory))
            if state is None or (state.incarnation, state.boot) != self._boot:
                return f"worker {worker} was not up when the server started"
            if not state.process.alive():
                return f"worker {worker} had ended when the server started"
            try:
                agent = Child(state.process.pid)
            except ProcessLookupError:
                return f"worker {worker} had ended when the server started"
            self._watch(worker, agent, Path(spec.directory))
        self.tell(specs)
        return None

    async def close(self, polite_s: float) -> None:
        """Ends the hosts and waits for their end."""
        self._cancel()
        await self._end(polite_s)

    # --- what it does ---

    def _begin(self, course: Coroutine[Any, Any, None]) -> None:
        self._cancel()
        self._task = asyncio.get_running_loop().create_task(course)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A failure of ours is the failure of the hosts, so that nobody waits for them for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the hosts of node %d", self._uid, exc_info=error)
            self._failed(f"the hosts could not be started or ended: {error!r}")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _start(self, specs: Sequence[HostSpec]) -> None:
        await self._end(None)
        boot = (specs[0].incarnation, specs[0].boot)
        if boot[0] != self._boot[0]:
            await asyncio.to_thread(_remove_others, self._directory, boot[0])
        self._boot = boot
        readers: list[int] = []
        try:
            for worker, spec in enumerate(specs):
                readers.append(self._spawn(worker, spec))
            # One that ends before it is up is noticed as any other end.
            if all([await _is_ready(reader) for reader in readers]):
                self._report(HostsUp(self._uid, *boot))
        except OSError as error:
            self._failed(f"a host could not be started: {error}")
        finally:
            for reader in readers:
                os.close(reader)

    def _spawn(self, worker: int, spec: HostSpec) -> int:
        """Starts one host; returns where it will tell that it is up."""
        spec.write()
        directory = Path(spec.directory)
        reader, writer = os.pipe()
        try:
            with (directory / "agent.log").open("ab") as log:
                pid = spawn(
                    python_argv(_AGENT, str(directory), str(writer)),
                    server_environ(os.environ, self._run_id),
                    output=log.fileno(),
                    keep=[writer],
                )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._watch(worker, Child(pid), directory)
        return reader

    def _watch(self, worker: int, agent: Child, directory: Path) -> None:
        self._agents[worker] = agent
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(agent.fd)
            cause = agent.poll()
            if self._agents.get(worker) is agent:
                del self._agents[worker]
                why = telling_line(directory / "agent.log")
                self._failed(f"worker {worker} has ended: {cause}{f': {why}' if why else ''}")

        loop.add_reader(agent.fd, ended)

    def _failed(self, why: str) -> None:
        """One host is lost, and with it the slice."""
        self._report(HostsFailed(self._uid, *self._boot, why))

    async def _stop(self, boot: tuple[int, int], power: Power, polite_s: float | None) -> None:
        await self._end(polite_s)
        if power is Power.GONE:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._report(HostsDown(self._uid, *boot, power))

    async def _end(self, polite_s: float | None) -> None:
        """Ends every process of the node, however it came to be."""
        loop = asyncio.get_running_loop()
        for agent in self._agents.values():
            # Nobody is to be told of an end that was asked for.
            loop.remove_reader(agent.fd)
            self._leaving.append(agent)
        self._agents.clear()
        if polite_s is not None:
            for agent in self._leaving:
                agent.send(signal.SIGTERM)
            # Each agent ends what runs on its host.
            await self._wait(polite_s + _MARGIN_S)
        await asyncio.to_thread(end_run, self._run_id)
        await self._wait(_MARGIN_S)
        self._leaving.clear()

    async def _wait(self, timeout_s: float) -> None:
        waits = [asyncio.to_thread(agent.wait, timeout_s) for agent in self._leaving]
        await asyncio.gather(*waits)


async def _is_ready(reader: int) -> bool:
    """Waits until a host has told that it is up, or has ended."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_reader(reader, told.set)
    try:
        await told.wait()
    finally:
        loop.remove_reader(reader)
    return os.read(reader, 64) != b""


def _remove_others(directory: Path, incarnation: int) -> None:
    """Removes the disks of former incarnations."""
    for entry in directory.glob("*"):
        if entry.name != str(incarnation):
            shutil.rmtree(entry, ignore_errors=True)
