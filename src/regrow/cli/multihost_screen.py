"""What `regrow multihost run` shows: the first host's output, and a table of all hosts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final, final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from regrow.cli.report import count, say
from regrow.cloud.remote.fanout import Result, Stream
from regrow.cloud.remote.targets import Host

_ROWS: Final = 16
_OTHER_COLUMNS: Final = 56
_NARROWEST: Final = 20
_LONGEST_S: Final = 60.0
_LINE_BYTES: Final = 300
_STYLES: Final = {"failed": "red", "lost": "red", "stopped": "yellow", "done": "green"}


@final
@dataclass(slots=True)
class _Row:
    """A host as it stands.

    Attributes:
        state: What it does, or how it has ended.
        began_at: When it began that.
        duration_s: How long that has taken; None while it goes on.
        last: What it has printed last.
    """

    state: str
    began_at: float
    duration_s: float | None = None
    last: bytes = b""


def state_of(result: Result) -> str:
    """How something on a host has ended, in words."""
    if result.stopped:
        return "stopped"
    if result.status is None:
        return "not started"
    if result.trouble:
        return "lost"
    return "done" if result.status == 0 else f"failed ({result.status})"


@final
class RunScreen:
    """See `multihost.runner.Screen`; a live table where standard error is a terminal."""

    def __init__(self, leader: Host, streams: tuple[BinaryIO, BinaryIO]) -> None:
        """Shows nothing yet.

        Args:
            leader: Whose output is streamed.
            streams: Where to: standard output and error.
        """
        self._leader = leader
        self._streams = streams
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._phase = ""
        self._rows: dict[Host, _Row] = {}
        self._told_at = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the table in the block, where there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    # --- what it is told ---

    def phase(self, name: str, hosts: Sequence[Host]) -> None:
        """Something begins on all hosts."""
        self._phase = name
        now = time.monotonic()
        self._rows = {host: _Row("running", now) for host in hosts}
        say(f"{name} on {count(len(hosts), 'host')}")

    def line(self, host: Host, stream: Stream, line: bytes) -> None:
        """A host has printed a line."""
        self._rows[host].last = line[:_LINE_BYTES]
        if self._phase == "command" and host == self._leader:
            self._stream(stream, line)
        elif self._phase in ("copy", "prepare") and stream == "errors":
            text = line.decode(errors="replace").rstrip()
            say(f"[{host.label}] {text}")

    def ended(self, result: Result) -> None:
        """Something has ended on a host."""
        row = self._rows[result.host]
        row.state, row.duration_s = state_of(result), result.duration_s
        self._told_at = time.monotonic()
        if result.status and not result.stopped:
            status = f"failed with status {result.status}"
            label = result.host.label
            told = (result.trouble or status).removeprefix(f"{label} ")
            say(f"{self._phase}: {label} {told}")
        elif self._live is None and self._phase == "command":
            say(f"{self._phase}: {result.host.label} {row.state} ({self._progress()})")

    def tick(self) -> None:
        """Time has passed."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
        elif time.monotonic() - self._told_at > _LONGEST_S:
            self._told_at = time.monotonic()
            say(f"{self._phase}: {self._progress()}")

    # --- what it shows ---

    def _stream(self, stream: Stream, line: bytes) -> None:
        target, terminal = (
            (self._streams[1], sys.stderr) if stream == "errors" else (self._streams[0], sys.stdout)
        )
        if self._live is not None and terminal.isatty():
            # Above the table, which it would else be written into.
            text = line.decode(errors="replace").rstrip("\r\n")
            self._live.console.print(Text.from_ansi(text), soft_wrap=True)
            return
        target.write(line)
        target.flush()

    def _progress(self) -> str:
        states = Counter(row.state.partition(" (")[0] for row in self._rows.values())
        return ", ".join(f"{number} {state}" for state, number in sorted(states.items()))

    def table(self) -> Table:
        """All hosts; of many those that run, and those that have failed."""
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        for title in ("slice", "worker", "node", "state", "seconds"):
            table.add_column(title, no_wrap=True)
        width = max(_NARROWEST, self._console.width - _OTHER_COLUMNS)
        table.add_column("last line", no_wrap=True, max_width=width)
        order = ("failed", "lost", "stopped", "running", "not started", "done")
        rows = sorted(
            self._rows.items(), key=lambda item: order.index(item[1].state.partition(" (")[0])
        )
        for host, row in sorted(
            rows[:_ROWS], key=lambda item: (item[0].slice_index, item[0].worker)
        ):
            self._add(table, host, row)
        if len(rows) > _ROWS:
            table.add_row("", "", f"all {len(rows)}: {self._progress()}", "", "", "")
        return table

    def _add(self, table: Table, host: Host, row: _Row) -> None:
        now = time.monotonic()
        seconds = now - row.began_at if row.duration_s is None else row.duration_s
        last = Text.from_ansi(row.last.decode(errors="replace").strip())
        table.add_row(
            str(host.slice_index),
            str(host.worker),
            host.node,
            row.state,
            f"{seconds:.1f}",
            last,
            style=_STYLES.get(row.state.partition(" (")[0], ""),
        )

    def print_summary(self) -> None:
        """The table as it stands at the end."""
        self._console.print(self.table())
