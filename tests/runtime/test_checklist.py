"""All that stock JAX, pathwaysutils and Orbax must be able to do, each item a test.

A script has many cases, and is started once: a test waits for the line that tells of its case.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from told_cases import ToldCases

import regrow

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = str(Path(regrow.__file__).parents[1])
SEVERAL_HOSTS = (
    "devices_and_their_attributes",
    "sharded_arrays",
    "training_with_donation",
    "shard_map_with_collectives",
    "pmap_on_all_and_on_subsets",
    "pinned_host",
    "resharding_across_meshes",
    "resharding_inside_a_program",
)
COMPUTATIONS = 24


def cases_of(script: str) -> list[str]:
    return re.findall(r"^@case\ndef (\w+)", (PROGRAMS / script).read_text(), re.MULTILINE)


class Script(ToldCases):
    """One of the programs beside this file while it runs, as a client of a cluster."""

    def __init__(self, variables: dict[str, str], name: str, arguments: Sequence[str] = ()) -> None:
        path = ":".join(filter(None, (variables.get("PYTHONPATH"), SOURCES)))
        process = subprocess.Popen(
            [sys.executable, "-u", str(PROGRAMS / name), *arguments],
            env=os.environ | variables | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        super().__init__(process)

    def output(self) -> str:
        """All that it writes until it ends."""
        return self._process.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[regrow.LocalCluster]:
    with regrow.LocalCluster(slices=2, devices_per_slice=4) as made:
        yield made


@pytest.fixture(scope="module")
def checklist(cluster: regrow.LocalCluster) -> Iterator[Script]:
    script = Script(cluster.env, "checklist.py")
    yield script
    script.close()


@pytest.mark.parametrize("case", cases_of("checklist.py"))
def test_stock_jax(checklist: Script, case: str) -> None:
    checklist.check(case)


@pytest.fixture(scope="module")
def libraries(cluster: regrow.LocalCluster) -> Iterator[Script]:
    script = Script(cluster.env, "libraries.py")
    yield script
    script.close()


@pytest.mark.parametrize("case", cases_of("libraries.py"))
def test_libraries(libraries: Script, case: str) -> None:
    libraries.check(case)


@pytest.fixture(scope="module")
def colocated(cluster: regrow.LocalCluster) -> Iterator[Script]:
    script = Script(cluster.env, "colocated.py")
    yield script
    script.close()


@pytest.mark.parametrize("case", cases_of("colocated.py"))
def test_colocated_python(colocated: Script, case: str) -> None:
    colocated.check(case)


def test_several_clients_at_once(cluster: regrow.LocalCluster) -> None:
    scripts = [Script(cluster.env, "one_of_several.py", [str(number)]) for number in range(3)]
    for script in scripts:
        script.check("one_of_several")
        script.close()


@pytest.fixture(scope="module")
def several_hosts() -> Iterator[Script]:
    with regrow.LocalCluster(slices=2, devices_per_slice=4, hosts_per_slice=2) as made:
        script = Script(made.env, "checklist.py", SEVERAL_HOSTS)
        yield script
        script.close()


@pytest.mark.parametrize("case", SEVERAL_HOSTS)
def test_slices_of_several_hosts(several_hosts: Script, case: str) -> None:
    several_hosts.check(case)


def digests(variables: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "bits.py")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def without_colocated_python() -> Iterator[regrow.LocalCluster]:
    with regrow.LocalCluster(slices=2, devices_per_slice=2, allow_colocated_python=False) as made:
        yield made


@pytest.mark.timeout(300)
def test_the_same_bits_as_the_cpu_backend(
    without_colocated_python: regrow.LocalCluster,
) -> None:
    plain = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    through = digests(without_colocated_python.env)
    assert len(through) == COMPUTATIONS
    assert through == digests(plain)


def test_colocated_python_switched_off(without_colocated_python: regrow.LocalCluster) -> None:
    script = Script(without_colocated_python.env, "colocated.py", ["on_one_device"])
    output = script.output()
    assert "UNIMPLEMENTED: the owner of this cluster has switched colocated Python off" in output
