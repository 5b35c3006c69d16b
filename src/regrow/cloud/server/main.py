"""The local Cloud TPU from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

import uvicorn

from regrow.cloud.config import CloudConfig
from regrow.cloud.hosts.addresses import AddressBlock
from regrow.cloud.hosts.fleet import LocalFleet
from regrow.cloud.hosts.simulated import SimulatedFleet
from regrow.cloud.server.access import is_loopback
from regrow.cloud.server.app import make_app
from regrow.cloud.server.engine import Engine
from regrow.cloud.server.render import Renderer
from regrow.cloud.server.state_dir import DEFAULT_PORT, ServerState, StateDir
from regrow.cloud.store import Store
from regrow.errors import ClusterError, ClusterStartError
from regrow.processes import ProcessId, boot_id, set_name

logger = logging.getLogger(__name__)

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACEFUL_S: Final = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is to be.

    Attributes:
        state_dir: Its directory.
        config: The world of its control plane.
        host: The address that it listens on.
        port: The port; 0: any free one.
        simulate: Whether its slices have no processes.
    """

    state_dir: StateDir
    config: CloudConfig
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    simulate: bool = False


def serve(options: ServerOptions, ready: Callable[[ServerState], None]) -> None:
    """Serves until a signal ends it; then all hosts have ended as well.

    Args:
        options: How it is to be.
        ready: Is called when it answers requests.

    Raises:
        ClusterStartError: If it cannot start.
        ClusterError: If its memory cannot be read or written.
    """
    state_dir = options.state_dir
    with state_dir.locked(), Store(state_dir.database) as store:
        _check_kind(store, options)
        seed = zlib.crc32(str(state_dir.path).encode())
        preferred = store.fact("block")
        with AddressBlock(preferred, seed=seed) as block, _listen(options) as listener:
            # Hosts of other addresses than they had are not those that were left.
            moved = preferred not in (None, block.number)
            lost = store.fact("boot") != boot_id() or store.fact("clean", False) or moved
            facts = {"block": block.number, "boot": boot_id(), "simulate": options.simulate}
            store.write([], clean=False, **facts)
            asyncio.run(_serve(options, store, block, listener, ready, lost=lost))
            store.write([], clean=True)


def _check_kind(store: Store, options: ServerOptions) -> None:
    former = store.fact("simulate")
    if former is not None and former != options.simulate and store.load():
        kind = "simulated slices" if former else "slices with processes"
        raise ClusterStartError(
            f"{options.state_dir.path} has {kind}; go on with them, or give another --state-dir"
        )


@contextlib.contextmanager
def _listen(options: ServerOptions) -> Iterator[socket.socket]:
    if not is_loopback(options.host):
        logger.warning("clients from elsewhere need the token in %s", options.state_dir.path)
    try:
        listener = socket.create_server((options.host, options.port), backlog=512)
    except OSError as error:
        raise ClusterStartError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose another "
            "with --port"
        ) from None
    with listener:
        # Inherited by every connection. asyncio sets it only on sockets that it has made itself, and
        # without it the second half of an answer waits 40 ms for the client's kernel.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


async def _serve(
    options: ServerOptions,
    store: Store,
    block: AddressBlock,
    listener: socket.socket,
    ready: Callable[[ServerState], None],
    *,
    lost: bool,
) -> None:
    set_name("regrow-cloud")
    engine = Engine(options.config, store)
    if options.simulate:
        engine.fleet = SimulatedFleet(engine.report)
    else:
        engine.fleet = LocalFleet(
            options.state_dir.path,
            block,
            lambda: engine.plane.config,
            engine.report,
            engine.plane.tables.nodes.get,
        )
    renderer = Renderer(options.config, block.address, options.simulate)
    server = _Server(make_app(engine, renderer, options.state_dir.token()))
    host, port = listener.getsockname()[:2]
    state = ServerState(ProcessId.own(), f"http://{host}:{port}", options.simulate)
    options.state_dir.announce(state)
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, server.end)
    engine.on_failure = server.end
    try:
        engine.start(lost=lost)
        loop.call_soon(ready, state)
        await server.serve(sockets=[listener])
    finally:
        await engine.close()
    if engine.failure is not None:
        raise ClusterError(f"cannot write to {options.state_dir.database}: {engine.failure}")


class _Server(uvicorn.Server):
    """uvicorn that leaves the signals alone."""

    def __init__(self, app: object) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACEFUL_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Has it end."""
        self.should_exit = True
