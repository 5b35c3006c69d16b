"""Who may talk to the server: whoever could start processes as its user anyway.

Startup scripts are programs, so that a request is as good as a shell. A client on this machine is
known by the user that its end of the connection belongs to, which the kernel tells; it needs no
credentials, so that curl and Google's clients work as they are. Anyone else needs the server's token,
and so does a page in the user's own browser, which could otherwise be made to send such requests.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_ROOT: Final = 0
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def user_of(peer: tuple[str, int]) -> int | None:
    """The user whose process has opened a connection from this address, if that is of this machine."""
    host, port = peer
    if not is_loopback(host):
        return None
    wanted = _as_the_kernel_writes_it(host, port)
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # A socket that its process has let go of has no inode, and is shown as root's.
            if fields[1] in wanted and fields[9] != "0":
                return int(fields[7])
    return None


def _as_the_kernel_writes_it(host: str, port: int) -> set[str]:
    address = ipaddress.ip_address(host)
    if address.version == 4:
        (word,) = struct.unpack("=I", socket.inet_aton(host))
        # The second form is that of a socket that speaks both versions.
        prefix = struct.unpack("=I", b"\0\0\xff\xff")[0]
        return {f"{word:08X}:{port:04X}", f"{0:08X}{0:08X}{prefix:08X}{word:08X}:{port:04X}"}
    words = struct.unpack("=4I", address.packed)
    return {"".join(f"{word:08X}" for word in words) + f":{port:04X}"}


def refusal(peer: tuple[str, int] | None, headers: Mapping[str, str], token: str) -> str | None:
    """Why a request is refused; None: it is let in."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode()):
        return None
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return "requests of web pages need the server's token as a bearer token"
    if peer is not None and user_of(peer) in (os.getuid(), _ROOT):
        return None
    return "requests of other users and machines need the server's token as a bearer token"
