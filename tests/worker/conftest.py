"""What the tests of workers share: real XLA in this process, see `worker_rig`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "head"))

from worker_rig import HostRig, Memory, compiler_rig

from regrow.worker.compiler import Compiler
from regrow.worker.platform import Domain, initialise


@pytest.fixture(scope="module", autouse=True)
def _initialised() -> Iterator[None]:
    wide = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    initialise()
    yield
    jax.config.update("jax_enable_x64", wide)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def home() -> Domain:
    """The domain of a host with the devices 4 and 5."""
    return Domain.home((4, 5))


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    """A compiler for a cluster of four devices."""
    return compiler_rig(4)


@pytest.fixture
def memory() -> Iterator[Memory]:
    """The head's shared memory, and a view of it."""
    made = Memory()
    yield made
    made.close()


@pytest.fixture
def host(memory: Memory) -> Iterator[HostRig]:
    """A host with the devices 4 and 5, at work."""
    rig = HostRig((4, 5), memory)
    yield rig
    rig.close()
