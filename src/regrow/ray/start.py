"""`ray start`, with more patience: where several raylets share a machine its own may not do.

    python -m regrow.ray.start [--head] …    the words of `ray start`

Ray asks for the new node for 30 s, and a raylet ends itself when its agents, which import much, are not
up 15 s later. So the node is waited for longer, and one whose raylet has ended is started again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Final

_PATIENCE_S: Final = 150.0
_POLL_S: Final = 0.1
_TRIES: Final = 4
_TRY_VARIABLE: Final = "REGROW_RAY_START_TRY"


def _be_patient(last_try: bool) -> None:
    """Has each of Ray's questions for the new node wait by itself."""
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
                    if last_try:
                        raise SystemExit("Error: Ray's raylet has died at its start") from None
                    os.execv(  # noqa: S606 - itself
                        sys.executable, [sys.executable, "-P", __file__, *sys.argv[1:]]
                    )
                time.sleep(_POLL_S)

    services.get_node = get_node


def _a_child_has_died() -> bool:
    """Whether the raylet, say, is there to be reaped; one that is stopped (SIGSTOP) is ended."""
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:
        return True
    if child is not None and child.si_code == os.CLD_STOPPED:
        os.kill(child.si_pid, signal.SIGKILL)
    return child is not None


def main() -> None:
    """Runs `ray start`."""
    from ray.scripts.scripts import start

    number = int(os.environ.get(_TRY_VARIABLE, "0")) + 1
    os.environ[_TRY_VARIABLE] = str(number)
    # A second head would find the port of the first one's controller taken.
    _be_patient(last_try=number >= _TRIES or "--head" in sys.argv)
    start(["--dashboard-agent-listen-port=0", *sys.argv[1:]], prog_name="ray start")


if __name__ == "__main__":
    main()
