"""The compiler: a process beside the slices that turns programs into blobs which any host loads.

It owns as many CPU devices as the cluster but no arrays and no place in any gang, so a program that
crashes XLA's compiler takes no slice along, and a slice that dies takes no compilation along. A blob
depends on the program and the number of its devices, not on which they are: a mesh of the same shape
on other slices loads the same blob.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, final

from jaxlib import xla_client as xc

from regrow.channel import commands as c
from regrow.channel import rgcb
from regrow.errors import Code, StatusError
from regrow.wire.status import from_exception
from regrow.worker.callbacks import CallbackRelay, user_error
from regrow.worker.custom_calls import custom_calls, refuse_pointers
from regrow.worker.modules import Signature, identity, parse_module
from regrow.worker.partitioning import RemotePartitioning
from regrow.worker.platform import make_home_client
from regrow.worker.programs import compile_options

log = logging.getLogger(__name__)

_THREADS: Final = 2
_KEPT: Final = 256
# A combined all-reduce that fails in one rank makes gloo abort the others; see `regrow.worker.gang`.
_PASSES_OFF: Final = "cpu-all-reduce-combiner"


@final
class Compiler:
    """Answers `Compile`, `Identify` and `Describe`, several at a time."""

    def __init__(self, devices: int) -> None:
        self._client = make_home_client(devices)
        self._devices = tuple(self._client.local_devices())
        self._done = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")
        # What may be found in a cache must not wait for what is being compiled.
        self._identifying = ThreadPoolExecutor(1, thread_name_prefix="identify")
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._sender: Any = None
        self._stopped = threading.Event()
        self._relay = CallbackRelay(self._ask_client, lambda nonce, token: None)
        self._partitioning = RemotePartitioning(self._relay)

    def connect(self, sender: Any) -> None:
        """Names the channel that reports go to."""
        self._sender = sender

    def on_payload(self, payload: bytes | memoryview) -> None:
        """Takes one payload from the head; the reader's thread."""
        for command in c.unpack(payload):
            if isinstance(command, c.Ping):
                self.report(c.Pong(command.number, 0))
            elif isinstance(command, c.Exit):
                self.stop()
            elif isinstance(command, c.CallbackResult):
                self._relay.answered(command.call, command.answer)
            elif isinstance(command, c.Compile) and rgcb.partitioning_of(command.program):
                # It may wait for compilations that its client asks for meanwhile.
                threading.Thread(target=self._answer, args=(command,), daemon=True).start()
            elif isinstance(command, c.Identify):
                self._identifying.submit(self._answer, command)
            else:
                self._pool.submit(self._answer, command)

    def run(self) -> None:
        """Waits until the end; the main thread."""
        self._stopped.wait()

    def work_done(self) -> int:
        """How many questions were answered; any thread."""
        return self._done

    def stop(self) -> None:
        """Makes `run` return."""
        self._stopped.set()

    def report(self, *reports: Any) -> None:
        """Sends reports to the head; any thread."""
        self._sender.send(c.pack_all(reports))

    def _answer(self, command: c.Compile | c.Identify | c.Describe) -> None:
        try:
            answer: Any
            match command:
                case c.Compile():
                    answer = self._compile(command)
                case c.Identify():
                    answer = identity(command.program)
                case c.Describe():
                    answer = self._describe(command)
        except Exception as error:  # noqa: BLE001 - told to the client
            status = error if isinstance(error, StatusError) else user_error(error)
            status = status or from_exception(error)
            self.report(c.Failed(command.rid, int(status.code), status.message, 0))
        else:
            self.report(c.Reply(command.rid, answer))
        finally:
            self._done += 1

    def _compile(self, command: c.Compile) -> dict[str, Any]:
        module = parse_module(command.program)
        calls = custom_calls(module)
        refuse_pointers(calls, command.callbacks)
        signature = Signature(module)
        options = self._options(command.options)
        if command.spans:
            debug = options.executable_build_options.debug_options
            passes = [debug.xla_disable_hlo_passes] if debug.xla_disable_hlo_passes else []
            debug.xla_disable_hlo_passes = ",".join([*passes, _PASSES_OFF])
        client = rgcb.partitioning_of(command.program)
        with self._partitioning.taking_part(client, calls, command.callbacks):
            loaded = self._load(command, module, options)
        blob = b"" if command.callbacks else self._client.serialize_executable(loaded)
        with self._lock:
            self._kept[command.key] = loaded
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return {"blob": blob, **_facts(signature, loaded)}

    def _load(self, command: c.Compile, module: Any, options: Any) -> Any:
        count = options.num_replicas * options.num_partitions
        devices = xc.DeviceList(self._devices[:count])
        if not command.callbacks and not rgcb.partitioning_of(command.program):
            return self._client.compile_and_load(command.program, devices, options)
        with module.context:
            return self._client.compile_and_load(
                module, devices, options, host_callbacks=[_never_called] * command.callbacks
            )

    def _ask_client(self, call: int, nonce: str, token: int, index: int, payload: bytes) -> None:
        self.report(c.Callback(call, nonce, token, index, payload))

    def _options(self, serialized: bytes) -> Any:
        options = xc.CompileOptions.ParseFromString(serialized)
        count = options.num_replicas * options.num_partitions
        if not 0 < count <= len(self._devices):
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"the program is for {count} devices; the cluster has {len(self._devices)}",
            )
        ids = [device.id for device in self._devices[:count]]
        return compile_options(serialized, options.num_replicas, ids)

    def _describe(self, command: c.Describe) -> Any:
        with self._lock:
            loaded = self._kept.get(command.key)
        if loaded is None:
            devices = xc.DeviceList(self._devices[: command.devices])
            options = self._options(command.options)
            loaded = self._client.deserialize_executable(command.blob, devices, options)
        if command.what == "text":
            return loaded.get_hlo_text()
        return {
            key: value
            for key, value in loaded.cost_analysis().items()
            if isinstance(value, int | float | str)
        }


