"""What the head sees of its clients' work, told to `regrow.observe.Run` and to who waits for it.

It stands around the handlers of those requests that begin, wait for or move something. What a training
asks at each step costs two looks at the clock and a few counts; the rest is for elastic events, in
which the observer also asks the hosts itself when something has been done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final, TypeAlias, final

from regrow.channel.stamps import is_expected, step_of
from regrow.head.buffers import Array, Buffers, Piece
from regrow.head.digests import Digests
from regrow.head.executables import Executable
from regrow.head.phases import begun_by
from regrow.head.reshard import Reshard
from regrow.head.tables import Later, Tables
from regrow.head.transfers import Transfers
from regrow.head.watch import Watch
from regrow.observe import Activity, Kind, Program, Report, Run
from regrow.wire.dtypes import layout_bits

Handler: TypeAlias = Callable[[Any], Any]

SMALL_BYTES: Final = 4096
"""What is on one slice and no larger (an array, or a program's results) is taken for a health check's."""

_PINNED: Final = "pinned_host"
_BITS: Final = 32


@final
class Observer:
    """Sees the requests of all sessions, and hears what clients say.

    Attributes:
        run: Where the time goes.
        watch: Who waits for a step, or a phase.
    """

    def __init__(
        self, buffers: Buffers, transfers: Transfers, on_report: Callable[[Report], None]
    ) -> None:
        self.run = Run(monotonic(), on_report)
        self.watch = Watch()
        self._buffers = buffers
        self._transfers = transfers
        self._before_launch = 0
        self._hashes = 0

    def around(self, handlers: dict[str, Handler], tables: Tables) -> None:
        """Puts itself around the handlers of a session."""
        handle: dict[str, Callable[[Handler, Tables], Handler]] = {
            "compile_request": self._around_compile,
            "loaded_executable_execute_request": self._around_execute,
            "loaded_executable_fetch_execute_result_request": self._around_fetch,
            "check_value_ready_request": self._around_check,
            "copy_to_host_buffer_request": self._around_get,
            "copy_arrays_request": self._around_move,
            "reshard_arrays_request": self._around_move,
            "make_array_from_host_buffer_request": self._around_put,
            "make_arrays_from_host_buffer_shards_request": self._around_put,
        }
        for name, around in handle.items():
            handlers[name] = self._announced(name, around(handlers[name], tables), tables)

    def told(self, step: int | None, phase: str | None) -> None:
        """A client says that it is in this step, or phase."""
        self.run.told(step, phase, monotonic())
        self.watch.told(step, phase)

    def _announced(self, name: str, handler: Handler, tables: Tables) -> Handler:
        """Tells who waits for a phase, before the request is carried out."""
        watch, waiting, topology = self.watch, self.watch.phases, self._buffers.topology

        def request(body: Any) -> Any:
            if waiting:
                watch.begins(*begun_by(name, body, tables, topology))
            return handler(body)

        return request

    # --- programs ---

    def _around_compile(self, handler: Handler, tables: Tables) -> Handler:
        def compile_request(body: Any) -> Any:
            answer = handler(body)
            if type(answer) is not Later or answer.settled:
                return answer
            activity = self.run.begin("compile", monotonic(), "a program to be compiled")

            def done(error: Any, response: Any) -> None:
                if response is not None:
                    made = response.compile_response.loaded_executable_handle
                    self._compiled(activity, tables.programs.get(made))
                self.run.end(activity, monotonic(), failed=error is not None)

            answer.watch(done)
            return answer

        return compile_request

    def _compiled(self, activity: Activity, program: Any) -> None:
        if isinstance(program, Executable):
            activity.what = f"{program.name} to be compiled"
            activity.small = self._known(program).small
            self._uses(program.placement.slices, activity.began)

    def _known(self, program: Executable) -> Program:
        if program.known is None:
            size = sum(_bytes(kind, shape) for kind, shape, _ in program.outputs)
            small = len(program.placement.slices) == 1 and size <= SMALL_BYTES
            weight = len(program.compiled["blob"])
            program.known = self.run.steps.program(program.name, weight, small)
        return program.known

    def _around_execute(self, handler: Handler, tables: Tables) -> Handler:
        run, buffers, programs = self.run, self._buffers, tables.programs

        def loaded_executable_execute_request(body: Any) -> Any:
            program = programs.get(body.loaded_executable_handle)
            before = buffers.latest
            answer = handler(body)
            if type(program) is Executable:
                now = monotonic()
                self._before_launch = before
                if run.returned:
                    self._uses(program.placement.slices, now)
                stamp = body.execute_options.execution_stream_id
                known, step = program.known or self._known(program), step_of(stamp)
                is_step = run.launched(known, now, step, expected=is_expected(stamp))
                if run.event is not None:
                    self._follow_launch(program, is_step, now, tables, _results(body, answer))
            elif type(program) is Digests and program.copies:
                self._saves(tables.arrays.get(_results(body, answer)[0]))
            elif type(program) is Reshard:
                self._moved(tables, body.args_handles, _results(body, answer))
            return answer

        return loaded_executable_execute_request

    def _saves(self, hashes: Any) -> None:
        """Arrays are copied for a snapshot; it is complete when the hashes of the copies are there."""
        origin = hashes.origin() if isinstance(hashes, Array) else None
        if origin is not None:
            self._hashes = origin.aid
            self.run.steps.begin_save()

    def _follow_launch(
        self, program: Executable, is_step: bool, now: float, tables: Tables, results: Iterable[int]
    ) -> None:
        kind: Kind = "step" if is_step else "run"
        slices = program.placement.slices
        small = self._known(program).small
        self._follow(kind, now, tables, results, program.name, slices, small=small)

    # --- what is waited for ---

    def _around_check(self, handler: Handler, tables: Tables) -> Handler:
        arrays = tables.arrays

        def check_value_ready_request(body: Any) -> Any:
            answer = handler(body)
            handles = body.value_handles
            return self._waits(answer, arrays.get(handles[-1]) if handles else None)

        return check_value_ready_request

    def _around_get(self, handler: Handler, tables: Tables) -> Handler:
        arrays = tables.arrays

        def copy_to_host_buffer_request(body: Any) -> Any:
            return self._waits(handler(body), arrays.get(body.array_handle))

        return copy_to_host_buffer_request

    def _waits(self, answer: Any, array: Any) -> Any:
        if type(answer) is not Later or answer.settled or type(array) is not Array:
            return answer
        origin = array.origin()
        if origin is None:
            return answer
        saves = array.sharding.memory_kind == _PINNED or origin.aid == self._hashes
        return self._wait(answer, origin.aid, origin.placement.slices, saves)

    def _wait(self, answer: Later, aid: int, slices: tuple[int, ...], saves: bool) -> Later:
        run, saving = self.run, self.run.steps.saving if saves else None
        kind: Kind = "snapshot" if saves and run.event is None else "wait"
        activity = run.begin(kind, monotonic(), slices=slices)

        def done(error: Any, _: Any) -> None:
            failed = error is not None
            if saving is not None and not failed:
                run.steps.saved(saving)
            latest = aid > self._before_launch
            run.waited(activity, monotonic(), failed=failed, for_all=latest)

        answer.watch(done)
        return answer

    def _around_fetch(self, handler: Handler, tables: Tables) -> Handler:
        def loaded_executable_fetch_execute_result_request(body: Any) -> Any:
            status = tables.statuses.get(body.result_status_handle)
            answer = handler(body)
            if type(answer) is not Later or answer.settled or not isinstance(status, list):
                return answer
            if not status:
                return answer
            buffer, _ = status[0]
            return self._wait(answer, buffer.aid, buffer.placement.slices, saves=False)

        return loaded_executable_fetch_execute_result_request

    # --- arrays that move ---

    def _around_put(self, handler: Handler, tables: Tables) -> Handler:
        def make_array_request(body: Any) -> Any:
            if self.run.event is None:
                return handler(body)
            began = monotonic()
            answer = handler(body)
            if answer is not None:
                given = getattr(body, "array_handles", None) or (body.array_handle,)
                arrays = [tables.arrays.get(handle) for handle in given]
                small = self._is_small([one for one in arrays if isinstance(one, Array)])
                self._follow(
                    "transfer", began, tables, given, "an array from the client", small=small
                )
            return answer

        return make_array_request

    def _is_small(self, arrays: Sequence[Array]) -> bool:
        slices = {index for array in arrays for index in self._slices(array)}
        size = sum(_bytes(array.kind, array.shape) for array in arrays)
        return len(slices) == 1 and size <= SMALL_BYTES

    def _around_move(self, handler: Handler, tables: Tables) -> Handler:
        def move_request(body: Any) -> Any:
            answer = handler(body)
            self._moved(tables, body.array_handles, body.result_handles)
            return answer

        return move_request

    def _moved(self, tables: Tables, sources: Any, results: Any) -> None:
        """Arrays are on their way: to host memory for a snapshot, back from it, or elsewhere."""
        if not len(sources) or not len(results):
            return
        source, result = tables.arrays.get(sources[0]), tables.arrays.get(results[0])
        if not isinstance(source, Array) or not isinstance(result, Array):
            return
        pinned = source.sharding.memory_kind == _PINNED
        if result.sharding.memory_kind == _PINNED and not pinned:
            self.run.steps.begin_save()
            return
        if not self.run.returned and self.run.event is None:
            return
        targets, origins = self._slices(result), self._slices(source)
        now = monotonic()
        self._uses(targets | origins, now)
        if self.run.event is not None and (pinned or targets != origins):
            kind: Kind = "load" if pinned else "reshard"
            self._follow(kind, now, tables, results, "arrays to be moved")

    def _slices(self, array: Array) -> set[int]:
        return {self._buffers.topology.slice_of(device) for device in array.sharding.devices}

    # --- elastic events ---

    def _uses(self, slices: Iterable[int], since: float) -> None:
        slices = tuple(slices)
        if self.run.returned and len(slices) > 1:
            self.run.uses(slices, since, monotonic())

    def _follow(
        self,
        kind: Kind,
        began: float,
        tables: Tables,
        results: Iterable[int],
        what: str,
        slices: tuple[int, ...] = (),
        *,
        small: bool = False,
    ) -> None:
        """Has the hosts asked when these arrays are there."""
        activity = self.run.begin(kind, began, what, slices, small=small)
        pieces: list[Piece] = []
        for handle in results:
            array = tables.arrays.get(handle)
            if not isinstance(array, Array):
                self.run.end(activity, monotonic(), failed=True)
                return
            if not array.deleted:
                pieces += array.pieces()

        def done(error: Any, _: Any) -> None:
            self.run.end(activity, monotonic(), failed=error is not None)

        self._transfers.ready(pieces, done)


def _bytes(kind: int, shape: Sequence[int]) -> int:
    return math.prod(shape) * (layout_bits(kind) or _BITS) // 8


def _results(body: Any, answer: Any) -> list[int]:
    given = body.result_array_handle
    if given:
        return list(given)
    outputs = answer.loaded_executable_execute_response.outputs
    return [output.array_handle for output in outputs]
