"""Loading programs, and what can be known of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxlib import xla_client as xc

from regrow.channel import rgcb
from regrow.channel.commands import Load
from regrow.wire.dtypes import TOKEN
from regrow.worker import partitioning
from regrow.worker.callbacks import CallbackRelay, HostCallbacks
from regrow.worker.modules import parse_module
from regrow.worker.platform import Domain


def compile_options(serialized: bytes, replicas: int, ids: Sequence[int]) -> Any:
    """Compile options with a device assignment of PJRT ids, `replicas` rows of partitions."""
    options = xc.CompileOptions.ParseFromString(serialized)
    rows = np.asarray(ids, np.int32).reshape(replicas, -1)
    assignment = xc.DeviceAssignment.create(rows)
    options.device_assignment = assignment
    options.executable_build_options.device_assignment = assignment
    return options


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
            partitioning.silence(module)
            with module.context:
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
