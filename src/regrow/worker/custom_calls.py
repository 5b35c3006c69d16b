"""The custom calls of a program, and which of them are refused.

XLA looks functions up by name, and some follow what the program holds for them unchecked: an address,
or the number of a host callback. Programs come from clients, so every program is searched for them, in
its parsed form: its bytes may be text, which can spell a name in many ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from jaxlib.mlir import ir

from regrow.errors import Code, StatusError

_TARGET: Final = "call_target_name"
_CONFIG: Final = "backend_config"
# XLA takes the second where the first is missing or empty.
_CONFIGS: Final = (_CONFIG, "mhlo.backend_config")
_BUFFER_CALLBACK: Final = "xla_buffer_python"
_CALLBACK: Final = ("xla_ffi_python", "xla_ffi_partitioned_python")


class CustomCall(NamedTuple):
    """A custom call of whatever dialect: the name of its function, and the operation."""

    target: str
    op: Any

    @property
    def config(self) -> Any:
        """What the program holds for the function; None if it is nothing."""
        attributes = self.op.attributes
        held = (attributes[name] for name in _CONFIGS if name in attributes)
        return next((config for config in held if str(config) != '""'), None)

    def change(self, target: str, config: bytes) -> None:
        """Has it call another function, or with another configuration."""
        with self.op.context:
            self.op.attributes[_TARGET] = ir.StringAttr.get(target)
            self.op.attributes[_CONFIG] = ir.StringAttr.get(config)


def custom_calls(module: Any) -> list[CustomCall]:
    """All custom calls of a module."""
    found: list[CustomCall] = []

    def visit(op: Any) -> ir.WalkResult:
        attributes = op.attributes
        if _TARGET in attributes:
            found.append(CustomCall(str(ir.StringAttr(attributes[_TARGET]).value), op))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def refuse_pointers(calls: Sequence[CustomCall], callbacks: int) -> None:
    """Refuses functions that would follow an address of the client, or the number of no callback.

    Args:
        calls: Those of a program.
        callbacks: How many host callbacks it has.

    Raises:
        StatusError: It has such calls.
    """
    for call in calls:
        if call.target.startswith(_BUFFER_CALLBACK):
            raise StatusError(
                Code.UNIMPLEMENTED,
                f"{call.target} needs memory of the client's process and cannot run on a cluster; "
                "run the client by `regrow run` or call `regrow.connect` to learn what to use "
                "instead",
            )
        if call.target.startswith(_CALLBACK) and not 0 <= _index(call) < callbacks:
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"the program calls host callback {_index(call)}, and it has {callbacks}",
            )


def _index(call: CustomCall) -> int:
    try:
        return int(ir.IntegerAttr(ir.DictAttr(call.config)["index"]).value)
    except (KeyError, TypeError, ValueError):
        text = "the program calls a host callback that has no number"
        raise StatusError.user(Code.INVALID_ARGUMENT, text) from None
