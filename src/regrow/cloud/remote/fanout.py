"""One command on many hosts, a batch of them at a time."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol, final

from regrow.cloud.remote.sessions import LOST_STATUS, Session
from regrow.cloud.remote.targets import Host
from regrow.errors import LaunchError

_CHUNK_BYTES: Final = 1 << 16
_LONGEST_LINE_BYTES: Final = 1 << 20
_TICK_S: Final = 0.2

Stream = Literal["output", "errors"]
Launch = Callable[[Host, Sequence[int]], Session]
"""Starts what is to be done on a host, with these as its standard input, output and error."""
Tell = Callable[[Host, Stream, bytes], None]
"""Is given each line, with its end, that a host prints."""


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What became of a command on a host.

    Attributes:
        host: The host.
        status: Its exit status; None if it was not started, because another had failed before.
        duration_s: How long it took, in seconds.
        trouble: Why it could not be started, or not be ended; empty if it could.
        stopped: Whether it was ended because another had failed.
    """

    host: Host
    status: int | None
    duration_s: float = 0.0
    trouble: str = ""
    stopped: bool = False


@final
@dataclass(frozen=True, slots=True)
class FailFast:
    """What the first failure means for the others.

    Attributes:
        end: Asks what runs on all hosts to end.
        within_s: How long it may take until its connections are cut.
    """

    end: Callable[[], None]
    within_s: float


class Watch(Protocol):
    """Is told how things stand."""

    def ended(self, result: Result) -> None:
        """Something has ended on a host."""

    def tick(self) -> None:
        """Time has passed."""


def run_everywhere(
    hosts: Sequence[Host],
    launch: Launch,
    batch_size: int,
    tell: Tell,
    *,
    fail_fast: FailFast | None = None,
    watch: Watch | None = None,
) -> list[Result]:
    """Does something on all hosts; the next batch begins when all of the former has ended well.

    When this is interrupted, what runs is ended.

    Args:
        hosts: Where.
        launch: Starts it on one.
        batch_size: On how many hosts at once.
        tell: Is given what they print.
        fail_fast: Has the first failure end all others; without it, its batch goes on to its end.
        watch: Is told who has ended, and several times a second that time passes.

    Returns:
        One result for each host, in their order.
    """
    results: list[Result] = []
    for first in range(0, len(hosts), batch_size):
        batch = hosts[first : first + batch_size]
        if any(result.status != 0 for result in results):
            results += [Result(host, None) for host in batch]
        else:
            with _Batch(tell, fail_fast, watch) as running:
                results += running.run(batch, launch)
    return results


def exit_status(results: Sequence[Result]) -> int:
    """The first that is not 0, of those that were started and not ended for another's sake."""
    return next((one.status for one in results if one.status and not one.stopped), 0)


@final
class _Lines:
    """A stream of one host, line by line."""

    def __init__(self, host: Host, stream: Stream, descriptor: int, tell: Tell) -> None:
        self.descriptor = descriptor
        self._host, self._stream, self._tell = host, stream, tell
        self._rest = b""
        os.set_blocking(descriptor, False)

    def take(self) -> bool:
        """Tells what has come; False at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(self._host, self._stream, line + b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES or (not data and self._rest):
            self._tell(self._host, self._stream, self._rest + b"\n")
            self._rest = b""
        return bool(data)

    def close(self) -> None:
        """Tells what is there already; what is left behind on the host may hold the stream."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.descriptor, _CHUNK_BYTES):
                self._rest += data
        for line in self._rest.splitlines(keepends=True):
            self._tell(self._host, self._stream, line if line.endswith(b"\n") else line + b"\n")
        os.close(self.descriptor)


@final
@dataclass(slots=True)
class _Running:
    host: Host
    session: Session
    began_at: float
    streams: list[_Lines]


