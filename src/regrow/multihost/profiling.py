"""`jax.profiler` on every host of a multi-controller run, in one folder."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

import jax

from regrow.client.notice import say
from regrow.scratch import scratch

_CHUNK_BYTES: Final = 1 << 20
"""A message of the coordination service; gRPC takes 4 MiB at most."""

_traces: Final = itertools.count()


@contextlib.contextmanager
def trace(
    log_dir: str | os.PathLike[str], *, profiler_options: Any = None, timeout_s: float = 120.0
) -> Iterator[None]:
    """As `jax.profiler.trace`, on all hosts at once: every host has to come here.

    Afterwards process 0 has the traces of all hosts in `log_dir/plugins/profile/TIME/`, named by
    process and slice, as TensorBoard and XProf show one run. The hosts need no common file system: the
    traces travel through JAX's coordination service. A host whose trace does not come in time is named
    on the standard error, and left out.

    Args:
        log_dir: A folder; only process 0's counts.
        profiler_options: `jax.profiler.ProfileOptions`.
        timeout_s: How long process 0 waits for the traces of the others, in seconds, altogether.
    """
    exchange = _Exchange(next(_traces))
    with scratch("trace") as own:
        jax.profiler.start_trace(own, profiler_options=profiler_options)
        try:
            yield
        finally:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        written = b"".join(path.read_bytes() for path in sorted(own.rglob("*.xplane.pb")))
    if jax.process_index() != 0:
        exchange.send(written)
        return
    folder = Path(log_dir) / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _name(0)).write_bytes(written)
    deadline = time.monotonic() + timeout_s
    for process in range(1, jax.process_count()):
        _collect(exchange, process, folder, deadline)


def _collect(exchange: _Exchange, process: int, folder: Path, deadline: float) -> None:
    try:
        data = exchange.receive(process, deadline)
    except (jax.errors.JaxRuntimeError, zlib.error) as error:
        say(f"the trace of process {process} is missing in {folder}: {error}")
        return
    (folder / _name(process)).write_bytes(data)


def _name(process: int) -> str:
    own = (device for device in jax.devices() if device.process_index == process)
    slices = {int(index) for one in own if (index := getattr(one, "slice_index", None)) is not None}
    where = "".join(f"-slice-{index}" for index in sorted(slices))
    return f"process-{process}{where}.xplane.pb"


@final
class _Exchange:
    """Bytes from the other processes to process 0, by the coordination service's table."""

    def __init__(self, number: int) -> None:
        self._prefix = f"regrow/trace/{number}"
        state: Any = importlib.import_module("jax._src.distributed").global_state
        self._client = state.client

    def send(self, data: bytes) -> None:
        """Gives this process's bytes."""
        packed = zlib.compress(data, 1)
        chunks = range(0, len(packed), _CHUNK_BYTES)
        for index, begin in enumerate(chunks):
            key = self._key(jax.process_index(), str(index))
            self._client.key_value_set_bytes(key, packed[begin : begin + _CHUNK_BYTES])
        # Last, so that whoever sees it finds the rest.
        key = self._key(jax.process_index(), "chunks")
        self._client.key_value_set_bytes(key, str(len(chunks)).encode())

    def receive(self, process: int, deadline: float) -> bytes:
        """Takes another process's bytes.

        Raises:
            jax.errors.JaxRuntimeError: They have not come in time.
        """
        chunks = int(self._get(self._key(process, "chunks"), deadline))
        packed = [self._get(self._key(process, str(index)), deadline) for index in range(chunks)]
        self._client.key_value_delete(self._key(process, ""))
        return zlib.decompress(b"".join(packed))

    def _get(self, key: str, deadline: float) -> bytes:
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        data: bytes = self._client.blocking_key_value_get_bytes(key, left_ms)
        return data

    def _key(self, process: int, what: str) -> str:
        return f"{self._prefix}/{process}/{what}"
