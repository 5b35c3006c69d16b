"""Functions of the user's process that take part in a compilation.

`jax.experimental.custom_partitioning` and `jax.debug.inspect_array_sharding` have XLA's partitioner call
Python while it compiles. For a cluster that Python is in the user's process: here are the functions
that XLA calls in its stead, which ask the client (see `channel.rgcb` and `client/partitioning.py`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from jaxlib import xla_client as xc
from jaxlib.mlir import ir

from regrow.channel import partitioning, rgcb, values
from regrow.channel.partitioning import Question, of_sharding, to_sharding
from regrow.errors import Code, StatusError
from regrow.worker.callbacks import CallbackRelay, HostCallbackError
from regrow.worker.custom_calls import CustomCall, custom_calls, refuse_pointers
from regrow.worker.modules import parse_module

_PARTITION: Final = "CustomSPMDPartitioning"
_INSPECT: Final = "InspectSharding"
# XLA keeps the first functions of a name, and JAX's own are there already.
_REMOTE: Final = "RegrowSPMDPartitioning"
_TARGETS: Final = (_PARTITION, _INSPECT, _REMOTE)
_KEY: Final = re.compile(rb"([0-9a-f]{16}):([0-9]{1,18}):(.*)", re.DOTALL)

_NOBODYS: Final = StatusError(
    Code.UNIMPLEMENTED,
    "this program has functions of its own process take part in its compilation, which works in "
    "clients that `regrow run` or `regrow.connect` has started",
)
_NESTED: Final = StatusError(
    Code.UNIMPLEMENTED,
    "the program of a shard, as custom_partitioning makes it, cannot have functions of its own that "
    "take part in a compilation",
)
_TWICE: Final = StatusError(
    Code.UNIMPLEMENTED, "custom_partitioning in a program with host callbacks is not supported"
)


class _Owner(NamedTuple):
    """Whose functions they are, and the client's own name for one of them."""

    nonce: str
    token: int
    key: bytes


def silence(module: Any) -> None:
    """Prepares a module that is compiled once more: its client has heard all it wanted to hear."""
    for call in custom_calls(module):
        if call.target == _INSPECT:
            call.change(_INSPECT, _encoded(_ignore))


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
        self._registering = threading.Lock()

    @contextlib.contextmanager
    def taking_part(
        self, client: rgcb.ProgramCallbacks | None, calls: Sequence[CustomCall], callbacks: int
    ) -> Iterator[None]:
        """Prepares the custom calls of a program, which is to be compiled inside the block.

        Args:
            client: Whose functions they are, if the program tells.
            calls: All custom calls of the program.
            callbacks: How many host callbacks it has.

        Raises:
            StatusError: The client has not said whose the functions are, or the program also has
                host callbacks, so that each host compiles it for itself.
        """
        inspectors: list[Any] = []  # XLA knows them by their address only.
        for call in calls:
            if call.target not in _TARGETS:
                continue
            if client is None or call.target == _REMOTE:
                raise _NOBODYS
            key = b"" if call.config is None else ir.StringAttr(call.config).value_bytes
            if call.target == _INSPECT:
                owner = _Owner(client.nonce, client.token, key)
                inspectors.append(functools.partial(self._inspect, owner))
                call.change(_INSPECT, _encoded(inspectors[-1]))
            elif callbacks:
                raise _TWICE
            else:
                self._register()
                call.change(_REMOTE, f"{client.nonce}:{client.token}:".encode() + key)
        yield

    def _register(self) -> None:
        with self._registering:
            if not self._registered:
                self._registered = True
                xc.register_custom_call_partitioner(
                    _REMOTE, self._propagate, self._partition, self._infer, True
                )

    # --- what XLA calls ---

    def _inspect(self, owner: _Owner, sharding: Any) -> None:
        self._ask(owner, rgcb.INSPECT, Question(owner.key, result_sharding=of_sharding(sharding)))

    def _propagate(self, sharding: Any, shape: Any, config: bytes) -> Any:
        owner = _owner(config)
        question = Question(owner.key, **_results(shape, sharding))
        return to_sharding(self._ask(owner, rgcb.PROPAGATE, question)[0])

    def _partition(
        self,
        shapes: Sequence[Any],
        shardings: Sequence[Any],
        result_shape: Any,
        result_sharding: Any,
        config: bytes,
    ) -> tuple[bytes, list[Any], Any]:
        owner = _owner(config)
        given = [*map(_shape, shapes)], [*map(of_sharding, shardings)]
        question = Question(owner.key, *given, **_results(result_shape, result_sharding))
        program, *told = self._ask(owner, rgcb.PARTITION, question)
        *arguments, result = map(to_sharding, told)
        return _shard_program(program), arguments, result

    def _infer(
        self, shapes: Sequence[Any], shardings: Sequence[Any], result_shape: Any, config: bytes
    ) -> Any:
        owner = _owner(config)
        given = [*map(_shape, shapes)], [*map(of_sharding, shardings)]
        question = Question(owner.key, *given, **_results(result_shape, None))
        return to_sharding(self._ask(owner, rgcb.INFER, question)[0])

    def _ask(self, owner: _Owner, function: int, question: Question) -> list[bytes]:
        payload = b"".join(values.encode(partitioning.to_arrays(question)))
        answer = rgcb.parse_answer(
            memoryview(self._relay.call(owner.nonce, owner.token, function, payload))
        )
        if isinstance(answer, tuple):
            raise HostCallbackError(*answer)
        return [b"" if value is None else value.tobytes() for value in values.decode(answer)]


def _shard_program(artifact: bytes) -> bytes:
    """A client's program for one shard, as XLA takes it.

    Raises:
        HostCallbackError: It has calls that are refused, or cannot be read.
    """
    try:
        module = parse_module(artifact)
        calls = custom_calls(module)
        refuse_pointers(calls, 0)
        if any(call.target in _TARGETS for call in calls):
            raise _NESTED
    except StatusError as error:
        raise HostCallbackError(error.code, error.message) from None
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return bytecode.getvalue()


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
        "result_sharding": of_sharding(sharding),
    }
