"""Whether a Ray head listens at an address: Ray itself would try for 40 s, and say that none answers."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Final

from regrow.errors import NoRayHeadError, UsageError

ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 10.0
_DASHBOARD_S: Final = 2.0
# The first words of HTTP/2, which gRPC speaks, and no settings; it is answered by settings.
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEADER: Final = 9
_KIND: Final = 3
_SETTINGS: Final = 4
_PORT_ADVICE: Final = (
    "give the port that nodes join, 6379 unless the head was started with another --port"
)


def checked(address: str) -> str:
    """An address of a head.

    Raises:
        UsageError: If it is none.
    """
    host, _, port = address.rpartition(":")
    if not address:
        raise UsageError(f"no Ray cluster: give --address HOST:PORT, or set {ADDRESS_VARIABLE}")
    if "://" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is no address of a Ray head: give HOST:PORT, port 6379 say")
    return address


def knock(address: str) -> None:
    """Returns if something listens there that may be a head.

    Raises:
        UsageError: If that is no address, or of something else: Ray's dashboard, say.
        NoRayHeadError: If nothing answers.
    """
    checked(address)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
            answer = _greet(connection, address)
    except OSError as error:
        raise NoRayHeadError(
            f"no Ray head answers at {address} ({error.strerror or error}): "
            "start one with: regrow ray head up"
        ) from None
    if len(answer) > _KIND and answer[_KIND] != _SETTINGS:
        raise no_head(address, dashboard=_is_dashboard(host, int(port)))


def no_head(address: str, *, dashboard: bool = False) -> UsageError:
    """The error of an address where something else is."""
    what = f"what listens at {address} is no Ray head"
    if dashboard:
        what = f"{address} is the dashboard of a Ray head, and not the head"
    return UsageError(f"{what}: {_PORT_ADVICE}")


def unanswered(address: str, text: str) -> NoRayHeadError:
    """The error of a head that is there and does not answer."""
    return NoRayHeadError(
        f"the Ray head at {address} does not answer ({text}): "
        "start it again at that address: regrow ray head down, then regrow ray head up"
    )


def _greet(connection: socket.socket, address: str) -> bytes:
    """What is answered first, of which a head says a frame of settings; empty where TLS is spoken."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return b""
    connection.settimeout(_ANSWER_S)
    connection.sendall(_GREETING)
    try:
        answer = connection.recv(_HEADER)
    except TimeoutError:
        raise unanswered(address, f"nothing within {_ANSWER_S:g} s") from None
    if not answer:
        raise ConnectionResetError("it hangs up")
    return answer


def _is_dashboard(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_DASHBOARD_S)
    try:
        connection.request("GET", "/api/version")
        return "ray_version" in json.loads(connection.getresponse().read())
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return False
    finally:
        connection.close()
