"""Runs the benchmarks and prints their tables.

    python benchmarks/run.py [dispatch] [train] [recovery] [start] [scaling] [first_step] [faults]
        [snapshots] [cycles] [hotswap] [hotswap_load] [ray] [--rounds N] [--quick]

Every figure is compared with plain JAX in the same run, the two taking turns, so that a busy machine
disturbs both alike; quote the ratios. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import faults
import harness

from regrow import LocalCluster

DEVICES = 8
STEP_WIDTHS = {"10 ms": 384, "50 ms": 1152, "200 ms": 2432}


def say(text: str) -> None:
    print(text, flush=True)


def dispatch(rounds: int, quick: bool) -> None:
    """Single operations: one slice of eight devices against one process of eight."""
    extra = ["--quick"] if quick else []
    native, ours = [], []
    with LocalCluster(slices=1, devices_per_slice=DEVICES) as cluster:
        for _ in range(rounds):
            native.append(
                harness.run_program("dispatch.py", harness.native_environ(DEVICES), *extra)
            )
            ours.append(
                harness.run_program("dispatch.py", harness.cluster_environ(cluster.env), *extra)
            )
    plain, through = harness.medians(native), harness.medians(ours)
    rows = []
    for name, value in plain.items():
        ratio = through[name] / value if "µs" in name else value / through[name]
        rows.append([name, f"{value:,.0f}", f"{through[name]:,.0f}", f"{ratio:.1f}"])
    say("\n### Single operations\n")
    say(harness.table(["operation", "plain JAX", "Regrow", "times the cost"], rows))


def train(rounds: int, quick: bool) -> None:
    """A training step: two slices of two devices against two processes of two, and one of four."""
    steps = "20" if quick else "60"
    rows = []
    with LocalCluster(slices=2, devices_per_slice=2) as cluster:
        for label, width in STEP_WIDTHS.items():
            figures: dict[str, list[dict[str, float]]] = {"one": [], "multi": [], "ours": []}
            for _ in range(rounds):
                args = (str(width), steps)
                figures["one"].append(
                    harness.run_program("train_step.py", harness.native_environ(4), *args)
                )
                figures["multi"].append(_multi_process(*args))
                figures["ours"].append(
                    harness.run_program(
                        "train_step.py", harness.cluster_environ(cluster.env), *args
                    )
                )
            one, multi, ours = (harness.medians(each) for each in figures.values())
            for key, what in (("step_ms", "waited for"), ("pipelined_ms", "pipelined")):
                rows.append(
                    [
                        f"{label}, {what}",
                        f"{one[key]:.1f}",
                        f"{multi[key]:.1f}",
                        f"{ours[key]:.1f}",
                        f"{100 * (ours[key] / multi[key] - 1):+.1f} %",
                        f"{ours[key] / one[key]:.2f}",
                    ]
                )
    say("\n### A training step (ms)\n")
    header = ["step", "one process", "two processes", "Regrow", "over two processes", "to one"]
    say(harness.table(header, rows))


def _multi_process(*arguments: str) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = harness.clean_environ(JAX_PLATFORMS="cpu")
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_one_process, env, [*arguments, address, "2", str(index), "2"])
            for index in range(2)
        ]
        outputs = [job.result() for job in jobs]
    return next(output for output in outputs if output)


def _one_process(env: dict[str, str], arguments: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(harness.PROGRAMS / "train_step.py"), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=harness.TIMEOUT_S,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def recovery(rounds: int, quick: bool) -> None:
    """A slice of three is killed and comes back."""
    rows = []
    for how, label in (("plain", "a loop that reacts at once"), ("elastic", "`elastic_retry`")):
        results = []
        with LocalCluster(slices=3, devices_per_slice=2) as cluster:
            for _ in range(rounds):
                control = (
                    f"{cluster.target.removeprefix('grpc://unix:').rpartition('/')[0]}/control.sock"
                )
                env = harness.cluster_environ(cluster.env)
                results.append(harness.run_program("recovery.py", env, how, control))
                cluster.wait_healthy(60)
        for name in results[0]:
            values = [one[name] for one in results]
            rows.append(
                [
                    f"{name.removesuffix(' (ms)')}, {label}",
                    f"{statistics.median(values):,.0f}",
                    f"{min(values):,.0f} to {max(values):,.0f}",
                ]
            )
    say("\n### Recovery (ms)\n")
    say(harness.table(["what", "median", "range"], rows))


def start(rounds: int, quick: bool) -> None:
    """From nothing to healthy, and back."""
    rows = []
    for slices in (1, 3, 8):
        times, ends = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            cluster = LocalCluster(slices=slices, devices_per_slice=2)
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            cluster.close()
            ends.append(time.perf_counter() - begin)
        rows.append(
            [str(slices), f"{statistics.median(times):.2f}", f"{statistics.median(ends):.2f}"]
        )
    say("\n### Start and end of a cluster (s)\n")
    say(harness.table(["slices", "to healthy", "to gone"], rows))


def scaling(rounds: int, quick: bool) -> None:
    """How the cost of operations grows with the number of slices of one device."""
    names: list[str] = []
    columns = []
    for slices in (1, 2, 4, 8):
        with LocalCluster(slices=slices, devices_per_slice=1 if slices > 1 else 2) as cluster:
            env = harness.cluster_environ(cluster.env)
            results = [
                harness.run_program("dispatch.py", env, "--quick")
                for _ in range(max(1, rounds - 1))
            ]
        columns.append(harness.medians(results))
        names = list(columns[0])
    rows = [
        [name, *(f"{column[name]:,.0f}" for column in columns)] for name in names if "µs" in name
    ]
    say("\n### Cost by number of slices\n")
    say(harness.table(["operation", "1 slice of 2", "2 of 1", "4 of 1", "8 of 1"], rows))


def first_step(rounds: int, quick: bool) -> None:
    """From a loss to the first step, by what is known of the program for fewer slices."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold, seen, count = _losses(cache, "not", "1", "1", "2")
            (disk,) = _losses(cache, "not", "1")
        with tempfile.TemporaryDirectory() as cache:
            (ahead,) = _losses(cache, "ahead", "1")
        labels = {
            "never seen": cold,
            "on disk, from an earlier run": disk,
            "another slice was lost before": count,
            "compiled ahead": ahead,
            "the same slice was lost before": seen,
        }
        for label, one in labels.items():
            found.setdefault(label, []).append(one)
    rows = [
        [label, *(f"{statistics.median(one[name] for one in ones):,.0f}" for name in ones[0])]
        for label, ones in found.items()
    ]
    say("\n### First step after a loss (ms)\n")
    header = ["the program for the slices that are left", "kill to first step", "of it compile"]
    say(harness.table([*header, "programs compiled"], rows))


