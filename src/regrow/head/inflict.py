"""Faults that the head does to a slice on request, for `regrow.chaos`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from signal import SIGSEGV, SIGTERM
from typing import Final

from regrow.channel.commands import Fail
from regrow.errors import UsageError
from regrow.head.member import Member

FAULTS: Final = frozenset({"term", "preempt", "segv", "exit", "oom", "diskfull", "mend", "sever"})
"""What can be done; `sever` breaks the connections of a slice's hosts once. `term` is a SIGTERM that has
no state saved. "trap:NAME=ACTION" sets a trap at one of `regrow.suspend.points`."""

NEXT: Final = "next:"
"""A fault that begins so is done to the first host of the slice that is up hereafter."""

TERM_GRACE_S: Final = 5.0


def inflict(members: Sequence[Member], fault: str) -> None:
    """Does a fault to the processes of a slice.

    Raises:
        UsageError: There is no such fault.
    """
    if fault not in FAULTS and not fault.startswith("trap:"):
        raise UsageError(f"there is no fault {fault!r}; there are {', '.join(sorted(FAULTS))}")
    for member in members:
        _inflict(member, fault)


def _inflict(member: Member, fault: str) -> None:
    process = member.process
    match fault:
        case "sever":
            member.channel.sever()
        case "term" if process is not None:
            process.send(SIGTERM)
            asyncio.get_running_loop().call_later(TERM_GRACE_S, process.kill)
        case "preempt" if process is not None:
            process.send(SIGTERM)
        case "segv" if process is not None:
            process.send(SIGSEGV)
        case _:
            member.link.send(Fail(fault))
