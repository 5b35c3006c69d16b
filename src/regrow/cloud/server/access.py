"""Who may talk to the server: whoever could start processes as its user anyway.

Startup scripts are programs, so that a request is as good as a shell. A client on this machine is
known by the user that its end of the connection belongs to, which the kernel tells; it needs no
credentials, so that curl and Google's clients work as they are. Anyone else needs the server's token,
and so does a page in the user's own browser, which could otherwise be made to send such requests.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

Address = tuple[str, int]

_ROOT: Final = 0
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_SOCKET_ID: Final = struct.Struct("!HH16s16s")
_NO_INTERFACE_NOR_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# Family, state, two bytes; the socket's id; three counters; user and inode.
_ANSWER: Final = struct.Struct("=xB2x48x12xII")
_LISTEN: Final = 10
_ANSWER_BYTES: Final = 8192


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def user_of(peer: Address, own: Address) -> int | None:
    """The user whose process holds the other end of a connection, if that is on this machine.

    Args:
        peer: Its address.
        own: The address of this end.
    """
    if not is_loopback(peer[0]) or not is_loopback(own[0]):
        return None
    try:
        return _ask_the_kernel(peer, own)
    except OSError:
        # Some sandboxes have no such interface; the table is slow, but tells the same.
        return _look_into_the_table(peer, own)


def _ask_the_kernel(peer: Address, own: Address) -> int | None:
    """One exact question about the socket that goes from `peer` to `own`."""
    source, target = ipaddress.ip_address(peer[0]), ipaddress.ip_address(own[0])
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    request = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + _SOCKET_ID.pack(peer[1], own[1], source.packed, target.packed)
        + _NO_INTERFACE_NOR_COOKIE
    )
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        answer = kernel.recv(_ANSWER_BYTES)
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        (error,) = struct.unpack_from("=i", answer, _HEADER.size)
        if -error == errno.ENOENT:
            return None
        raise OSError(-error, os.strerror(-error))
    state, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # Where there is no such connection the kernel tells of a socket that listens at that port. One
    # that its process has let go of has no inode, and is shown as root's.
    return int(user) if inode and state != _LISTEN else None


def _look_into_the_table(peer: Address, own: Address) -> int | None:
    source, target = _as_the_table_has_it(*peer), _as_the_table_has_it(*own)
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1] in source and fields[2] in target and fields[9] != "0":
                return int(fields[7])
    return None


def _as_the_table_has_it(host: str, port: int) -> set[str]:
    address = ipaddress.ip_address(host)
    if address.version == 4:
        (word,) = struct.unpack("=I", address.packed)
        # The second form is that of a socket that speaks both versions.
        (prefix,) = struct.unpack("=I", b"\0\0\xff\xff")
        return {f"{word:08X}:{port:04X}", f"{0:08X}{0:08X}{prefix:08X}{word:08X}:{port:04X}"}
    words = struct.unpack("=4I", address.packed)
    return {"".join(f"{word:08X}" for word in words) + f":{port:04X}"}


def refusal(
    peer: Address | None, own: Address | None, headers: Mapping[str, str], token: str
) -> str | None:
    """Why a request is refused; None: it is let in.

    Args:
        peer: The client's address.
        own: The server's address on that connection.
        headers: The request's, by names in lower case.
        token: The server's token.
    """
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode()):
        return None
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return "requests of web pages need the server's token as a bearer token"
    if peer is not None and own is not None and user_of(peer, own) in (os.getuid(), _ROOT):
        return None
    return "requests of other users and machines need the server's token as a bearer token"
