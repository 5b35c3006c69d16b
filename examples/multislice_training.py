r"""Training on every host of a Multislice: data parallel over slices, FSDP within, checkpoints.

As the startup script of a queued resource it survives whatever ends its slices: automatic repair runs
it again on every host, and it goes on from the last checkpoint (docs/multihost.md):

    regrow queued-resources create q --node-count 2 --accelerator-type v4-8 --spot \
      --runtime-version tpu-ubuntu2204-base --metadata \
      startup-script="until python $PWD/examples/multislice_training.py --out $PWD/out; do sleep 1; done"

Every host runs this same program. `--out` has to be one folder for all of them. The model is in
`byte_model.py`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from byte_model import ModelSize, StandardLibrary, init_params, loss_fn
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regrow import multihost

PyTree = Any
OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Settings:
    """What the command line decides."""

    steps: int
    checkpoint_every: int
    batch: int
    out: Path
    size: ModelSize
    step_deadline_s: float


def create_mesh() -> Mesh:
    """Axis "data" runs over the slices, "fsdp" over the chips of each."""
    devices = jax.devices()
    slices = len({device.slice_index for device in devices})
    chips = len(devices) // slices
    hybrid = mesh_utils.create_hybrid_device_mesh((1, chips), (slices, 1))
    return Mesh(hybrid, ("data", "fsdp"))


def sharding_of(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Splits the largest axis that can be split over the chips of a slice; each slice has it all."""
    chips = mesh.shape["fsdp"]
    axes = [axis for axis, size in enumerate(leaf.shape) if size % chips == 0 and size > 1]
    spec: list[str | None] = [None] * len(leaf.shape)
    if axes:
        spec[max(axes, key=lambda axis: leaf.shape[axis])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*spec))


def init_state(mesh: Mesh, size: ModelSize) -> PyTree:
    """The first training state; each host makes its part of it."""

    def spread(leaf: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding_of(mesh, leaf), leaf.__getitem__)

    params = jax.tree.map(spread, init_params(size))
    abstract = jax.eval_shape(OPTIMIZER.init, params)
    shardings = jax.tree.map(lambda leaf: sharding_of(mesh, leaf), abstract)
    return {"params": params, "optimizer": jax.jit(OPTIMIZER.init, out_shardings=shardings)(params)}


def make_train_step(mesh: Mesh, state: PyTree) -> Any:
    """The compiled step; the sharding of the state makes XLA gather and scatter the weights."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

    def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, loss

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(train_step, out_shardings=(shardings, everywhere), donate_argnums=0)


def make_loader(mesh: Mesh, settings: Settings) -> multihost.HostLoader:
    """Shuffled batches without end, of which each host reads what its chips need."""
    windows = grain.MapDataset.source(StandardLibrary(settings.size.context + 1))
    by_chip = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    data = windows.seed(0).shuffle().repeat()
    return multihost.HostLoader(data, settings.batch, by_chip, read_options=options)


def restore(manager: ocp.CheckpointManager, state: PyTree, loader: Any) -> tuple[PyTree, int]:
    """The state and the step that come next: the first ones, or those after the last checkpoint."""
    step = manager.latest_step()
    if step is None:
        return state, 0
    restored = manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()),
    )
    loader.set_state(restored["data"])
    tell(f"going on after step {step}, from its checkpoint")
    return restored["state"], step + 1


def train(settings: Settings, manager: ocp.CheckpointManager) -> None:
    """Trains to the last step."""
    mesh = create_mesh()
    loader = make_loader(mesh, settings)
    state, first = restore(manager, init_state(mesh, settings.size), loader)
    train_step = make_train_step(mesh, state)
    with multihost.StepDeadline(settings.step_deadline_s, first_s=900) as deadline:
        for step in range(first, settings.steps):
            deadline.begin(f"step {step}")
            state, loss = train_step(state, next(loader))
            record(settings.out, step, float(loss))
            last = step == settings.steps - 1
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(loader.get_state()),
                ),
                force=last and manager.latest_step() != step,
            )
        deadline.begin("the last checkpoint")
        manager.wait_until_finished()
    loader.close()


def record(out: Path, step: int, loss: float) -> None:
    """Shows the loss and keeps it, to the last bit."""
    tell(f"step {step} loss {loss:.4f}")
    if jax.process_index() == 0:
        with (out / "losses.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")


def tell(text: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def parse_arguments() -> Settings:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains a byte-level transformer on a Multislice.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="in steps")
    parser.add_argument("--batch", type=int, default=32, help="records, over all slices")
    parser.add_argument("--layers", type=int, default=ModelSize.layers)
    parser.add_argument("--width", type=int, default=ModelSize.width)
    parser.add_argument("--context", type=int, default=ModelSize.context)
    parser.add_argument("--step-deadline", type=float, default=300, help="in seconds")
    parser.add_argument("--out", type=Path, required=True, help="a folder that all hosts share")
    given = parser.parse_args()
    size = ModelSize(given.layers, given.width, 4, given.context)
    out = given.out.resolve()
    return Settings(
        given.steps, given.checkpoint_every, given.batch, out, size, given.step_deadline
    )


def main() -> None:
    """Joins the other hosts and trains."""
    settings = parse_arguments()
    multihost.initialize()
    tell(f"{jax.device_count()} devices on {jax.process_count()} hosts")
    settings.out.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=settings.checkpoint_every, max_to_keep=2
    )
    with ocp.CheckpointManager(settings.out / "checkpoints", options=options) as manager:
        train(settings, manager)
    tell("all steps are done")


if __name__ == "__main__":
    main()
