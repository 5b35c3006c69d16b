"""The session with the head: credentials, and who the session's host callbacks belong to.

`get_client` of jaxlib is the one function through which JAX, pathwaysutils and whoever else registers
the backend "proxy" make their session, so what is added there is never lost.
"""

from __future__ import annotations

import importlib
import os
import platform
import weakref
from collections.abc import Callable
from typing import Any, Final

from regrow.channel import rgcb
from regrow.client import profiler
from regrow.client.callhost import CallbackHost, knock
from regrow.client.connections import dial
from regrow.client.settings import Settings
from regrow.client.slack import coarse_timers
from regrow.client.vigil import Vigil
from regrow.errors import ClusterError, NoClusterError, ProtocolError

_CONNECTION_TIMEOUT_S: Final = 30
_KNOCK_TIMEOUT_S: Final = 10.0

_settings: Settings | None = None
_hosts: weakref.WeakKeyDictionary[Any, CallbackHost] = weakref.WeakKeyDictionary()


def use(settings: Settings) -> None:
    """Sessions with that target are the cluster's from now on."""
    global _settings
    _settings = settings


def host_of(client: Any) -> CallbackHost | None:
    """Where the host callbacks of a session live; None for a backend that is not ours."""
    return _hosts.get(client)


def install() -> None:
    """Hooks `get_client`, and registers the backend where JAX does not know it."""
    ifrt_proxy: Any = importlib.import_module("jaxlib._ifrt_proxy")
    ifrt_proxy.get_client = _hooked(ifrt_proxy.get_client)
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    if "proxy" not in bridge._backend_factories:
        bridge.register_backend_factory("proxy", _make_client, priority=-1)


def _make_client() -> Any:
    ifrt_proxy: Any = importlib.import_module("jaxlib._ifrt_proxy")
    config: Any = importlib.import_module("jax").config
    options = ifrt_proxy.ClientConnectionOptions()
    return ifrt_proxy.get_client(config.read("jax_backend_target"), options)


def _hooked(stock: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    def get_client(proxy_server_address: str, options: Any) -> Any:
        settings = _settings
        if settings is None or proxy_server_address.lower() != settings.target.lower():
            return stock(proxy_server_address, options)
        _knock(settings)
        host = CallbackHost(settings)
        options.initialization_data = {
            **(options.initialization_data or {}),
            **_credentials(settings, host.nonce),
        }
        if options.connection_timeout_in_seconds is None:
            options.connection_timeout_in_seconds = _CONNECTION_TIMEOUT_S
        with coarse_timers():
            client = stock(settings.target, options)
        _hosts[client] = host
        # Not at the exit, which waits for callbacks that still run.
        weakref.finalize(client, host.close).atexit = False
        host.start()
        vigil = Vigil(settings, host.silent)
        weakref.finalize(client, vigil.close).atexit = False
        vigil.start()
        profiler.admit_directories()
        return client

    return get_client


def _credentials(settings: Settings, nonce: str) -> dict[str, bytes]:
    jax: Any = importlib.import_module("jax")
    about = f"jax {jax.__version__}, Python {platform.python_version()}, pid {os.getpid()}"
    data = {rgcb.NONCE_KEY: nonce.encode("ascii"), rgcb.CLIENT_KEY: about.encode()}
    if settings.token is not None:
        data[rgcb.TOKEN_KEY] = settings.token.encode()
    return data


def _knock(settings: Settings) -> None:
    """The stock client tries for long, and then tells of gRPC; this tells the cause at once."""
    try:
        sock = dial(settings.address, _KNOCK_TIMEOUT_S)
    except OSError as error:
        raise NoClusterError(
            f"no cluster answers at {settings.target} ({error}); is it running? `regrow status` "
            "tells, `regrow up` starts one"
        ) from None
    try:
        sock.settimeout(_KNOCK_TIMEOUT_S)
        reason = knock(sock, settings.token)
    except (OSError, EOFError, ProtocolError) as error:
        raise NoClusterError(
            f"what answers at {settings.target} is no head of Regrow ({error})"
        ) from None
    finally:
        sock.close()
    if reason:
        raise ClusterError(f"the cluster at {settings.target} refused: {reason}")
