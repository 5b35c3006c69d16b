"""One host process in one incarnation, as the fleet holds it."""

from __future__ import annotations

from typing import final

from regrow.channel.head_end import HeadChannel
from regrow.head.links import Link
from regrow.launchers.base import Process


@final
class Member:
    """One host process in one incarnation.

    Attributes:
        link: Where its commands go and its answers come from.
        channel: What carries them.
        process: What was started, as soon as it is known.
        connections: How often it has connected.
    """

    def __init__(self, link: Link, channel: HeadChannel) -> None:
        self.link = link
        self.channel = channel
        self.process: Process | None = None
        self.connections = 0
