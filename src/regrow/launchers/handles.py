"""What the handles of processes have in common, whoever runs them (see `base.Process`)."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from regrow.launchers.base import Process
from regrow.processes import has_ended


class ProcessHandle(abc.ABC):
    """A process that ends once, of which those are told who have asked for it."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self._pid = pid
        self._loop = loop
        self._cause: str | None = None
        self._callbacks: list[Callable[[str], None]] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    def cause(self) -> str | None:
        """How it ended; None while it runs."""
        return self._cause

    def kill(self) -> None:
        """Ends it and the processes of its group."""
        self._send_group(signal.SIGKILL)

    def stop(self) -> None:
        """Stops it and the processes of its group."""
        self._send_group(signal.SIGSTOP)

    def cont(self) -> None:
        """Lets it and the processes of its group go on."""
        self._send_group(signal.SIGCONT)

    @abc.abstractmethod
    def send(self, signum: signal.Signals) -> None:
        """Sends it, and nothing that it has started, a signal."""

    @abc.abstractmethod
    def _send_group(self, signum: signal.Signals) -> None: ...

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Has the loop call `callback` with the cause once it has ended."""
        if self._cause is None:
            self._callbacks.append(callback)
        else:
            self._loop.call_soon(callback, self._cause)

    def _is_over(self, cause: str) -> None:
        """Takes how it ended, and tells."""
        self._cause = cause
        for callback in self._callbacks:
            self._loop.call_soon(callback, cause)
        self._callbacks.clear()


async def kill_all(processes: Iterable[Process], timeout_s: float) -> None:
    """Kills processes, and waits until they have ended, but no longer than the deadline."""
    waits: list[asyncio.Future[str]] = []
    for process in list(processes):
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process.on_exit(ended.set_result)
        process.kill()
        waits.append(ended)
    if waits:
        await asyncio.wait(waits, timeout=timeout_s)


class PidfdHandle(ProcessHandle):
    """A process of this machine that is not our child.

    Attributes:
        fd: Becomes readable when it ends; closed when that has been taken note of.
    """

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to watch it.

        Raises:
            ProcessLookupError: If it is gone.
        """
        super().__init__(pid, loop)
        self.fd = os.pidfd_open(pid)

    def send(self, signum: signal.Signals) -> None:
        """Sends it, and nothing that it has started, a signal."""
        if self._cause is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.fd, signum)

    def _send_group(self, signum: signal.Signals) -> None:
        if self._cause is not None or has_ended(self.fd):
            return
        self.send(signum)
        # Its number is that of its group as long as it lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signum)

    def _is_over(self, cause: str) -> None:
        os.close(self.fd)
        super()._is_over(cause)
