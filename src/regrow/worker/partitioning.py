"""Functions of the user's process that take part in a compilation.

`jax.experimental.custom_partitioning` and `jax.debug.inspect_array_sharding` have XLA's partitioner call
Python while it compiles. For a cluster that Python is in the user's process: here are the functions
that XLA calls in its stead, which ask the client (see `channel.rgcb` and `client/partitioning.py`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from jaxlib import xla_client as xc
from jaxlib.mlir import ir

from regrow.channel import partitioning, rgcb, values
from regrow.channel.partitioning import Question
from regrow.errors import Code, StatusError
from regrow.worker.callbacks import CallbackRelay, HostCallbackError

_PARTITION: Final = "CustomSPMDPartitioning"
_INSPECT: Final = "InspectSharding"
# XLA keeps the first functions of a name, and JAX's own are there already.
_REMOTE: Final = "RegrowSPMDPartitioning"
_KEY: Final = re.compile(rb"([0-9a-f]{16}):([0-9]{1,18}):(.*)", re.DOTALL)


_NOBODYS: Final = StatusError(
    Code.UNIMPLEMENTED,
    "this program has functions of its own process take part in its compilation, which works in "
    "clients that `regrow run` or `regrow.connect` has started",
)
_TWICE: Final = StatusError(
    Code.UNIMPLEMENTED, "custom_partitioning in a program with host callbacks is not supported"
)


class _Owner(NamedTuple):
    """Whose functions they are, and the client's own name for one of them."""

    nonce: str
    token: int
    key: bytes


@contextlib.contextmanager
def unheard(program: bytes, module: Any) -> Iterator[None]:
    """Prepares a module that is compiled once more: its client has heard all it wanted to hear."""
    with _replaced(program, module, lambda name, key: _encoded(_ignore)):
        yield


@contextlib.contextmanager
def _replaced(
    program: bytes, module: Any, config_of: Callable[[str, bytes], bytes]
) -> Iterator[None]:
    """Gives the calls of a client's functions another configuration, made of their name and key."""
    if any(name.encode() in program for name in (_PARTITION, _INSPECT)):
        with module.context:
            module.operation.walk(functools.partial(_replace, config_of))
    yield


def _replace(config_of: Callable[[str, bytes], bytes], op: Any) -> ir.WalkResult:
    if op.name == "stablehlo.custom_call":
        name = str(ir.StringAttr(op.attributes["call_target_name"]).value)
        if name in (_PARTITION, _INSPECT):
            key = ir.StringAttr(op.attributes["backend_config"]).value_bytes
            op.attributes["backend_config"] = ir.StringAttr.get(config_of(name, key))
            if name == _PARTITION:
                op.attributes["call_target_name"] = ir.StringAttr.get(_REMOTE)
    return ir.WalkResult.ADVANCE


def _encoded(handler: Callable[[Any], None]) -> bytes:
    """XLA knows a handler by its address only: it must be kept."""
    return bytes(xc.encode_inspect_sharding_callback(handler))


def _ignore(_: Any) -> None:
    pass


@final
class RemotePartitioning:
    """Has programs compiled with the help of their clients; one for a process."""

    def __init__(self, relay: CallbackRelay) -> None:
        self._relay = relay
        self._registered = False

    @contextlib.contextmanager
    def taking_part(self, program: bytes, module: Any, callbacks: int) -> Iterator[None]:
        """Prepares the module of a serialised program; it is to be compiled inside the block.

        Raises:
            StatusError: The client has not said whose the functions are, or the program also has
                host callbacks, so that each host compiles it for itself.
        """
        whose = rgcb.partitioning_of(program)
        handlers: list[Any] = []

        def config_of(name: str, key: bytes) -> bytes:
            if whose is None:
                raise _NOBODYS
            if name == _PARTITION:
                if callbacks:
                    raise _TWICE
                return f"{whose.nonce}:{whose.token}:".encode() + key
            owner = _Owner(whose.nonce, whose.token, key)
            handlers.append(functools.partial(self._inspect, owner))
            return _encoded(handlers[-1])

        if whose is not None and not self._registered:
            self._registered = True
            xc.register_custom_call_partitioner(
                _REMOTE, self._propagate, self._partition, self._infer, True
            )
        with _replaced(program, module, config_of):
            yield

    # --- what XLA calls ---

    def _inspect(self, owner: _Owner, sharding: Any) -> None:
        self._ask(owner, rgcb.INSPECT, Question(owner.key, result_sharding=_bytes_of(sharding)))

    def _propagate(self, sharding: Any, shape: Any, config: bytes) -> Any:
        owner = _owner(config)
        question = Question(owner.key, **_results(shape, sharding))
        return _sharding(self._ask(owner, rgcb.PROPAGATE, question)[0])

    def _partition(
        self,
        shapes: Sequence[Any],
        shardings: Sequence[Any],
        result_shape: Any,
        result_sharding: Any,
        config: bytes,
    ) -> tuple[bytes, list[Any], Any]:
        owner = _owner(config)
        given = [*map(_shape, shapes)], [*map(_bytes_of, shardings)]
        question = Question(owner.key, *given, **_results(result_shape, result_sharding))
        program, *told = self._ask(owner, rgcb.PARTITION, question)
        *arguments, result = map(_sharding, told)
        return program, arguments, result

    def _infer(
        self, shapes: Sequence[Any], shardings: Sequence[Any], result_shape: Any, config: bytes
    ) -> Any:
        owner = _owner(config)
        given = [*map(_shape, shapes)], [*map(_bytes_of, shardings)]
        question = Question(owner.key, *given, **_results(result_shape, None))
        told = self._ask(owner, rgcb.INFER, question)
        return _sharding(told[0]) if told else None

    def _ask(self, owner: _Owner, function: int, question: Question) -> list[bytes]:
        payload = b"".join(values.encode(partitioning.to_arrays(question)))
        answer = rgcb.parse_answer(
            memoryview(self._relay.call(owner.nonce, owner.token, function, payload))
        )
        if isinstance(answer, tuple):
            raise HostCallbackError(*answer)
        return [b"" if value is None else value.tobytes() for value in values.decode(answer)]


def _owner(config: bytes) -> _Owner:
    found = _KEY.fullmatch(config)
    if found is None:
        raise _NOBODYS
    return _Owner(found[1].decode(), int(found[2]), found[3])


def _shape(shape: Any) -> partitioning.Shape:
    return tuple(shape.dimensions()), shape.numpy_dtype()


def _results(shape: Any, sharding: Any) -> dict[str, Any]:
    tupled = shape.is_tuple()
    return {
        "result_shapes": [_shape(one) for one in (shape.tuple_shapes() if tupled else [shape])],
        "tupled": tupled,
        "result_sharding": _bytes_of(sharding),
    }


def _bytes_of(sharding: Any) -> bytes:
    return b"" if sharding is None else bytes(sharding.to_proto().SerializeToString())


def _sharding(serialized: bytes) -> Any:
    proto = xc.OpSharding()
    proto.ParseFromString(serialized)
    return xc.HloSharding.from_proto(proto)
