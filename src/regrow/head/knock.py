"""Answers a client that knocks before it connects: may it come in, and if not, why (`channel.rgcb`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, final

from regrow.channel import rgcb
from regrow.channel.stream import Stream
from regrow.errors import ProtocolError

_TIMEOUT_S: Final = 10.0


@final
class Knock:
    """One connection of a client that knocks; it ends itself, at the latest after its deadline."""

    def __init__(
        self, sock: socket.socket, refusal: Callable[[socket.socket, str], str | None]
    ) -> None:
        """Takes over the connection.

        Args:
            sock: The connection, whose preface has been read.
            refusal: Why a client with that token is refused on it; None if it is not.
        """
        self._sock = sock
        self._refusal = refusal
        self._length = bytearray(rgcb.LENGTH.size)
        self._token: bytearray | None = None
        self._view = memoryview(self._length)
        self._stream = Stream(sock, self, self._ended)
        self._timer = asyncio.get_running_loop().call_later(_TIMEOUT_S, self._stream.close)

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        return self._view

    def received(self, count: int) -> None:
        """Goes on with that many more bytes."""
        self._view = self._view[count:]
        if self._view:
            return
        if self._token is None:
            (size,) = rgcb.LENGTH.unpack(self._length)
            if size > rgcb.MAX_TOKEN_BYTES:
                raise ProtocolError(f"a token of {size} bytes")
            self._token = bytearray(size)
            self._view = memoryview(self._token)
        if not self._view:
            self._answer(self._token.decode("utf-8", "replace"))

    def _answer(self, token: str) -> None:
        text = (self._refusal(self._sock, token) or "").encode()
        self._stream.write([rgcb.LENGTH.pack(len(text)) + text])
        # The client closes; whatever else it sends is no part of a knock.
        self._view = memoryview(bytearray(1))
        self._refusal = _nothing_more

    def _ended(self, cause: Exception) -> None:
        self._timer.cancel()


def _nothing_more(sock: socket.socket, token: str) -> str | None:
    raise ProtocolError("more bytes after a knock")
