"""`regrow plan`: which parallelism to use across slices."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Final

import click

from regrow.cli.report import count
from regrow.errors import UsageError
from regrow.planning import GENERATIONS, Model, Plan, Slices, accelerator, advise, slices_of
from regrow.planning.cost import USABLE_HBM
from regrow.planning.intensity import advised_batch, data_parallel_bits, least_batch
from regrow.planning.model import STATE_BYTES

_SUFFIXES: Final = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_QUANTITY: Final = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)([kmbgt]?)", re.IGNORECASE)
_CUSTOM: Final = ("chips", "peak_tflops", "hbm_gb", "dcn_gbits_per_slice")


def quantity(value: object) -> float:
    """Parses a number such as 350000, 350k, 7B or 1.5e9."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise click.BadParameter(f"{value!r} is no number; write it like 350000, 350k, 7B or 1.5e9")
    number, suffix = match.groups()
    return float(re.sub("[_,]", "", number)) * _SUFFIXES[suffix.lower()]


def _short(number: float) -> str:
    """A large number as `quantity` reads it: 7B."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{suffix}"
    return f"{number:g}"


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        _print_accelerators()
        ctx.exit()


@click.command("plan")
@click.option("--accelerator-type", metavar="TYPE", help="Of each slice, such as v4-128.")
@click.option("--num-slices", type=int, default=1, show_default=True, help="Number of slices.")
@click.option("--parameters", type=quantity, required=True, metavar="N", help="Such as 7B.")
@click.option(
    "--batch-tokens",
    type=quantity,
    required=True,
    metavar="N",
    help="The largest global batch that training bears well, in tokens, such as 4M.",
)
@click.option("--active-parameters", type=quantity, metavar="N", help="That a token meets (MoE).")
@click.option("--num-layers", type=int, help="Layers.  [default: guessed]")
@click.option("--embedding-dimension", type=int, help="Width.  [default: guessed]")
@click.option("--microbatches", type=int, help="Of a pipeline.  [default: 4 a stage, or more]")
@click.option(
    "--gradient-bits", type=float, default=32, show_default=True, help="On the network, each."
)
@click.option(
    "--weight-bits", type=float, default=32, show_default=True, help="On the network, each (FSDP)."
)
@click.option(
    "--state-bytes",
    type=float,
    default=STATE_BYTES,
    show_default=True,
    help="A parameter's weight, gradient and optimizer in memory.",
)
@click.option("--peak-tflops", type=float, help="Of a chip, as measured.  [default: the table's]")
@click.option("--hbm-gb", type=float, help="Of a chip.  [default: the table's]")
@click.option(
    "--dcn-gbits-per-slice",
    type=float,
    help="As `regrow bench dcn` measures it.  [default: the table's]",
)
@click.option("--chips", type=int, help="Of a slice that is no --accelerator-type.")
@click.option(
    "--top", type=click.IntRange(min=1), default=5, show_default=True, help="Show so many."
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it for programs.")
@click.option(
    "--list-accelerators",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Show what is known of each generation.",
)
def command(parameters: float, batch_tokens: float, top: int, as_json: bool, **values: Any) -> int:
    """Rank the ways to split a training over slices, and print the mesh to use.

    The arithmetic is that of the Multislice page: the network between slices must hide behind the
    arithmetic. Times are lower bounds at peak speed, good for comparing. The exit status is 1 if
    nothing fits into memory.
    """
    model = Model(
        parameters,
        values["active_parameters"],
        values["num_layers"],
        values["embedding_dimension"],
        values["gradient_bits"],
        values["weight_bits"],
        values["state_bytes"],
    )
    plan = advise(model, _slices(values), batch_tokens, values["microbatches"])
    if as_json:
        click.echo(json.dumps(as_values(plan), indent=1))
    else:
        _print(plan, top)
    if plan.strategies[0].fits:
        return 0
    click.echo("regrow: nothing fits into memory: take more or larger slices", err=True)
    return 1


def _slices(values: dict[str, Any]) -> Slices:
    tflops, hbm, dcn = (values[name] for name in _CUSTOM[1:])
    peak = None if tflops is None else tflops * 1e12
    hbm_bytes = None if hbm is None else hbm * 1e9
    dcn_bits = None if dcn is None else dcn * 1e9
    if values["accelerator_type"] is not None:
        if values["chips"] is not None:
            raise UsageError(
                "--chips is for slices that are no --accelerator-type; give one of them"
            )
        return slices_of(
            accelerator(values["accelerator_type"]),
            values["num_slices"],
            flops_per_s=peak,
            hbm_bytes=hbm_bytes,
            dcn_bits_per_s=dcn_bits,
        )
    missing = [f"--{name.replace('_', '-')}" for name in _CUSTOM if values[name] is None]
    if missing:
        raise UsageError(f"give --accelerator-type, or all that makes a slice: {' '.join(missing)}")
    chips = values["chips"]
    if chips < 1:
        raise UsageError(f"--chips is {chips}; it must be at least 1")
    return Slices(values["num_slices"], chips, chips, tflops * 1e12, hbm * 1e9, dcn * 1e9 / chips)


def as_values(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values; what is infinite is None."""
    return {
        "model": dataclasses.asdict(plan.model),
        "slices": {name: _finite(value) for name, value in dataclasses.asdict(plan.slices).items()},
        "batch_tokens": plan.batch_tokens,
        "slice_tokens": plan.slice_tokens,
        "hardware_flop_per_bit": plan.slices.intensity,
        "least_slice_tokens": plan.least_slice_tokens,
        "advised_slice_tokens": plan.advised_slice_tokens,
        "batch_instead_tokens": plan.batch_instead,
        "strategies": [
            {
                "name": one.name,
                "fits": one.fits,
                "relative": one.relative,
                "step_s": one.cost.step_s,
                "network": one.cost.network,
                "headroom": _finite(one.cost.headroom),
                "memory_bytes": one.cost.memory_bytes,
                **dataclasses.asdict(one.cost),
                "axes": one.mesh.axes,
                "mesh_shape": one.mesh.mesh_shape,
                "dcn_mesh_shape": one.mesh.dcn_mesh_shape,
                "reasons": one.reasons,
            }
            for one in plan.strategies
        ],
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


def _print(plan: Plan, top: int) -> None:
    for line in _head(plan):
        click.echo(line)
    click.echo()
    usable_gb = USABLE_HBM * plan.slices.hbm_bytes / 1e9
    click.echo(f"   {'strategy':<32} {'step':>9}  {'network':<8} {'memory a chip':>16}")
    for rank, one in enumerate(plan.strategies[:top], start=1):
        memory = f"{one.cost.memory_bytes / 1e9:.1f} of {usable_gb:.1f} GB"
        step = f"{one.cost.step_s:.3g} s"
        click.echo(f"{rank:>2} {one.name:<32} {step:>9}  {one.cost.network:<8} {memory:>16}")
        for reason in one.reasons:
            click.echo(f"     - {reason}")
    best = plan.strategies[0].mesh
    click.echo()
    click.echo(f"mesh: {best.code}")
    if best.stages == 1:
        click.echo(f"try:  regrow bench shardings {best.flags}".rstrip())
    if plan.batch_instead is not None:
        click.echo(
            "before a pipeline, see whether training bears a batch of "
            f"{plan.batch_instead:,.0f} tokens: data parallelism would do"
        )


def _head(plan: Plan) -> list[str]:
    slices = plan.slices
    total = slices.slices
    lines = [
        f"{count(total, 'slice')} of {slices.name} ({count(slices.chips, 'chip')}), "
        f"{_short(plan.model.parameters)} parameters, "
        f"{plan.batch_tokens:,.0f} tokens a step: {plan.slice_tokens:,.0f} a slice"
    ]
    if total > 1:
        lines.append(
            f"the hardware does {slices.intensity:,.0f} FLOP in the time of a bit between slices; "
            f"data parallelism hides the network from {plan.least_slice_tokens:,.0f} tokens a slice, "
            f"advised are {plan.advised_slice_tokens:,.0f} ({total * plan.advised_slice_tokens:,.0f} "
            "in all)"
        )
    if plan.model.layers is None or plan.model.embedding is None:
        lines.append(
            f"guessed: {plan.model.depth:.0f} layers, embedding of {plan.model.width:,.0f} "
            "(--num-layers, --embedding-dimension)"
        )
    return lines


def _print_accelerators() -> None:
    click.echo(
        f"{'generation':<10} {'TFLOP/s':>8} {'HBM GB':>7} {'ICI GB/s':>9} {'DCN Gbit/s':>11} "
        f"{'FLOP/bit':>9} {'tokens a slice: least, advised':>31}"
    )
    for one in GENERATIONS.values():
        ici = "?" if one.ici_bytes_per_s is None else f"{one.ici_bytes_per_s / 1e9:.0f}"
        dcn, ratio, batches = "?", "?", "?" if one.multislice else "no Multislice"
        if one.dcn_bits_per_s is not None:
            per_bit = one.dcn_host_chips * one.peak_flops_per_s / one.dcn_bits_per_s
            dcn = f"{one.dcn_bits_per_s / 1e9 / one.dcn_host_chips:g} a chip"
            ratio, batches = f"{per_bit:,.0f}", _batches(per_bit)
        click.echo(
            f"{one.name:<10} {one.peak_flops_per_s / 1e12:>8.0f} {one.hbm_bytes / 1e9:>7.0f} "
            f"{ici:>9} {dcn:>11} {ratio:>9} {batches:>31}"
        )
    click.echo(
        "peaks of a chip, for bfloat16; batches of data parallelism over 2 and over more slices"
    )


def _batches(per_bit: float) -> str:
    leasts = [least_batch(per_bit, data_parallel_bits(slices)) for slices in (2, 3)]
    return ", ".join(
        "-".join(f"{tokens / 1e3:.0f}k" for tokens in tokens_of)
        for tokens_of in (leasts, [advised_batch(least) for least in leasts])
    )
