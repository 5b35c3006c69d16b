"""Why something failed on a Ray cluster, in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LONGEST: Final = 500
_TAIL: Final = 20
_PIP_ERROR: Final = re.compile(r"^\s*(?:\S+\s+)?(?:ERROR|error):\s*(.+)$")
_EXCEPTION: Final = re.compile(r"^\s*([\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*)$")
_OUTPUT: Final = re.compile(r"\s*(Last \d+ lines of stdout|Stdout):\s*")
_TOO_SLOW: Final = re.compile(r"Failed to install runtime_env within the timeout of (\d+) seconds")
_MISMATCH: Final = re.compile(
    r"(?<!patch )[Vv]ersion mismatch[^\n]*(?:\n(?:The|This|[ ]+\w+:)[^\n]*){0,6}"
)
_RANK: Final = "regrow: rank ends: "
_FAILED: Final = re.compile(r"entrypoint command failed with exit code (\d+)")
_RAYS_OWN: Final = re.compile(r"Running entrypoint for job |.*\bjob_manager\.py:\d+ -- ")
_RAY_ADVICE: Final = ("For debugging", "Check /tmp/ray", "See more at", "View the dashboard")


def one_line(text: str) -> str:
    """Text without line ends and colours, of bearable length."""
    words = " ".join(_ANSI.sub("", text).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def mismatch(text: str) -> str:
    """What Ray says of versions of it or of Python that differ, in one line; empty if it does not."""
    found = _MISMATCH.search(_ANSI.sub("", text))
    return one_line(found[0]) if found else ""


def _lines(message: str) -> list[str]:
    return _ANSI.sub("", message).replace("\\n", "\n").splitlines()


def output_tail(message: str) -> list[str]:
    """The last lines of the program, pip say, that could not make a runtime environment."""
    lines = _lines(message)
    starts = [number for number, line in enumerate(lines) if _OUTPUT.fullmatch(line)]
    said = lines[starts[-1] + 1 :] if starts else []
    return [line.rstrip() for line in said if line.strip()][-_TAIL:]


def _exit_status(message: str, log_tail: Sequence[str]) -> str:
    """The exit status that Ray tells of, and the program's last words; empty if it tells of none."""
    found = _FAILED.search(message)
    if found is None:
        return ""
    said = list(log_tail) or _lines(message[found.end() :])[1:]
    words = [line for line in said if line.strip() and not _RAYS_OWN.match(line)]
    return f"exit status {found[1]}" + (f": {words[-1]}" if words else "")


def why(message: str, log_tail: Sequence[str] = ()) -> str:
    """The cause that a message of Ray, or else the end of a log, tells of.

    What pip says of requirements that cannot be met is worth more than what is around it; a Python
    error at the end of the log, and then what the rank says of its end, more than Ray's word that the
    program has failed. Without any of them the exit status is told before the program's last words.
    """
    if too_slow := _TOO_SLOW.search(message):
        return f"it was not made within {too_slow[1]} s"
    lines = _lines(message)
    pip = [match[1] for line in lines if (match := _PIP_ERROR.match(line))]
    conflict = next((one for one in pip if "conflict" in one or "No matching" in one), None)
    if conflict or pip:
        return one_line((conflict or pip[0]).removesuffix("."))
    told = [line for line in log_tail if _EXCEPTION.match(line)]
    if told:
        return one_line(told[-1])
    ends = [line for line in log_tail if line.startswith(_RANK)]
    if ends:
        return one_line(ends[-1].removeprefix(_RANK))
    errors = [line for line in lines if _EXCEPTION.match(line)]
    if not errors and (ended := _exit_status(message, log_tail)):
        return one_line(ended)
    plain = [line for line in lines if line.strip() and not line.startswith(_RAY_ADVICE)]
    return one_line((errors or plain or ["no reason given"])[-1])
