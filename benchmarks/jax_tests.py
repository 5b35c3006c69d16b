"""Runs JAX's own tests on the plain CPU backend and through Regrow, and writes how they compare.

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax /tmp/jax
    python benchmarks/jax_tests.py --jax-tests /tmp/jax --results /tmp/results array_test memories_test
    python benchmarks/jax_tests.py --jax-tests /tmp/jax --results /tmp/results --table docs/compatibility.md

Take the tag of the installed jax. Outcomes are kept in the folder of results, one file of JSON lines for
each test file and side: what is there already is not run again (`--again` runs again what failed through
Regrow). Tests run in processes of some dozens; one that ends a process or hangs is noted, and the
rest goes on in the next process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compatibility

from regrow import LocalCluster

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = Path(__file__).parents[1] / "src"
DEVICES = 8
PLAIN = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
TAIL_CHARS = 3000


def say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Outcomes:
    """The outcomes of one test file on one side, kept in a file."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """The latest outcome of each test."""
        if not self.path.exists():
            return {}
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {line["test"]: line for line in lines}

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")


@dataclass
class Runner:
    """Runs tests of one folder in processes of their own."""

    jax_tests: Path
    scratch: Path
    timeout_s: float
    per_process: int

    def pytest(self, arguments: list[str], variables: dict[str, str]) -> tuple[list[Any], str]:
        """What one pytest process told, and the end of its output."""
        told = self.scratch / "told.jsonl"
        told.unlink(missing_ok=True)
        (self.scratch / "arguments").write_text("\n".join(arguments))
        path = ":".join(filter(None, (variables.get("PYTHONPATH"), str(PROGRAMS), str(SOURCES))))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "record_tests",
        ]
        command += [f"--timeout={self.timeout_s:g}", "--timeout-method=thread"]
        with (self.scratch / "output").open("wb") as output:
            subprocess.run(
                [*command, "-c", "pyproject.toml", f"@{self.scratch / 'arguments'}"],
                cwd=self.jax_tests,
                env=os.environ | variables | {"PYTHONPATH": path, "RECORD_TESTS": str(told)},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        text = (self.scratch / "output").read_text(errors="replace")
        lines = told.read_text().splitlines() if told.exists() else []
        return [json.loads(line) for line in lines], text[-TAIL_CHARS:]

    def collect(self, file: str) -> list[str]:
        """The tests of a file."""
        told, tail = self.pytest(["--collect-only", f"tests/{file}.py"], PLAIN)
        tests = [line["test"] for line in told if "test" in line]
        if not tests:
            say(f"{file}: nothing was collected\n{tail}")
        return tests

    def run(self, tests: list[str], variables: dict[str, str], outcomes: Outcomes) -> None:
        """Runs tests, in as many processes as it takes."""
        left = list(tests)
        while left:
            told, tail = self.pytest(left[: self.per_process], variables)
            done = _outcomes(told, tail, left)
            outcomes.add(done)
            counts = {line["outcome"] for line in done}
            say(f"  {len(done)} of {len(left)} left: {', '.join(sorted(counts))}")
            finished = {line["test"] for line in done}
            left = [test for test in left if test not in finished]


def _outcomes(told: list[Any], tail: str, asked: list[str]) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    running = None
    slice_lost = False
    for line in told:
        if "started" in line:
            running = line["started"]
        elif "ended" in line:
            running = None
            test = line.pop("ended")
            lost = line["outcome"] == "failed" and "DATA_LOSS: slice" in line["error"]
            if not (lost and slice_lost):  # Later ones may just be its victims: they run again.
                done.append({"test": test, **line})
            slice_lost |= lost
    if running is not None:
        outcome = "timed out" if "+ Timeout +" in tail else "aborted"
        done.append({"test": running, "outcome": outcome, "seconds": 0.0, "error": tail})
    if not done:  # Not even the first test began.
        done.append({"test": asked[0], "outcome": "aborted", "seconds": 0.0, "error": tail})
    return done


def run_file(runner: Runner, file: str, arguments: argparse.Namespace) -> None:
    """Runs what is missing of one test file, on both sides."""
    results = arguments.results
    plain = Outcomes(results / f"{file}.plain.jsonl")
    through = Outcomes(results / f"{file}.regrow.jsonl")
    collected = runner.collect(file)
    (results / f"{file}.collected").write_text(f"{len(collected)}\n")
    tests = _sample([test for test in collected if _wanted(test, arguments)], arguments.sample)
    missing = [test for test in tests if test not in plain.read()]
    say(f"{file}: {len(tests)} tests, {len(missing)} to run on the CPU backend")
    runner.run(missing, PLAIN, plain)
    passed = {test for test, line in plain.read().items() if line["outcome"] == "passed"}
    known = through.read()
    missing = [
        test
        for test in tests
        if test in passed
        and (test not in known or (arguments.again and known[test]["outcome"] != "passed"))
    ]
    if not missing:
        return
    say(f"{file}: {len(missing)} to run through Regrow")
    with LocalCluster(
        slices=1,
        devices_per_slice=DEVICES,
        restore_after=0.2,
        hang_after_s=60.0,
        log_dir=arguments.logs,
    ) as cluster:
        runner.run(missing, cluster.env, through)


def _wanted(test: str, arguments: argparse.Namespace) -> bool:
    return arguments.matching in test and not (arguments.without and arguments.without in test)


def _sample(tests: list[str], count: int | None) -> list[str]:
    if count is None or len(tests) <= count:
        return tests
    return [tests[index * len(tests) // count] for index in range(count)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="test files, without .py")
    parser.add_argument("--jax-tests", type=Path, required=True, help="a checkout of JAX")
    parser.add_argument("--results", type=Path, required=True, help="a folder for the outcomes")
    parser.add_argument("--again", action="store_true", help="run again what failed through Regrow")
    parser.add_argument("--matching", default="", help="only tests with this in their name")
    parser.add_argument("--without", help="no tests with this in their name")
    parser.add_argument("--sample", type=int, help="of each file at most so many, evenly chosen")
    parser.add_argument("--per-process", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=120.0, help="of a test, in seconds")
    parser.add_argument("--logs", help="a folder for the logs of the cluster")
    parser.add_argument("--table", type=Path, help="the document whose table is written anew")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.results.mkdir(parents=True, exist_ok=True)
    arguments.results = arguments.results.resolve()
    scratch = arguments.results / "scratch"
    scratch.mkdir(exist_ok=True)
    runner = Runner(arguments.jax_tests, scratch, arguments.timeout, arguments.per_process)
    for file in arguments.files:
        begin = time.monotonic()
        run_file(runner, file, arguments)
        say(
            f"{file}: {compatibility.summary(arguments.results, file)}, {time.monotonic() - begin:.0f} s"
        )
    if arguments.table is not None:
        compatibility.write_table(arguments.results, arguments.table)


if __name__ == "__main__":
    main()