def _never_called(*_: Any) -> Any:
    raise RuntimeError("the compiler runs no programs")


def _facts(signature: Signature, loaded: Any) -> dict[str, Any]:
    fingerprint = loaded.fingerprint
    return {
        "name": signature.name,
        "inputs": signature.inputs,
        "outputs": signature.outputs,
        "donated": signature.donated,
        "parameter_shardings": _shardings(loaded.get_parameter_shardings()),
        "output_shardings": _shardings(loaded.get_output_shardings()),
        "parameter_layouts": _layouts(loaded.get_parameter_layouts),
        "output_layouts": _layouts(loaded.get_output_layouts),
        "memory_kinds": [list(kinds) for kinds in loaded.get_output_memory_kinds()],
        "fingerprint": fingerprint if isinstance(fingerprint, bytes) else str(fingerprint).encode(),
        "code_bytes": loaded.size_of_generated_code_in_bytes(),
        "memory": _memory(loaded),
    }


def _shardings(shardings: Any) -> list[bytes] | None:
    if shardings is None:
        return None
    return [
        # v3 shardings crash older clients; both spellings exist in every supported jaxlib.
        s.SerializeToString() if hasattr(s, "SerializeToString") else s.__getstate__()[0]
        for s in shardings
    ]


def _layouts(get: Any) -> list[list[int]] | None:
    try:
        layouts = get()
    except Exception as error:  # noqa: BLE001 - jaxlib 0.10 has none for token parameters
        log.debug("no layouts: %s", error)
        return None
    return [list(layout._xla_layout().minor_to_major()) for layout in layouts]


def _memory(loaded: Any) -> dict[str, int] | None:
    try:
        stats = loaded.get_compiled_memory_stats()
    except Exception as error:  # noqa: BLE001 - not every executable has them
        log.debug("no memory statistics: %s", error)
        return None
    return {
        name: value
        for name in dir(stats)
        if name.endswith("in_bytes") and isinstance(value := getattr(stats, name), int)
    }
