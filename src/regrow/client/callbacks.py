"""Host callbacks inside jit (`jax.debug.print`, `pure_callback`, `io_callback`…).

The stock client refuses every program that has them. For the platform "cpu" JAX lowers a callback to
a call of XLA's own Python handler with the callback's number in the program; that is what the server
needs too. So the functions stay here, the program says in an attribute whose they are, and the
client sees none. The server runs the program with functions that call back (see `channel.rgcb`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from regrow.channel import rgcb
from regrow.client import backend
from regrow.client.callhost import CallbackHost
from regrow.client.marks import hides_frames

hides_frames(__file__)

_FRONTEND_ATTRIBUTES: Final = "mhlo.frontend_attributes"
_BUFFER_CALLBACK: Final = "xla_buffer_python"


def install() -> None:
    """Hooks the compilation, and the lowering of what cannot leave the process."""
    _hook_compilation()
    _hook_keepalive()


def _hook_compilation() -> None:
    compiler: Any = importlib.import_module("jax._src.compiler")
    stock = compiler.backend_compile_and_load

    def backend_compile_and_load(
        backend_: Any,
        module: Any,
        executable_devices: Any,
        options: Any,
        host_callbacks: Sequence[Any],
    ) -> Any:
        host = backend.host_of(backend_) if host_callbacks else None
        if host is None:
            return stock(backend_, module, executable_devices, options, host_callbacks)
        _refuse_buffer_callbacks(module)
        token = host.register(host_callbacks)
        try:
            _mark(module, host, token, len(host_callbacks))
            return stock(backend_, module, executable_devices, options, [])
        except BaseException:
            host.forget(token)
            raise

    compiler.backend_compile_and_load = backend_compile_and_load


def _mark(module: Any, host: CallbackHost, token: int, count: int) -> None:
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    with module.context:
        attributes = module.operation.attributes
        frontend = {}
        if _FRONTEND_ATTRIBUTES in attributes:
            found = ir.DictAttr(attributes[_FRONTEND_ATTRIBUTES])
            frontend = {entry.name: entry.attr for entry in found}
        text = rgcb.attribute(rgcb.ProgramCallbacks(host.nonce, token, count))
        frontend[rgcb.ATTRIBUTE] = ir.StringAttr.get(text)
        attributes[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(frontend)


def _refuse_buffer_callbacks(module: Any) -> None:
    if _BUFFER_CALLBACK in module.operation.get_asm(large_elements_limit=8):
        raise _unimplemented(
            "buffer_callback hands device memory to a function of this process, and the devices of "
            "a cluster are in others; use jax.pure_callback or jax.experimental.io_callback"
        )


def _hook_keepalive() -> None:
    """What a program must keep alive, it refers to by its address in this process."""
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    stock = mlir.ModuleContext.add_keepalive

    def add_keepalive(self: Any, keepalive: Any) -> None:
        if backend.host_of(self.get_backend(optional=True)) is not None:
            raise _unimplemented(_pointer_refusal(keepalive))
        stock(self, keepalive)

    mlir.ModuleContext.add_keepalive = add_keepalive


def _pointer_refusal(keepalive: Any) -> str:
    where = getattr(keepalive, "__module__", type(keepalive).__module__)
    why = "runs a function of this process inside the compiler, which is in another"
    if where == "jax._src.debugging":
        return (
            f"jax.debug.inspect_array_sharding on more than one device {why}; look at the "
            ".sharding of the array that the jitted function returns"
        )
    if where == "jax._src.custom_partitioning":
        return f"custom_partitioning on more than one device {why}; use jax.shard_map"
    return f"a part of this program ({where}) {why}; a cluster cannot run it"


def _unimplemented(text: str) -> Exception:
    errors: Any = importlib.import_module("jax").errors
    error: Exception = errors.JaxRuntimeError(f"UNIMPLEMENTED: {text}")
    return error
