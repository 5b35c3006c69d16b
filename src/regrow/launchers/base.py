"""What a launcher has to offer: host processes that can be started, ended and watched."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

Option = str | int | float | bool | bytes | None | list[int] | list[str]


@final
@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host of a slice, to be started.

    Attributes:
        slice_index: The slice that it belongs to.
        host_index: Its place within the slice.
        incarnation: The incarnation of the slice; a later one gets a greater number.
        devices: Logical ids of the devices that it owns.
        endpoint: Where the head listens for workers: the path of a Unix socket, or host:port.
        secret: What the worker proves to know when it connects.
        options: Further entries of the worker's specification.
        note: Is told what its start waits for, if that may take long.
        wanted: Whether it is to be started still; one that is not is not waited for.
    """

    slice_index: int
    host_index: int
    incarnation: int
    devices: tuple[int, ...]
    endpoint: str
    secret: bytes
    options: Mapping[str, Option] = field(default_factory=dict)
    note: Callable[[str], None] = field(default=lambda _: None, repr=False, compare=False)
    wanted: Callable[[], bool] = field(default=lambda: True, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Short name for logs."""
        return f"slice{self.slice_index}-host{self.host_index}"

    def for_worker(self) -> dict[str, Option]:
        """The specification that the worker's entry point is called with."""
        return {
            **self.options,
            "slice": self.slice_index,
            "host": self.host_index,
            "incarnation": self.incarnation,
            "devices": list(self.devices),
            "endpoint": self.endpoint,
            "secret": self.secret,
        }


class Process(Protocol):
    """A process of a slice, wherever it runs. Signals to one that has ended do nothing."""

    @property
    def pid(self) -> int:
        """Its process id, on the machine that it runs on."""
        ...

    @property
    def cause(self) -> str | None:
        """How it ended, say "SIGKILL (signal 9)" or "exit status 1"; None while it runs."""
        ...

    def kill(self) -> None:
        """Ends it, and what it has started, at once; also when it is stopped."""
        ...

    def send(self, signum: signal.Signals) -> None:
        """Sends it, and nothing that it has started, a signal."""
        ...

    def stop(self) -> None:
        """Stops it where it is (SIGSTOP)."""
        ...

    def cont(self) -> None:
        """Lets it go on after `stop`."""
        ...

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Has the loop call `callback` with the cause once it has ended (or ended already)."""
        ...


class Launcher(Protocol):
    """Starts hosts.

    Attributes:
        channel_port: Where workers on other machines connect to, 0 until the head listens for them;
            None: all are on this one.
    """

    channel_port: int | None

    async def start(self, spec: HostSpec) -> Process:
        """Starts one host.

        Raises:
            LaunchError: If it could not be started.
        """
        ...

    def regroup(self, hosts_per_slice: int) -> None:
        """Slices have so many hosts from their next start on.

        Raises:
            ControlError: The hosts of a slice are given here, and no other number of them.
        """
        ...

    async def close(self) -> None:
        """Ends every process that it has started, and what it needs itself."""
        ...
