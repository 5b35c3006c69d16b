"""Reading the MLIR of programs: what they are, and what they tell of themselves."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any, final

from jax._src.interpreters import mlir as jax_mlir
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from regrow.errors import Code, StatusError
from regrow.wire.dtypes import TOKEN, kind_of_mlir

# Where the names of its ops stand in a portable artifact.
_OPS = re.compile(rb"vhlo\0(?:module\0)?((?:[a-z0-9_]+_v\d+\0)+)")
_ALIAS_ATTRIBUTES = ("tf.aliasing_output", "jax.buffer_donor")


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


def identity(program: bytes) -> bytes:
    """A digest of a portable artifact without its source locations.

    Locations hold the whole call stack: the same function traced from another line is another text.

    Raises:
        StatusError: This jaxlib cannot read it.
    """
    module = parse_module(program)
    text = io.BytesIO()
    with module.context:
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        module.operation.write_bytecode(text)
    return hashlib.sha256(text.getbuffer()).digest()


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
