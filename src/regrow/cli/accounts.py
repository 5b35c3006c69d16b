"""What `regrow run` makes of the timeline of its script: budgets that hold or do not, and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from regrow.cli.report import say
from regrow.cli.timeline import check_path, write_timeline
from regrow.control import request
from regrow.errors import ControlError, NoClusterError, UsageError
from regrow.observe import Budget, goodput_lines

BUDGET_STATUS: Final = 5
_DEADLINE_S: Final = 5.0


@final
class Accounts:
    """What is to be done with the timeline when the script has ended."""

    def __init__(self, *, budgets: Sequence[Budget] = (), path: Path | None = None) -> None:
        """Checks that the file can be one.

        Raises:
            UsageError: It cannot.
        """
        check_path(path)
        self._budgets = budgets
        self._path = path

    def settle(self, control_socket: str, *, verbose: bool) -> int:
        """Says what there is to say of the run; returns 0, or `BUDGET_STATUS` after a breach."""
        try:
            status = request(control_socket, "timeline", timeout_s=_DEADLINE_S)
        except (ControlError, NoClusterError) as error:
            if self._budgets or self._path:
                say(f"there is no timeline: {error}")
            return BUDGET_STATUS if self._budgets else 0
        if verbose or status["events"]:
            for line in goodput_lines(status):
                say(line)
        self._write(status)
        breaches = [
            breach
            for event in status["events"]
            for budget in self._budgets
            if (breach := budget.breach(event)) is not None
        ]
        for breach in breaches:
            say(breach)
        return BUDGET_STATUS if breaches else 0

    def _write(self, status: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            write_timeline(status, self._path)
        except UsageError as error:
            say(str(error))
