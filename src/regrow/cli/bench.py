"""`regrow bench`: shardings, and the network between slices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from regrow.cli.report import count, say
from regrow.errors import RegrowError
from regrow.planning.mesh import AXES, Degrees

_NETWORKS: Final = {"ici": "within a slice", "dcn": "across slices"}
_KINDS: Final = {"data": "Data", "fsdp": "FSDP", "tensor": "Tensor"}
_WHATEVER_IS_LEFT: Final = ("ici_fsdp", "dcn_data")


@click.group("bench")
def command() -> None:
    """Time shardings, and the network between slices, on the devices that JAX has.

    Under `regrow run` those are the devices of all slices, as in

        regrow run -- regrow bench shardings --batch_size 1024 --embedding_dimension 256
    """


def _degrees(function: Callable[..., Any]) -> Callable[..., Any]:
    for network, where in reversed(_NETWORKS.items()):
        for axis in reversed(AXES):
            name = f"{network}_{axis}_parallelism"
            left = f"{network}_{axis}" in _WHATEVER_IS_LEFT
            function = click.option(
                f"--{name}",
                f"--{name.replace('_', '-')}",
                name,
                type=int,
                default=None if left else 1,
                metavar="N",
                help=f"{_KINDS[axis]} parallelism {where}.  "
                f"[default: {'whatever is left' if left else 1}]",
            )(function)
    return function


_steps = click.option(
    "--steps", type=click.IntRange(min=1), default=5, show_default=True, help="How many are timed."
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print it for programs.")


@command.command("shardings", short_help="Train dense layers with a sharding.")
@_degrees
@click.option(
    "--batch_size",
    "--batch-size",
    type=int,
    default=131072,
    show_default=True,
    help="Rows a device.",
)
@click.option(
    "--embedding_dimension", "--embedding-dimension", type=int, default=2048, show_default=True
)
@click.option("--num_layers", "--num-layers", type=int, default=4, show_default=True)
@click.option("--peak-tflops", type=float, help="Peak of a device, where it is not known.")
@click.option(
    "--profiler_path",
    "--profiler-path",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write a profile of the steps there.",
)
@_steps
@_as_json
def shardings(
    batch_size: int,
    embedding_dimension: int,
    num_layers: int,
    peak_tflops: float | None,
    profiler_path: str | None,
    steps: int,
    as_json: bool,
    **degrees: int | None,
) -> None:
    """Train a stack of dense layers with a sharding, and tell the speed.

    The products of the ici_ and of the dcn_ degrees must be the number of devices of a slice, and of
    slices. The model and the count of FLOP are those of the Multislice page.
    """
    from regrow.planning.shardings import Benchmark, Workload

    ici, dcn = (
        Degrees(*(degrees[f"{network}_{axis}_parallelism"] for axis in AXES))
        for network in _NETWORKS
    )
    workload = Workload(batch_size, embedding_dimension, num_layers)
    with _jax() as leads:
        benchmark = Benchmark(workload, ici, dcn)
        if leads:
            for caution in benchmark.cautions:
                say(caution)
        if leads and not as_json:
            for line in _before(benchmark):
                click.echo(line)
        result = benchmark.run(
            steps,
            peak_flops_per_s=None if peak_tflops is None else peak_tflops * 1e12,
            profiler_path=profiler_path,
        )
    if leads and as_json:
        told = dataclasses.asdict(result) | {
            "parameters": workload.parameters,
            "memory_bytes": benchmark.memory.total_bytes,
            "device_flop": workload.device_flop,
            "step_s": result.step_s,
            "flops_per_s": result.flops_per_s,
            "share_of_peak": result.share_of_peak,
        }
        click.echo(json.dumps(told, indent=1))
    elif leads:
        _print_result(result)


def _before(benchmark: Any) -> Iterator[str]:
    slices, per_slice = benchmark.shape
    workload, mesh = benchmark.workload, benchmark.mesh
    memory = benchmark.memory
    sizes = " x ".join(
        f"{axis} {inner * outer}"
        for axis, inner, outer in zip(AXES, mesh.ici, mesh.dcn, strict=True)
    )
    yield (
        f"mesh: {sizes} over {count(slices, 'slice')} of {count(per_slice, 'device')} "
        f"({benchmark.device_kind}); ici {mesh.ici}, dcn {mesh.dcn}"
    )
    yield (
        f"memory estimate: {memory.total_bytes / 1e9:.3g} GB a device "
        f"({memory.state_bytes / 1e9:.3g} weights and gradients, {memory.activation_bytes / 1e9:.3g} "
        f"activations); {workload.parameters:,} parameters"
    )


def _print_result(result: Any) -> None:
    times = ", ".join(f"{one:.4f}" for one in result.times_s)
    click.echo(f"average time: {result.step_s:.4f} s, timings (seconds): [{times}]")
    share = (
        f"{result.share_of_peak:.1%} of the peak of {result.peak_flops_per_s / 1e12:g} TFLOP/s"
        if result.share_of_peak is not None
        else f"the peak of a {result.device_kind} device is not known (--peak-tflops)"
    )
    click.echo(
        f"a device: time is {result.step_s:.4f} seconds, "
        f"TFLOP is {result.workload.device_flop / 1e12:.4g}, "
        f"TFLOP/s is {result.flops_per_s / 1e12:.4g}; {share}"
    )


@command.command("dcn", short_help="Time an all-reduce and a backward pass.")
@click.option(
    "--size-mib",
    type=click.FloatRange(min=0, min_open=True),
    default=64.0,
    show_default=True,
    help="Of the array that is reduced, without --function.",
)
@click.option(
    "--function",
    "reference",
    metavar="FILE.py:NAME",
    help="A function (or MODULE:NAME) that, given the devices of a slice, returns loss, parameters "
    "and batch there. The backward pass of loss(parameters, batch) is timed, and an all-reduce of "
    "the size of its gradients.",
)
@_steps
@_as_json
def dcn(size_mib: float, reference: str | None, steps: int, as_json: bool) -> None:
    """Time an all-reduce between slices, and your backward pass, behind which it has to hide."""
    from regrow.planning import dcn as bench
    from regrow.planning.devices import local_slice

    with _jax() as leads:
        passed = None
        size = int(size_mib * 2**20)
        if reference is not None:
            passed = bench.backward(*bench.load(reference, local_slice()), steps)
            size = passed.gradient_bytes
        reduced = bench.all_reduce(size, steps)
    if not leads:
        return
    told: dict[str, Any] = {
        "slices": reduced.slices,
        "array_bytes": reduced.array_bytes,
        "all_reduce_s": reduced.seconds,
        "all_reduce_times_s": reduced.times_s,
        "dcn_gbits_per_slice": reduced.bits_per_s / 1e9,
    }
    lines = [
        f"all-reduce of {reduced.array_bytes / 2**20:.4g} MiB between {reduced.slices} slices: "
        f"{reduced.seconds:.4g} s, the median of {steps}; for a plan: "
        f"--dcn-gbits-per-slice {reduced.bits_per_s / 1e9:.4g}"
    ]
    if passed is not None:
        ratio = bench.headroom(passed, reduced)
        told |= {
            "gradient_bytes": passed.gradient_bytes,
            "backward_s": passed.seconds,
            "backward_times_s": passed.times_s,
            "headroom": ratio,
            "verdict": bench.verdict(ratio),
        }
        lines.append(
            f"backward pass of {reference} on one slice: {passed.seconds:.4g} s, {ratio:.3g} times "
            f"the all-reduce of its gradients: {bench.verdict(ratio)}"
        )
    click.echo(json.dumps(told, indent=1) if as_json else "\n".join(lines))


@contextmanager
def _jax() -> Iterator[bool]:
    """Joins the processes of a run; whether this one speaks for all. JAX's errors become one line."""
    import jax

    from regrow.planning.devices import join_processes

    try:
        join_processes()
        yield jax.process_index() == 0
    except jax.errors.JaxRuntimeError as error:
        text = str(error).splitlines()[0].rstrip(".")
        hint = "; take smaller arrays (see --help)" if "RESOURCE_EXHAUSTED" in text else ""
        raise RegrowError(f"the benchmark failed: {text}{hint}") from error
