"""`custom_partitioning` and `jax.debug.inspect_array_sharding`: functions that take part in a compilation.

XLA's partitioner calls them while it compiles, by their number or address in this process. A program
for a cluster is compiled elsewhere: there XLA calls functions that ask this process (see
`worker/partitioning.py`). They are answered by the thread that waits for the compilation, whose
settings JAX looks at.
"""

from __future__ import annotations

import functools
import importlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeAlias, final

from regrow.channel import partitioning
from regrow.channel.partitioning import Question, of_sharding, to_sharding
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
        compiled: Future[Any] = Future()

        def work() -> None:
            _settle(compiled, compile_)
            self._calls.put(None)

        try:
            threading.Thread(target=work, name="regrow-compile", daemon=True).start()
            while (call := self._calls.get()) is not None:
                _settle(call.answer, call.ask)
            return compiled.result()
        finally:
            self._host.forget(self.token)
            while not self._calls.empty():
                late = self._calls.get()
                if late is not None:
                    late.answer.cancel()

    def _handed(self, function: Function) -> Callable[..., Sequence[Any]]:
        def handed(*arrays: Any) -> Sequence[Any]:
            question = partitioning.from_arrays(arrays)
            call = _Call(Future(), functools.partial(function, question))
            self._calls.put(call)
            return [partitioning.of_bytes(item) for item in call.answer.result()]

        return handed


class _Call(NamedTuple):
    """A question that is to be answered by another thread."""

    answer: Future[list[bytes]]
    ask: Callable[[], list[bytes]]


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _propagate(question: Question) -> list[bytes]:
    told = _stock()._custom_partitioning_propagate_user_sharding(
        to_sharding(question.result_sharding), _result_shape(question), question.key
    )
    return [of_sharding(told)]


def _partition(question: Question) -> list[bytes]:
    program, arguments, result = _stock()._custom_partitioning_partition(
        *_arguments(question),
        _result_shape(question),
        to_sharding(question.result_sharding),
        question.key,
    )
    return [_artifact(program), *map(of_sharding, arguments), of_sharding(result)]


def _infer(question: Question) -> list[bytes]:
    told = _stock()._custom_partitioning_infer_sharding_from_operands(
        *_arguments(question), _result_shape(question), question.key
    )
    return [of_sharding(told)]


def _inspect(question: Question) -> list[bytes]:
    _inspectors[question.key](to_sharding(question.result_sharding))
    return []


def _artifact(program: bytes) -> bytes:
    """A program that another version of jaxlib can read, too."""
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    stablehlo: Any = importlib.import_module("jax._src.lib.mlir.dialects").hlo
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(program)
        jaxlib: Any = importlib.import_module("jaxlib._jax")
        return bytes(jaxlib.mlir.serialize_portable_artifact(module, version, True))


def _stock() -> Any:
    return importlib.import_module("jax._src.custom_partitioning")


def _xla_client() -> Any:
    return importlib.import_module("jaxlib.xla_client")


def _arguments(question: Question) -> tuple[list[Any], list[Any]]:
    return [*map(_shape, question.shapes)], [*map(to_sharding, question.shardings)]


def _result_shape(question: Question) -> Any:
    shapes = [*map(_shape, question.result_shapes)]
    return _xla_client().Shape.tuple_shape(shapes) if question.tupled else shapes[0]


def _shape(shape: partitioning.Shape) -> Any:
    dims, dtype = shape
    return _xla_client().Shape.array_shape(dtype, dims)
