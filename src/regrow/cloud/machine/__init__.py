"""The control plane as a state machine: no I/O, no clock, no threads."""

from regrow.cloud.machine.capacity import Capacity
from regrow.cloud.machine.events import Event, HostsDown, HostsFailed, HostsLost, HostsUp
from regrow.cloud.machine.plane import ControlPlane
from regrow.cloud.machine.tables import Change

__all__ = [
    "Capacity",
    "Change",
    "ControlPlane",
    "Event",
    "HostsDown",
    "HostsFailed",
    "HostsLost",
    "HostsUp",
]
