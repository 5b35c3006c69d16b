"""Requests to the resource manager of a shared cluster, which may just be starting again."""

from __future__ import annotations

import time
from typing import Any, Final

from regrow.control import ControlConnection
from regrow.errors import ControlError, NoClusterError

PATIENCE_S: Final = 15.0
_AGAIN_S: Final = 0.1


def ask_manager(socket: str, method: str, **params: Any) -> Any:
    """Makes one request; a manager that is gone is waited for, for its supervisor starts it again.

    Args:
        socket: Its socket.
        method: What to do.
        **params: Parameters of the method.

    Raises:
        ControlError: It does not answer.
        RegrowError: What it refused the request with.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with ControlConnection(socket, who="resource manager") as connection:
                return connection.call(method, **params)
        except (ControlError, NoClusterError) as error:
            # What may have been done already is not asked for twice, nor what was refused.
            if not (isinstance(error, NoClusterError) or method == "status"):
                raise
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{error}; waited {PATIENCE_S:g} s for it to be started again"
                ) from None
        time.sleep(_AGAIN_S)
