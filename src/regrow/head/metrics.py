"""The metrics of a head for Prometheus, over HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, Final, final

from regrow.errors import ClusterStartError, UsageError
from regrow.observe.metrics import Families, families
from regrow.slices.model import TRANSITIONS

HOST: Final = "127.0.0.1"
_ANSWER_S: Final = 5.0


@final
class MetricsServer:
    """Serves until it is closed.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, port: int, status: Callable[[], dict[str, Any]]) -> None:
        """Begins to listen; `status` is called in the loop of the caller.

        Raises:
            UsageError: prometheus_client is not installed.
            ClusterStartError: The port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            raise UsageError(
                "--metrics-port needs prometheus_client: pip install 'regrow[metrics]'"
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(asyncio.get_running_loop(), status))
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise ClusterStartError(
                f"metrics cannot be served at {HOST}:{port}: {error.strerror or error}"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening. A request that is being answered ends with the process."""
        self._server.shutdown()
        self._server.server_close()


@final
class _Collector:
    """Asks the loop for the status, from a thread of the server."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, status: Callable[[], dict[str, Any]]
    ) -> None:
        self._loop = loop
        self._status = status

    def describe(self) -> list[Any]:
        """Nothing: the loop need not be asked when this is registered."""
        return []

    def collect(self) -> Families:
        """The metrics as they are now."""

        async def status() -> dict[str, Any]:
            return self._status()

        future = asyncio.run_coroutine_threadsafe(status(), self._loop)
        try:
            return families(future.result(_ANSWER_S), TRANSITIONS)
        except NoAnswer:
            future.cancel()
            return iter(())
