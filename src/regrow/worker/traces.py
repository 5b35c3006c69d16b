"""Traces of the profiler, of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from jaxlib import _profiler  # type: ignore[attr-defined]

from regrow.channel.commands import Failed, Reply, StartTrace, StopTrace
from regrow.errors import Code

_RUNS: Final = Path("plugins", "profile")


@final
class Traces:
    """Records one trace at a time; all methods are for the executor's thread."""

    def __init__(
        self, spawn: Callable[[Callable[[], None]], Any], report: Callable[[Any], None]
    ) -> None:
        """Begins with none.

        Args:
            spawn: Runs a function on a helper thread.
            report: Sends an answer to the head.
        """
        self._spawn = spawn
        self._report = report
        self._session: Any = None

    def start(self, command: StartTrace) -> None:
        """Begins to record."""
        self._session = None  # Only one may be there, also for a moment.
        options = _profiler.ProfileOptions()
        options.host_tracer_level = command.host_level
        # The Python of this process is not the user's.
        options.python_tracer_level = 0
        try:
            self._session = _profiler.ProfilerSession(options)
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._fail(command.rid, f"no trace can be taken: {error}")
        else:
            self._report(Reply(command.rid, None))

    def stop(self, command: StopTrace) -> None:
        """Stops recording; the trace is written on another thread."""
        session, self._session = self._session, None
        if session is None:
            self._fail(command.rid, "no trace is being taken")
            return
        trace = session.stop()

        def write() -> None:
            try:
                _write(session, trace, command)
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._fail(command.rid, f"the trace cannot be written: {error}")
            else:
                self._report(Reply(command.rid, None))

        self._spawn(write)

    def _fail(self, rid: int, text: str) -> None:
        self._report(Failed(rid, int(Code.FAILED_PRECONDITION), text, 0))


def _write(session: Any, trace: bytes, command: StopTrace) -> None:
    """Writes the files of a trace under a name of its own: by itself they have the machine's."""
    target = Path(command.directory, _RUNS, command.session)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".regrow-", dir=command.directory) as scratch:
        session.export(trace, scratch)
        for file in Path(scratch, _RUNS).glob("*/*"):
            _, _, suffix = file.name.partition(".")
            file.rename(target / f"{command.name}.{_suffix(file.name) or suffix}")


def _suffix(name: str) -> str:
    """What follows the name of the machine, which may have dots itself."""
    return next((end for end in ("xplane.pb", "trace.json.gz") if name.endswith(end)), "")
