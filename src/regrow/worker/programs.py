"""Loading programs, and what can be known of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib import _jax
from jaxlib import xla_client as xc
from jaxlib.mlir import ir

from regrow.channel import rgcb
from regrow.channel.commands import Load
from regrow.errors import Code, StatusError
from regrow.wire.dtypes import TOKEN, kind_of_mlir
from regrow.worker import partitioning
from regrow.worker.callbacks import CallbackRelay, HostCallbacks
from regrow.worker.platform import Domain

_POINTERS = (b"xla_buffer_python",)
# Where the names of its ops stand in a portable artifact.
_OPS = re.compile(rb"vhlo\0(?:module\0)?((?:[a-z0-9_]+_v\d+\0)+)")
_ALIAS_ATTRIBUTES = ("tf.aliasing_output", "jax.buffer_donor")


def compile_options(serialized: bytes, replicas: int, ids: Sequence[int]) -> Any:
    """Compile options with a device assignment of PJRT ids, `replicas` rows of partitions."""
    options = xc.CompileOptions.ParseFromString(serialized)
    rows = np.asarray(ids, np.int32).reshape(replicas, -1)
    assignment = xc.DeviceAssignment.create(rows)
    options.device_assignment = assignment
    options.executable_build_options.device_assignment = assignment
    return options


def parse_module(program: bytes) -> Any:
    """The MLIR module of a portable artifact.

    Raises:
        StatusError: This jaxlib cannot read it; the message holds both StableHLO versions and the op.
    """
    context = jax_mlir.make_ir_context()
    with context:
        try:
            module = _jax.mlir.deserialize_portable_artifact(program, context)
            return module if isinstance(module, ir.Module) else ir.Module.parse(module)
        except Exception as error:  # noqa: BLE001 - MLIR raises many kinds
            raise _unreadable(program, context, error) from None


def _unreadable(program: bytes, context: Any, error: Exception) -> StatusError:
    from jaxlib.mlir.dialects import stablehlo

    head = program[:64].split(b"\x00")[0].decode("latin-1")
    theirs = head.partition("StableHLO_v")[2] or "unknown"
    # MLIR prints which op it does not know, but its exception does not hold it.
    names = {name for run in _OPS.findall(program) for name in run.decode().split("\0") if name}
    unknown = sorted(n for n in names if not context.is_registered_operation(f"vhlo.{n}"))
    lines = f"it does not know {', '.join(unknown)}." if unknown else " ".join(str(error).split())
    return StatusError.user(
        Code.FAILED_PRECONDITION,
        f"the server's jaxlib cannot read this program: it was written as StableHLO {theirs}, the "
        f"server reads up to {stablehlo.get_current_version()}. {lines} Use the same jax on both "
        "sides, or a newer one on the server.",
    )


def refuse_pointers(program: bytes, module: Any) -> None:
    """Refuses programs that hold addresses of the client's process: here they would be followed.

    Raises:
        StatusError: It is such a program.
    """
    if not any(name in program for name in _POINTERS):
        return

    def visit(op: Any) -> Any:
        if "call_target_name" in op.attributes:
            name = ir.StringAttr(op.attributes["call_target_name"]).value
            if name.encode().startswith(_POINTERS):
                found.append(name)
        return ir.WalkResult.ADVANCE

    found: list[str] = []
    with module.context:
        module.operation.walk(visit)
    if found:
        raise StatusError(
            Code.UNIMPLEMENTED,
            f"{found[0]} needs memory of the client's process and cannot run on a cluster; "
            "run the client by `regrow run` or call `regrow.connect` to learn what to use instead",
        )


@final
class Signature:
    """What a module's text tells: its name, arguments, results and donations."""

    def __init__(self, module: Any) -> None:
        with module.context:
            attributes = module.operation.attributes
            self.name = (
                ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"
            )
            main = next((op for op in module.body.operations if _symbol(op) == "main"), None)
            if main is None:
                raise StatusError.user(Code.INVALID_ARGUMENT, "a program without a main function")
            function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
            self.inputs = [_tensor(kind) for kind in function.inputs]
            self.outputs = [_tensor(kind) for kind in function.results]
            self.donated = list(_donated(main))


def _symbol(op: Any) -> str | None:
    name = getattr(op, "sym_name", None)
    return None if name is None else str(ir.StringAttr(name).value)


def _tensor(kind: Any) -> tuple[int, tuple[int, ...]]:
    if "token" in str(kind):
        return TOKEN, ()
    tensor = ir.RankedTensorType(kind)
    return kind_of_mlir(str(tensor.element_type)), tuple(tensor.shape)


def _donated(main: Any) -> Sequence[int]:
    if "arg_attrs" not in main.attributes:
        return ()
    arguments = ir.ArrayAttr(main.attributes["arg_attrs"])
    return [
        index
        for index, attributes in enumerate(arguments)
        if any(name in ir.DictAttr(attributes) for name in _ALIAS_ATTRIBUTES)
    ]


@final
class Program:
    """An executable that is loaded on this host's devices of one domain."""

    def __init__(self, load: Load, domain: Domain, relay: CallbackRelay) -> None:
        """Loads it, or compiles it here if it has host callbacks, which go to `relay`.

        Raises:
            jax.errors.JaxRuntimeError: XLA refuses the blob or the program.
            StatusError: This jaxlib cannot read the program.
        """
        self.name = load.name
        self.domain = domain
        self.devices = tuple(load.devices)
        self.local = tuple(device for device in load.devices if device in domain.local)
        self.spans = bool(load.epoch)
        calls = rgcb.callbacks_of(load.program)
        self.callbacks = None if calls is None else HostCallbacks(relay, calls)
        ids = [domain.devices[device].id for device in load.devices]
        options = compile_options(load.options, load.replicas, ids)
        devices = domain.device_list(load.devices)
        if self.callbacks is not None:
            module = parse_module(load.program)
            with module.context, partitioning.unheard(load.program, module):
                self._loaded = domain.client.compile_and_load(
                    module, devices, options, host_callbacks=self.callbacks.functions
                )
        else:
            self._loaded = domain.client.deserialize_executable(load.blob, devices, options)
        self._handlers = self._make_handlers(load.outs)

    def _make_handlers(self, outs: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
        shardings = self._loaded.get_output_shardings() if len(self.devices) > 1 else None
        kinds = self._loaded.get_output_memory_kinds()
        handlers: list[Any] = []
        for index, (kind, dims) in enumerate(outs):
            if kind == TOKEN:
                handlers.append(_tokens)
                continue
            memory_kind = kinds[0][index] if kinds else "device"
            sharding = None if shardings is None else shardings[index]
            handlers.append(
                self.domain.handler(self.devices, kind, tuple(dims), sharding, memory_kind)
            )
        return handlers

    def close(self) -> None:
        """Nothing will run it any more."""
        if self.callbacks is not None:
            self.callbacks.close()

    def run(self, args: list[Any], launch: int, with_token: bool) -> tuple[list[Any], Any]:
        """Starts one execution; its outputs, and a token that is ready when it has ended."""
        results = self._loaded.execute_sharded(
            args, with_tokens=with_token, launch_id=launch if self.spans else None
        )
        token = results.consume_token() if with_token else None
        if not self._handlers:
            return [], token
        return results.consume_with_handlers(self._handlers, strict=False), token


def _tokens(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]
