"""Hooks that make JAX on a host of the local Cloud TPU find the other hosts, as it does on TPU VMs.

`jax.distributed.initialize()` asks the metadata server of the host, through JAX's own class for TPU
VMs, which by itself is only active where libtpu is. The slices of the devices follow from the numbers
of the processes: the CPU client knows all processes of one machine as one slice (it goes by the
kernel's boot id), whatever JAX is told.

The processes of all slices share the cores. A pool with one thread a core, which is what XLA makes,
can be filled with collectives that wait for each other's other devices, and stand still.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, Final

from regrow.multihost.distributed import start
from regrow.processes import HOSTS_VARIABLE

DETECTION_METHOD: Final = "regrow"
"""What `jax.distributed.initialize(cluster_detection_method=…)` calls it."""

_METADATA_VARIABLE: Final = "GCE_METADATA_IP"
_DEVICES_VARIABLE: Final = "JAX_NUM_CPU_DEVICES"
_POOL_VARIABLE: Final = "NPROC"
_PORT_VARIABLE: Final = "JAX_COORDINATOR_PORT"
_BIND_VARIABLE: Final = "JAX_COORDINATOR_BIND_ADDRESS"


def install() -> None:
    """Puts the hooks into JAX, which has been imported."""
    threads = (os.cpu_count() or 1) + int(os.environ.get(_DEVICES_VARIABLE, "1"))
    os.environ.setdefault(_POOL_VARIABLE, str(threads))
    _add_cluster()
    private: Any = importlib.import_module("jax._src.distributed")
    public: Any = importlib.import_module("jax.distributed")
    private.initialize = public.initialize = _initialize(private.initialize)


def _add_cluster() -> None:
    tpu: Any = importlib.import_module("jax._src.clusters.cloud_tpu_cluster")

    class LocalSlices(tpu.GceTpuCluster):  # type: ignore[misc]
        """The local Cloud TPU, whose metadata servers tell what those of TPU VMs do."""

        name = DETECTION_METHOD

        @classmethod
        def is_env_present(cls) -> bool:
            """Whether this process runs on one of its hosts."""
            return HOSTS_VARIABLE in os.environ and _METADATA_VARIABLE in os.environ

    # Before the rest: the machine itself may be part of, say, a Slurm job.
    known: list[type] = LocalSlices._cluster_types
    known.remove(LocalSlices)
    known.insert(0, LocalSlices)


def _initialize(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> None:
        """As `jax.distributed.initialize`; without arguments it joins all hosts of all slices."""
        start(stock, args, kwargs, {"coordinator_bind_address": _bind_address()})
        _tell_slices(int(os.environ[HOSTS_VARIABLE]))

    return initialize


def _bind_address() -> str | None:
    """Where the coordinator listens if this is its host.

    JAX's own choice, all addresses of the machine, could be used by one Multislice at a time, and
    from other machines.
    """
    if os.environ.get(_BIND_VARIABLE):
        return None
    tpu: Any = importlib.import_module("jax._src.clusters.cloud_tpu_cluster")
    host = os.environ[_METADATA_VARIABLE].partition(":")[0]
    return f"{host}:{os.environ.get(_PORT_VARIABLE) or tpu.coordinator_port}"


def _tell_slices(hosts_per_slice: int) -> None:
    device: Any = importlib.import_module("jax._src.lib")._jax.Device

    def slice_index(self: Any) -> int:
        """The slice that the device belongs to."""
        return int(self.process_index) // hosts_per_slice

    device.slice_index = property(slice_index)
