"""What this process tells its head over the control socket, without waiting for an answer.

Where there is no such socket (a cluster on another machine) nobody is told.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

from regrow.control import ControlConnection, Method
from regrow.errors import RegrowError

_CLIENT_SOCKET: Final = "client.sock"
_CONTROL_SOCKET: Final = "control.sock"
_TARGET_VARIABLE: Final = "JAX_BACKEND_TARGET"
_UNIX: Final = "grpc://unix:"
_ANSWER_S: Final = 5.0

_lock = threading.Lock()
_line: ControlConnection | None = None
_line_target: str | None = None


def tell(method: Method, **params: Any) -> None:
    """Tells the head; one that cannot be told is not asked again until the target changes."""
    global _line, _line_target
    target = os.environ.get(_TARGET_VARIABLE)
    with _lock:
        try:
            if target != _line_target:
                _hang_up()
                _line_target = target
                _line = _connected(target)
            if _line is not None:
                _line.send(method, **params)
                # The answers say nothing new, but unread they would fill the socket.
                _line.take()
        except RegrowError:
            _hang_up()


def _hang_up() -> None:
    global _line
    if _line is not None:
        _line.close()
    _line = None


def asks(method: Method) -> Any:
    """The answer of the head on a connection of its own; None where there is nobody to ask."""
    try:
        connection = _connected(os.environ.get(_TARGET_VARIABLE))
        if connection is None:
            return None
        with connection:
            return connection.call(method, timeout_s=_ANSWER_S)
    except RegrowError:
        return None


def _connected(target: str | None) -> ControlConnection | None:
    if target is None or not target.startswith(_UNIX):
        return None
    client = Path(target.removeprefix(_UNIX))
    control = client.with_name(_CONTROL_SOCKET)
    if client.name != _CLIENT_SOCKET or not control.exists():
        return None
    return ControlConnection(str(control), timeout_s=1.0)
