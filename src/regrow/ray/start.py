"""`ray start`, with more patience: where several raylets share a machine its own 30 s may not do.

python -m regrow.ray.start [--head] …    the words of `ray start`
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Any, Final

_PATIENCE_S: Final = 150.0
_POLL_S: Final = 0.1
_AGENT_PORTS: Final = (
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)


def _be_patient() -> None:
    """Ray asks for the new node for 30 s, and gives up; each question now waits by itself."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + _PATIENCE_S

    def get_node(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return ask(*arguments, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                if _a_child_has_died():
                    raise SystemExit("Error: a process of Ray has died at its start") from None
                time.sleep(_POLL_S)

    services.get_node = get_node


def _a_child_has_died() -> bool:
    """Whether the raylet, say, is there to be reaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return ended is not None


def _ports() -> list[str]:
    """Ports for a node's agents: a raylet that has to ask for them ends itself after 30 s."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in _AGENT_PORTS]
        for one in sockets:
            one.bind(("", 0))
        return [
            f"{flag}={one.getsockname()[1]}"
            for flag, one in zip(_AGENT_PORTS, sockets, strict=True)
        ]


def main() -> None:
    """Runs `ray start`."""
    from ray.scripts.scripts import start

    _be_patient()
    start([*_ports(), *sys.argv[1:]], prog_name="ray start")


if __name__ == "__main__":
    main()
