"""A gRPC call with one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from google.protobuf.message import DecodeError

from regrow.errors import Code, StatusError
from regrow.wire import grpc
from regrow.wire.streams import Handler, Stream


@final
class Unary:
    """Collects the request, and hands it over; whoever gets it answers on the stream."""

    def __init__(
        self,
        stream: Stream,
        method: str,
        messages: grpc.Messages,
        respond: Callable[[bytes], Handler | None],
    ) -> None:
        """Waits for the request.

        Args:
            stream: Where it comes.
            method: Its name, for errors.
            messages: Cuts the request, within limits.
            respond: Called with the request; the handler of the rest of the stream, if any.
        """
        self._stream = stream
        self._method = method
        self._messages = messages
        self._respond = respond
        self._request: bytes | None = None
        self._done = False

    def data(self, view: memoryview) -> None:
        """The next bytes of the request."""
        if self._done:
            return
        try:
            for message in self._messages.feed(view):
                if self._request is not None:
                    raise StatusError(
                        Code.INVALID_ARGUMENT, f"{self._method} takes one message, not more"
                    )
                self._request = message
        except StatusError as error:
            self._fail(error)

    def room(self) -> memoryview | None:
        """Nowhere: requests are small."""
        return None

    def filled(self, count: int) -> None:
        """Never called."""
        raise AssertionError("a unary call offers no room")

    def ended(self) -> None:
        """The request is complete: hand it over."""
        if self._done:
            return
        try:
            if self._request is None or not self._messages.whole():
                raise StatusError(
                    Code.INVALID_ARGUMENT, f"the request of {self._method} is not complete"
                )
            successor = self._respond(self._request)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client is told
            self._fail(grpc.status_of(error, self._method))
            return
        self._done = True
        if successor is not None:
            self._stream.handler = successor

    def over(self) -> None:
        """The call is no more."""
        self._done = True
        self._messages.drop()

    def _fail(self, error: StatusError) -> None:
        self._done = True
        grpc.fail(self._stream, error)


def parse(message_class: Any, data: bytes) -> Any:
    """The message in a request.

    Raises:
        StatusError: It is damaged.
    """
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.name
        raise StatusError(Code.INVALID_ARGUMENT, f"the request is no {name}") from error
