"""`custom_partitioning` and `jax.debug.inspect_array_sharding`: functions that take part in a compilation.

XLA's partitioner calls them while it compiles, by their number or address in this process. A program
for a cluster is compiled elsewhere: there XLA calls functions that ask this process (see
`worker/partitioning.py`). They are answered by the thread that waits for the compilation, whose
settings JAX looks at.
"""

from __future__ import annotations

import importlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

from regrow.channel import partitioning
from regrow.channel.partitioning import Question
from regrow.client.callhost import CallbackHost

Function: TypeAlias = Callable[[Question], list[bytes]]

MARK: Final = "regrow.partitioned"
"""Frontend attribute of a lowered module with such functions."""

_inspectors: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()


def keep(keepalive: Any) -> bool:
    """Takes note of what a program keeps alive for its compilation; False: it is none of these."""
    where = getattr(keepalive, "__module__", type(keepalive).__module__)
    if where == "jax._src.debugging":
        xla_client: Any = importlib.import_module("jaxlib.xla_client")
        _inspectors[bytes(xla_client.encode_inspect_sharding_callback(keepalive))] = keepalive
        return True
    return bool(where == "jax._src.custom_partitioning")


@final
class Compilation:
    """One compilation that functions of this process take part in."""

    def __init__(self, host: CallbackHost) -> None:
        """Registers them."""
        self._host = host
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        functions = (_propagate, _partition, _infer, _inspect)
        self.token = host.register([self._handed(function) for function in functions])

    def run(self, compile_: Callable[[], Any]) -> Any:
        """Compiles on another thread, and answers on this one."""
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.extend((compile_(), None))
            except BaseException as error:  # noqa: BLE001 (raised again by who waits)
                outcome.extend((None, error))
            self._calls.put(None)

        try:
            threading.Thread(target=work, name="regrow-compile", daemon=True).start()
            while (call := self._calls.get()) is not None:
                call.answer()
        finally:
            self._host.forget(self.token)
        compiled, error = outcome
        if error is not None:
            raise error
        return compiled

    def _handed(self, function: Function) -> Callable[..., Sequence[Any]]:
        def handed(*arrays: Any) -> Sequence[Any]:
            call = _Call(function, partitioning.from_arrays(arrays))
            self._calls.put(call)
            return [partitioning.of_bytes(item) for item in call.wait()]

        return handed


@final
class _Call:
    """A function that is to be called by another thread."""

    def __init__(self, function: Function, question: Question) -> None:
        self._function = function
        self._question = question
        self._answer: queue.SimpleQueue[list[bytes] | BaseException] = queue.SimpleQueue()

    def answer(self) -> None:
        try:
            self._answer.put(self._function(self._question))
        except Exception as error:  # noqa: BLE001 (raised by who waits)
            self._answer.put(error)

    def wait(self) -> list[bytes]:
        answer = self._answer.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _propagate(question: Question) -> list[bytes]:
    told = _stock()._custom_partitioning_propagate_user_sharding(
        _sharding(question.result_sharding), _result_shape(question), question.key
    )
    return [_bytes_of(told)]


def _partition(question: Question) -> list[bytes]:
    program, arguments, result = _stock()._custom_partitioning_partition(
        *_arguments(question),
        _result_shape(question),
        _sharding(question.result_sharding),
        question.key,
    )
    return [bytes(program), *map(_bytes_of, arguments), _bytes_of(result)]


def _infer(question: Question) -> list[bytes]:
    told = _stock()._custom_partitioning_infer_sharding_from_operands(
        *_arguments(question), _result_shape(question), question.key
    )
    return [] if told is None else [_bytes_of(told)]


def _inspect(question: Question) -> list[bytes]:
    _inspectors[question.key](_sharding(question.result_sharding))
    return []


def _stock() -> Any:
    return importlib.import_module("jax._src.custom_partitioning")


def _xla_client() -> Any:
    return importlib.import_module("jaxlib.xla_client")


def _arguments(question: Question) -> tuple[list[Any], list[Any]]:
    return [*map(_shape, question.shapes)], [*map(_sharding, question.shardings)]


def _result_shape(question: Question) -> Any:
    shapes = [*map(_shape, question.result_shapes)]
    return _xla_client().Shape.tuple_shape(shapes) if question.tupled else shapes[0]


def _shape(shape: partitioning.Shape) -> Any:
    dims, dtype = shape
    return _xla_client().Shape.array_shape(dtype, dims)


def _sharding(serialized: bytes) -> Any:
    if not serialized:
        return None
    proto = _xla_client().OpSharding()
    proto.ParseFromString(serialized)
    return _xla_client().HloSharding.from_proto(proto)


def _bytes_of(sharding: Any) -> bytes:
    return bytes(sharding.to_proto().SerializeToString())