def _losses(cache: str, *arguments: str) -> list[dict[str, float]]:
    with LocalCluster(slices=3, devices_per_slice=2, compile_cache_dir=cache) as cluster:
        env = harness.cluster_environ(cluster.env)
        losses: list[dict[str, float]] = harness.run_program("first_step.py", env, *arguments)
    return losses


def under_faults(rounds: int, quick: bool) -> None:
    """A fault every 30 s: elastic training beside a restart from a checkpoint."""
    count = 2 if quick else 4
    rows = []
    for how, label in (("elastic", "`regrow.elastic`"), ("restart", "restart from checkpoint")):
        kills = [5.0 + 30.0 * number for number in range(count)]
        run = faults.run_with_faults(how, kills, 30.0 * count + 5)
        back = statistics.median(run.back_s)
        rows.append(
            [
                label,
                f"{back:.1f}",
                f"{run.lost_s:.1f}",
                f"{run.progress:.0%}",
                f"{1e3 * run.step_s:.0f}",
            ]
        )
    say(f"\n### A slice killed every 30 s ({count} times)\n")
    header = ["recovery", "kill to next step (s)", "lost by a fault (s)", "goodput", "step (ms)"]
    say(harness.table(header, rows))


def snapshots(rounds: int, quick: bool) -> None:
    """What snapshots cost a step of 50 ms."""
    seconds = "20" if quick else "60"
    with LocalCluster(slices=2, devices_per_slice=2) as cluster:
        env = harness.cluster_environ(cluster.env)
        found = harness.run_program("snapshot_cost.py", env, "1152", seconds)
    rows = [
        [
            str(interval),
            f"{found[f'step_ms_{interval}']:.1f}",
            f"{found[f'percent_{interval}']:+.1f} %",
            f"{found[f'cpu_percent_{interval}']:+.1f} %",
        ]
        for interval in (1, 5, 20)
    ]
    say(
        f"\n### Snapshots of {found['state_mb']:.0f} MiB (step without: {found['step_ms_0']:.1f} ms)\n"
    )
    say(harness.table(["every … steps", "step (ms)", "longer by", "processor time"], rows))


