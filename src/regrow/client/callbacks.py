"""Host callbacks inside jit (`jax.debug.print`, `pure_callback`, `io_callback`…).

The stock client refuses every program that has them. For the platform "cpu" JAX lowers a callback to
a call of XLA's own Python handler with the callback's number in the program; that is what the server
needs too. So the functions stay here, the program says in an attribute whose they are, and the
client sees none. The server runs the program with functions that call back (see `channel.rgcb`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from regrow.channel import rgcb
from regrow.client import backend, partitioning
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
        partitioned = partitioning.MARK in _frontend_attributes(module)
        host = backend.host_of(backend_) if host_callbacks or partitioned else None
        if host is None:
            return stock(backend_, module, executable_devices, options, host_callbacks)

        def compile_() -> Any:
            return stock(backend_, module, executable_devices, options, [])

        token = _register(host, module, host_callbacks) if host_callbacks else None
        try:
            return _partitioned(host, module, compile_) if partitioned else compile_()
        except BaseException:
            if token is not None:
                host.forget(token)
            raise

    compiler.backend_compile_and_load = backend_compile_and_load


def _register(host: CallbackHost, module: Any, functions: Sequence[Any]) -> int:
    _refuse_buffer_callbacks(module)
    token = host.register(functions)
    callbacks = rgcb.ProgramCallbacks(host.nonce, token, len(functions))
    _mark(module, rgcb.ATTRIBUTE, rgcb.attribute(callbacks))
    return token


def _partitioned(host: CallbackHost, module: Any, compile_: Callable[[], Any]) -> Any:
    compilation = partitioning.Compilation(host)
    functions = rgcb.ProgramCallbacks(host.nonce, compilation.token, 0)
    _mark(module, rgcb.PARTITIONING, rgcb.partitioning_attribute(functions))
    return compilation.run(compile_)


def _frontend_attributes(module: Any) -> dict[str, Any]:
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    attributes = module.operation.attributes
    if _FRONTEND_ATTRIBUTES not in attributes:
        return {}
    found = ir.DictAttr(attributes[_FRONTEND_ATTRIBUTES])
    return {entry.name: entry.attr for entry in found}


def _mark(module: Any, name: str, text: str) -> None:
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    with module.context:
        marks = _frontend_attributes(module) | {name: ir.StringAttr.get(text)}
        module.operation.attributes[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(marks)


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
            if not partitioning.keep(keepalive):
                raise _unimplemented(_pointer_refusal(keepalive))
            _mark(self.module, partitioning.MARK, "")
        stock(self, keepalive)

    mlir.ModuleContext.add_keepalive = add_keepalive


def _pointer_refusal(keepalive: Any) -> str:
    where = getattr(keepalive, "__module__", type(keepalive).__module__)
    return (
        f"a part of this program ({where}) refers to an object by its address in this process, and "
        "programs of a cluster are compiled and run in others"
    )


def _unimplemented(text: str) -> Exception:
    errors: Any = importlib.import_module("jax").errors
    error: Exception = errors.JaxRuntimeError(f"UNIMPLEMENTED: {text}")
    return error
