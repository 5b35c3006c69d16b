"""One host of a slice's current incarnation: what is known of it, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass

from regrow.slices.model import HostState, Policy
from regrow.slices.story import host_name


@dataclass(slots=True)
class HostRecord:
    """What is known of one host of the current incarnation."""

    index: int
    pid: int | None = None
    link: int | None = None
    ready: bool = False
    gone: bool = False
    heard_at: float | None = None
    disconnected_at: float | None = None

    @property
    def name(self) -> str:
        """The host as messages name it."""
        return host_name(self.index, self.pid)

    @property
    def state(self) -> HostState:
        """How far it is."""
        if self.gone:
            return "gone"
        if self.link is not None:
            return "ready" if self.ready else "connected"
        if self.disconnected_at is not None:
            return "disconnected"
        return "starting" if self.pid is None else "running"

    def heard(self, now: float) -> None:
        """Takes a sign of life."""
        self.heard_at = now if self.heard_at is None else max(now, self.heard_at)

    def expires_at(self, policy: Policy) -> float | None:
        """When this host is lost if nothing more is heard of it."""
        if self.link is None:
            # A host that cannot send is judged by the connection's budget alone.
            broken = self.disconnected_at
            return None if broken is None else broken + policy.reconnect_s
        return None if self.heard_at is None else self.heard_at + policy.hang_after_s

    def suspect_at(self, policy: Policy) -> float | None:
        """When this host makes its slice a suspect."""
        if self.link is None:
            return self.disconnected_at
        return None if self.heard_at is None else self.heard_at + policy.suspect_after_s
