"""A client with a state of many kinds, that works and tells what its state is, a line at a time.

Stock JAX: it knows nothing of suspensions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


class Job:
    """The state, and a training step on it."""

    def __init__(self) -> None:
        devices = jax.devices()
        slices = len({device.slice_index for device in devices})
        self.mesh = Mesh(np.array(devices).reshape(slices, -1), ("replica", "model"))
        self.step_of = jax.jit(_step, donate_argnums=0)
        self.calls: list[int] = []
        self.begin()

    def put(self, value: Any, spec: P, kind: str = "device") -> jax.Array:
        return jax.device_put(value, NamedSharding(self.mesh, spec, memory_kind=kind))

    def begin(self) -> int:
        """A new state."""
        self.bad: Any = None
        draw = np.random.default_rng(7)
        wide = draw.standard_normal((64, 96)).astype(np.float32)
        last = jax.devices()[-1]
        self.state = {
            "w": self.put(wide, P(None, "model")),
            "m": self.put(wide * 0, P("replica", "model")),
            "half": self.put(wide.astype(ml_dtypes.bfloat16), P("model")),
            "count": self.put(np.int32(0), P()),
        }
        whole = self.put(draw.integers(0, 9, (8, 8)), P("replica"))
        self.rest = {
            "pinned": self.put(wide[:8], P("replica"), "pinned_host"),
            "single": jax.device_put(np.arange(5, dtype=np.int8), SingleDeviceSharding(last)),
            "bits": self.put(wide[:8] > 0, P("model")),
            "small": self.put((wide[:8] * 3).astype(jnp.int4), P("model")),
            "empty": self.put(np.zeros((0, 4), np.float32), P()),
            "complex": self.put((wide[:4] + 1j * wide[4:8]).astype(np.complex64), P()),
            "key": jax.device_put(jax.random.key_data(jax.random.key(3)), last),
        }
        self.pieces = [shard.data for shard in whole.addressable_shards]
        del whole
        return 0

    def step(self) -> None:
        self.state = self.step_of(self.state)

    def steps(self, count: int) -> int:
        """Steps that have been taken: one that is still on its way would be suspended before it is."""
        for _ in range(count):
            self.step()
        self.state["count"].block_until_ready()
        return 0

    def digest(self) -> dict[str, str]:
        """What the state is, bit by bit."""
        told = {}
        for name, array in {**self.state, **self.rest}.items():
            value = fetched(array)
            shards = [fetched(shard.data).tobytes() for shard in array.addressable_shards]
            data = value.tobytes() + b"".join(shards) + str(array.sharding.memory_kind).encode()
            told[name] = hashlib.sha256(data).hexdigest()[:16]
        told["pieces"] = ",".join(str(fetched(one).sum()) for one in self.pieces)
        return told

    def callback(self) -> float:
        """A program that calls back here."""
        call = jax.jit(
            lambda x: jax.pure_callback(
                lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
            )
        )
        return float(call(jnp.arange(4.0)).sum())

    def own_error(self) -> str:
        """An array that holds an error of a program, kept for later."""

        def fail(_: Any) -> Any:
            raise ValueError("of my own")

        bad = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
        self.bad = bad(jnp.arange(4.0))
        return self.error()

    def error(self) -> str:
        try:
            np.asarray(self.bad)
        except Exception as error:
            return str(error)
        return "nothing"

    def background(self) -> int:
        """Steps without end, until `foreground`."""
        self.stop = threading.Event()
        self.done = 0

        def work() -> None:
            while not self.stop.is_set():
                self.step()
                self.done += 1
                if self.done % 3 == 0:
                    self.state["count"].block_until_ready()

        self.worker = threading.Thread(target=work)
        self.worker.start()
        return 0

    def foreground(self) -> int:
        """Ends the background; how many steps it made."""
        self.stop.set()
        self.worker.join()
        return self.done

    def colocated(self) -> int:
        """A function of ours on the hosts."""
        from jax.experimental import colocated_python

        mine = colocated_python.colocated_python(lambda x: x + 1)
        cpus = colocated_python.colocated_cpu_devices(jax.devices()[:1])
        x = jax.device_put(np.arange(3), SingleDeviceSharding(cpus[0]))
        return int(np.asarray(mine(x)).sum())


def fetched(array: jax.Array) -> Any:
    """The value as the hosts have it, and not as JAX remembers it."""
    return np.asarray(jax.device_put(array, array.sharding, may_alias=False))


def _step(state: dict[str, Any]) -> dict[str, Any]:
    w, m = state["w"], state["m"]
    gradient = jnp.tanh(w @ w.T @ w * 1e-3) + m.mean() + state["half"].astype(jnp.float32) * 1e-3
    m = 0.9 * m + gradient
    return {
        "w": w - 0.01 * m,
        "m": m,
        "half": (state["half"] + gradient.astype(jnp.bfloat16) * 0.5),
        "count": state["count"] + 1,
    }


def main() -> None:
    job = Job()
    print(json.dumps({"ready": jax.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answer = {"value": getattr(job, name)(**request)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
