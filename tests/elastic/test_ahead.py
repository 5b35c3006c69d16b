"""`Manager.compile_ahead`: slices that go and come back compile nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_cases import PROGRAMS, cases_of, run

import regrow
from regrow.elastic.ahead import one_fewer

ON_DISK = "the_next_run_finds_it_on_disk"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compiling(start: Callable[..., Any], cache: str) -> Iterator[Any]:
    with regrow.LocalCluster(slices=3, devices_per_slice=2, compile_cache_dir=cache) as cluster:
        yield start(cluster, "compiling.py")


@pytest.mark.parametrize("case", cases_of("compiling.py"))
def test_compiling(compiling: Any, case: str) -> None:
    compiling.check(case)


def test_an_edited_script_finds_its_programs_on_disk(
    compiling: Any, cache: str, tmp_path: Path
) -> None:
    compiling.check(ON_DISK)
    for name in ("compiling.py", "elastic_rig.py"):
        (tmp_path / name).write_text("# A line more.\n" + (PROGRAMS / name).read_text())
    with regrow.LocalCluster(slices=3, devices_per_slice=2, compile_cache_dir=cache) as cluster:
        done = run(cluster, str(tmp_path / "compiling.py"), ON_DISK)
    told = re.search(r"\{.*\}", done.stdout)
    assert told is not None, done.stdout
    counts = json.loads(told[0])
    assert counts["compiled"] == 0
    assert counts["compiled_from_disk"] >= 2


def test_one_slice_fewer() -> None:
    assert list(one_fewer({0, 2, 5}, 8)) == [{0, 2}, {0, 5}, {2, 5}]
    assert list(one_fewer({0, 2, 5}, 1)) == [{0, 2}]
    assert not list(one_fewer({3}, 8))