@final
class _Batch:
    """What runs at once."""

    def __init__(self, tell: Tell, fail_fast: FailFast | None, watch: Watch | None) -> None:
        self._tell = tell
        self._fail_fast = fail_fast
        self._watch = watch
        self._failed_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._running: list[_Running] = []
        self._results: dict[Host, Result] = {}

    def __enter__(self) -> _Batch:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.session.end()
            for stream in one.streams:
                stream.close()
        self._selector.close()

    def run(self, hosts: Sequence[Host], launch: Launch) -> list[Result]:
        for host in hosts:
            if self._failed_at is not None:
                break
            try:
                self._start(host, launch)
            except LaunchError as error:
                self._record(Result(host, LOST_STATUS, trouble=str(error)))
        while self._running and not self._is_overdue():
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            if self._watch is not None:
                self._watch.tick()
        for one in self._running:
            trouble = "it may still run: it was told to end and has not"
            duration_s = time.monotonic() - one.began_at
            self._record(Result(one.host, LOST_STATUS, duration_s, trouble, stopped=True))
        return [self._results.get(host, Result(host, None)) for host in hosts]

    def _pause_s(self) -> float | None:
        return None if self._watch is None and self._failed_at is None else _TICK_S

    def _is_overdue(self) -> bool:
        """Whether those that another's failure is to end have had their time."""
        if self._fail_fast is None or self._failed_at is None:
            return False
        return time.monotonic() > self._failed_at + self._fail_fast.within_s

    def _record(self, result: Result) -> None:
        self._results[result.host] = result
        if result.status and self._fail_fast is not None and self._failed_at is None:
            self._failed_at = time.monotonic()
            self._fail_fast.end()
        if self._watch is not None:
            self._watch.ended(result)

    def _start(self, host: Host, launch: Launch) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            nowhere = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, nowhere)
            streams, ends = [], []
            kinds: tuple[Stream, Stream] = ("output", "errors")
            for kind in kinds:
                reader, writer = os.pipe()
                theirs.callback(os.close, writer)
                streams.append(_Lines(host, kind, reader, self._tell))
                ours.callback(os.close, reader)
                ends.append(writer)
            session = launch(host, [nowhere, *ends])
            ours.pop_all()
        running = _Running(host, session, time.monotonic(), streams)
        self._running.append(running)
        for stream in streams:
            self._selector.register(
                stream.descriptor, selectors.EVENT_READ, functools.partial(self._take, stream)
            )
        self._selector.register(
            session.fileno(), selectors.EVENT_READ, functools.partial(self._ended, running)
        )

    def _take(self, stream: _Lines) -> None:
        if stream.descriptor in self._selector.get_map() and not stream.take():
            self._selector.unregister(stream.descriptor)

    def _ended(self, running: _Running) -> None:
        descriptor = running.session.fileno()
        status = running.session.finish()
        if status is None:
            return
        self._selector.unregister(descriptor)
        self._running.remove(running)
        for stream in running.streams:
            if stream.descriptor in self._selector.get_map():
                self._selector.unregister(stream.descriptor)
            stream.close()
        duration_s = time.monotonic() - running.began_at
        stopped = self._failed_at is not None
        self._record(Result(running.host, status, duration_s, stopped=stopped))


@final
class Printer:
    """Prints what hosts print, marked by slice and worker, and keeps one log file of each.

    Attributes:
        logs: The log files.
    """

    def __init__(
        self,
        streams: tuple[BinaryIO, BinaryIO],
        *,
        marked: bool,
        directory: Path | None = None,
    ) -> None:
        """Prints nothing yet.

        Args:
            streams: Standard output and error.
            marked: Whether lines are marked.
            directory: Where the log files are made; None: there are none.
        """
        self.logs: dict[Host, Path] = {}
        self._streams = streams
        self._marked = marked
        self._directory = directory
        self._files: dict[Host, BinaryIO] = {}

    @contextlib.contextmanager
    def opened(self, hosts: Sequence[Host]) -> Iterator[Tell]:
        """Makes the log files, and closes them at the end."""
        with contextlib.ExitStack() as stack:
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
                for host in hosts:
                    path = self._directory / f"{host.node}-worker-{host.worker}.log"
                    self._files[host] = stack.enter_context(path.open("wb", buffering=0))
                    self.logs[host] = path
            yield self._tell

    def _tell(self, host: Host, stream: Stream, line: bytes) -> None:
        if host in self._files:
            self._files[host].write(line)
        target = self._streams[stream == "errors"]
        target.write(f"[{host.label}] ".encode() + line if self._marked else line)
        target.flush()
