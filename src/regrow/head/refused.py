"""A session that is refused.

The stock client shows an error that answers a request, but never one that ends the stream. So a client
that may not come in is let in as far as its first request, whose answer tells why not. (It tries again
until its connection timeout, two minutes, all the same.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from google.protobuf.message import DecodeError

from regrow.errors import StatusError
from regrow.wire.schema import proxy
from regrow.wire.status import fill

NO_SESSION: Final = 0
"""Its number, by which no other call finds it."""


@final
class RefusedSession:
    """Answers each request with the same error; what `regrow.wire.transfers` calls a Session."""

    session_id = NO_SESSION

    def __init__(self, error: StatusError, send: Callable[[bytes], None]) -> None:
        self._error = error
        self._send = send

    def request(self, data: bytes) -> None:
        """Refuses one serialised request.

        Raises:
            StatusError: The bytes are no request.
        """
        try:
            asked = proxy.IfrtRequest.FromString(data)
        except DecodeError:
            raise self._error.fresh() from None
        response = proxy.IfrtResponse()
        response.response_metadata.op_id = asked.request_metadata.op_id
        fill(response.response_metadata.status, self._error)
        self._send(response.SerializeToString())

    def store_begin(self, handle: int, size: int) -> memoryview:
        """No other call finds this session."""
        raise self._error.fresh()

    def store_end(self, handle: int) -> None:
        """Nothing was stored."""

    def store_abort(self, handle: int) -> None:
        """Nothing was stored."""

    def lookup(self, handle: int) -> memoryview | None:
        """It has no host buffers."""
        return None

    def delete(self, handle: int) -> None:
        """It has no host buffers."""

    def closed(self) -> None:
        """It held nothing."""