def cycles(rounds: int, quick: bool) -> None:
    """What the processes hold after many losses and returns."""
    count = "40" if quick else "200"
    with LocalCluster(slices=3, devices_per_slice=2) as cluster:
        process = subprocess.run(
            [sys.executable, str(harness.PROGRAMS / "cycles.py"), count],
            env=harness.cluster_environ(cluster.env),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    first, *_, last, settled = lines
    names = [name for name in first["client"] if name != "pid"]
    rows = [
        [
            role,
            *(
                f"{first[role][n]:.0f} / {last[role][n]:.0f} / {settled[role][n]:.0f}"
                for n in names
            ),
        ]
        for role in first
        if isinstance(first[role], dict)
    ]
    say(f"\n### {count} losses and returns (at the start / at the end / when it has settled)\n")
    say(harness.table(["process", *(name.replace("_mb", " (MB)") for name in names)], rows))


def hotswap_load(rounds: int, quick: bool) -> None:
    """A snapshot is loaded after a spare has taken a place, and where every replica is there."""
    megabytes = 96 if quick else 384
    program = str(harness.PROGRAMS / "hotswap_load.py")
    loads: dict[str, list[list[float]]] = {}
    saves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        env = harness.clean_environ(REGROW_HOME=home)
        _regrow(env, "up", "--detach", "--name", "pool", "--slices", "3", "--spares", "1")
        job = ("run", "--cluster", "pool", "--slices", "2", "--num_elastic_instances", "1")
        try:
            for _ in range(rounds):
                for label, flags in (("", ()), (" with a replica", ("--spare-snapshots",))):
                    told = _regrow(env, *job, *flags, program, "2", str(megabytes))
                    found = json.loads(told.strip().splitlines()[-1])
                    saves.setdefault(label, []).extend(found.pop("save"))
                    for how, figures in found.items():
                        swapped = label if how.startswith("a spare") else ""
                        loads.setdefault(how + swapped, []).extend(figures)
        finally:
            _regrow(env, "down", "--cluster", "pool")
    say(f"\n### A load of {megabytes} MB a slice after a hot-swap (s)\n")
    header = ["", "load", "all until the first step", "processor time of load and step"]
    say(harness.table(header, _median_rows(loads)))
    say(f"\n### A snapshot of {megabytes} MB a slice (s)\n")
    names = {"": "as it is", " with a replica": "with a replica for spares"}
    header = ["", "until it is committed", "processor time of all of it"]
    say(harness.table(header, _median_rows({names[one]: two for one, two in saves.items()})))


def _median_rows(figures: dict[str, list[list[float]]]) -> list[list[str]]:
    return [
        [name, *(f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True))]
        for name, rows in figures.items()
    ]


def hotswap(rounds: int, quick: bool) -> None:
    """A slice of two is killed, and a spare takes its place; or it is relaunched, where there is none."""
    program = str(harness.PROGRAMS / "hotswap.py")
    swaps = "2" if quick else str(2 * rounds)
    rows = []
    with tempfile.TemporaryDirectory() as home:
        env = harness.clean_environ(REGROW_HOME=home)
        for label, options in (("a warm spare", ()), ("a cold spare", ("--cold-spares",))):
            _regrow(
                env, "up", "--detach", "--name", "pool", "--slices", "3", "--spares", "1", *options
            )
            try:
                told = _regrow(env, "run", "--cluster", "pool", "--slices", "2", program, swaps)
            finally:
                _regrow(env, "down", "--cluster", "pool")
            rows.append(_swap_row(label, told))
        told = _regrow(env, "run", "--slices", "2", "--restore-after", "0", program, swaps)
        rows.append(_swap_row("no spare, relaunched at once", told))
    say("\n### Hot-swap (ms)\n")
    header = ["what takes the place", "kill to DATA_LOSS", "kill to first step", "worst"]
    say(harness.table(header, rows))


def _regrow(env: dict[str, str], *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "regrow", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=harness.TIMEOUT_S,
        check=True,
    ).stdout


def _swap_row(label: str, output: str) -> list[str]:
    figures = json.loads(output.strip().splitlines()[-1])
    return [label, *(f"{value:,.0f}" for value in figures.values())]


def ray(rounds: int, quick: bool) -> None:
    """A host of a TPU on a Ray cluster is lost."""
    import ray_recovery

    say("\n### Recovery of a job on a Ray cluster (s)\n")
    say(ray_recovery.recovery(rounds))


BENCHMARKS: dict[str, Callable[[int, bool], None]] = {
    "dispatch": dispatch,
    "train": train,
    "recovery": recovery,
    "start": start,
    "scaling": scaling,
    "first_step": first_step,
    "faults": under_faults,
    "snapshots": snapshots,
    "cycles": cycles,
    "hotswap": hotswap,
    "hotswap_load": hotswap_load,
    "ray": ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    unknown = set(options.which) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    say(harness.machine())
    for name in options.which or BENCHMARKS:
        BENCHMARKS[name](options.rounds, options.quick)


if __name__ == "__main__":
    main()
