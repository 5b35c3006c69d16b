"""A worker on a host of a slice: what it is comes over its standard input, secret included.

Standard input is a socket, over which it tells its process id first.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any

from regrow.launchers.template import pack, unpack
from regrow.processes import set_name

_CHUNK_BYTES = 1 << 16


def main() -> None:
    """Is a worker, until its host or its head ends."""
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.sendall(pack({"pid": os.getpid()}))
        told = _receive(connection)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    set_name(told["name"])
    module, _, function = told["entry"].partition(":")
    getattr(importlib.import_module(module), function)(told["spec"])


def _receive(connection: socket.socket) -> dict[str, Any]:
    buffer = bytearray()
    while chunk := connection.recv(_CHUNK_BYTES):
        buffer += chunk
        for message in unpack(buffer):
            return dict(message)
    # The head has gone meanwhile.
    sys.exit(1)


if __name__ == "__main__":
    main()
