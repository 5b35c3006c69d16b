"""What is compiled, and what is traced, when slices go and come back; all of it counted."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import run_cases
from elastic_rig import SLICES, case, control, kill, logged, mesh_of, restore, there
from jax import monitoring
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from regrow.elastic import at_step, manager
from regrow.errors import UsageError

ROWS = 12
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "asked",
}
_counted: Counter[tuple[int, str]] = Counter()


def _listen(event: str, _duration: float, **_: Any) -> None:
    if event in EVENTS:
        _counted[threading.get_ident(), EVENTS[event]] += 1


monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """What this thread traces, lowers and asks for meanwhile, and what the server compiles."""
    mine, found = threading.get_ident(), Counter[str]()
    before, compiled = Counter(_counted), control("status")["compiled"]
    yield found
    found.update({name: n for (who, name), n in (_counted - before).items() if who == mine})
    found["compiled"] = control("status")["compiled"] - compiled


def program(devices: list[jax.Device], layers: int) -> Any:
    """A step that a new function is traced for each time, as scripts do that make it for a mesh."""
    mesh = mesh_of(*sorted({device.slice_index for device in devices}))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(layers):
            x = jnp.tanh(x @ w)
        return w - 0.1 * x.mean(), x.mean()

    w = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((ROWS, 8), np.float32, sharding=rows)
    return jax.jit(step, out_shardings=(whole, whole)).lower(w, x).compile()


def arguments(*slices: int) -> tuple[jax.Array, jax.Array]:
    mesh = mesh_of(*slices)
    rows = np.ones((ROWS, 8), np.float32)
    return there(np.eye(8, dtype=np.float32), mesh), there(rows, mesh, "replica")


@case
def the_loss_of_a_slice_finds_its_program_compiled_and_traced() -> None:
    made = manager.Manager()
    steps = made.compile_ahead(lambda devices: program(devices, 3))
    costs: list[Counter[str]] = []

    @made.elastic_retry(minimum_slice_count=1, poll_interval=60)
    def train() -> None:
        active = sorted(made.active_slice_indices)
        arrays = arguments(*active)
        with counting() as cost:
            step = steps()
            w, loss = step(*arrays)
            loss.block_until_ready()
        costs.append(cost)
        for number in range(3):
            at_step(number)
            w, loss = step(w, arrays[1])
            loss.block_until_ready()
        if len(active) == SLICES:
            assert steps.wait(60)
            kill(1)
            step(w, arrays[1])[1].block_until_ready()

    with counting() as all_of_it:
        train()
    assert costs[0]["compiled"] == 1
    assert costs[0]["traced"]
    assert costs[1] == Counter(compiled=0)
    # All sets of one slice fewer were one compilation.
    pairs = [frozenset(range(SLICES)) - {index} for index in range(SLICES)]
    assert steps.made.issuperset(pairs)
    assert steps.wait(60)
    assert all_of_it["compiled"] <= 2 + 1  # one slice fewer again, after the loss
    event = control("timeline")["events"][-1]
    assert not event["programs"].get("compiled"), event["programs"]


@case
def a_count_that_was_seen_is_traced_at_most() -> None:
    made = manager.Manager()
    steps = made.compile_ahead(lambda devices: program(devices, 4), sets=0)
    with counting() as first:
        steps({0, 1})
    assert first["compiled"] == 1
    with counting() as other:
        other_pair = steps({0, 2})
    assert other["compiled"] == 0
    assert other["lowered"] == 1
    with counting() as again:
        assert steps({2, 0}) is other_pair
    assert again == Counter(compiled=0)
    # From elsewhere in the script, and by a function of its own.
    with counting() as elsewhere:
        program(
            [d for index in (1, 2) for d in made.slice_to_devices[index]],
            4,
        )
    assert elsewhere["lowered"] == 1
    assert elsewhere["compiled"] == 0


@case
def a_slice_that_returns_costs_nothing() -> None:
    made = manager.Manager()
    steps = made.compile_ahead(lambda devices: program(devices, 5))
    arrays = arguments(*range(SLICES))
    steps(range(SLICES))(*arrays)[1].block_until_ready()  # type: ignore[arg-type]
    steps({0, 1})(*arguments(0, 1))[1].block_until_ready()
    kill(2)
    restore(2)
    control("wait_healthy")
    with counting() as cost:
        arrays = arguments(*range(SLICES))
        assert float(steps(frozenset(range(SLICES)))(*arrays)[1]) != 0
    assert cost == Counter(compiled=0)


@case
def what_is_made_in_the_background_is_not_made_twice() -> None:
    made = manager.Manager()
    entered, go, calls = threading.Event(), threading.Event(), Counter[int]()

    def build(devices: list[jax.Device]) -> int:
        slices = {device.slice_index for device in devices}
        calls[len(slices)] += 1
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go.wait(30)
        return len(slices)

    steps = made.compile_ahead(build, sets=1)
    assert steps() == SLICES
    steps.begin()
    steps.begin()
    assert entered.wait(30)
    threading.Timer(0.2, go.set).start()
    assert steps(set(range(SLICES - 1))) == SLICES - 1
    assert steps.wait(30)
    assert calls == {SLICES: 1, SLICES - 1: 1}


@case
def what_fails_in_the_background_fails_where_it_is_needed() -> None:
    made = manager.Manager()

    def build(devices: list[jax.Device]) -> int:
        if len({device.slice_index for device in devices}) < SLICES:
            raise KeyError("mine")
        return 1

    steps = made.compile_ahead(build)
    with logged() as log:
        steps()
        steps.begin()
        assert steps.wait(30)
    assert "the programs for slices [0, 1] could not be made" in log.text
    assert steps.made == {frozenset(range(SLICES))}
    with pytest.raises(KeyError, match="mine"):
        steps({0, 1})


@case
def what_cannot_be_compiled_for() -> None:
    made = manager.Manager()
    steps = made.compile_ahead(lambda devices: 0)
    for slices, text in (({7}, r"there are no slices \[7\]"), (set(), "no slices in an empty")):
        with pytest.raises(UsageError, match=text):
            steps(slices)


@case
def the_next_run_finds_it_on_disk() -> str:
    made = manager.Manager()
    steps = made.compile_ahead(lambda devices: program(devices, 6))
    steps()
    steps.begin()
    assert steps.wait(60)
    status = control("status")
    return json.dumps({name: status[name] for name in ("compiled", "compiled_from_disk")})


if __name__ == "__main__":
    sys.exit(run_cases())
