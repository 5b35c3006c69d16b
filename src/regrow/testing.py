"""The pytest plugin: clusters, and faults in them, for tests of training code.

@pytest.mark.chaos("kill:1@step=3", slices=3)
def test_training_survives(cluster, chaos):
    train(steps=10)             # JAX in this process is a client of the cluster
    assert chaos.done           # and a fault that is never made fails the test by itself
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

# pytest imports this in every run where Regrow is installed: it must cost nothing.
if TYPE_CHECKING:
    from regrow.chaos import Chaos
    from regrow.cluster import LocalCluster

_MARK: Final = "chaos"
_CHAOS: Final = pytest.StashKey["Chaos"]()
_NOT_OPTIONS: Final = frozenset({"strict", "name", "home", "start_timeout_s"})
_HELP: Final = (
    "chaos(spec, slices=2, devices_per_slice=2, strict=True, **options): makes the faults of a "
    "schedule on the cluster of the test; options are those of regrow.LocalCluster; a fault that is "
    "not made by the end of the test fails it, unless strict is False"
)


def pytest_configure(config: pytest.Config) -> None:
    """Tells pytest of the mark."""
    config.addinivalue_line("markers", _HELP)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks the marks before any test runs."""
    for item in items:
        mark = item.get_closest_marker(_MARK)
        if mark is not None:
            _check(item, mark)


def _check(item: pytest.Item, mark: pytest.Mark) -> None:
    from regrow.chaos import parse_schedule
    from regrow.chaos.ability import check_possible
    from regrow.cluster import cluster_options
    from regrow.errors import UsageError

    if len(mark.args) != 1 or not isinstance(mark.args[0], str):
        raise pytest.UsageError(f"{item.nodeid}: write {_HELP.partition(':')[0]}")
    try:
        options = {name: value for name, value in mark.kwargs.items() if name not in _NOT_OPTIONS}
        shape = cluster_options(**options)
        check_possible(parse_schedule(mark.args[0], shape.slices), ray=shape.ray is not None)
    except (UsageError, TypeError) as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None
    if "cluster" not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(
            f"{item.nodeid}: the mark chaos needs the fixture cluster, which has the slices"
        )


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A `regrow.LocalCluster` of the test's own, which JAX in this process is a client of.

    Two slices of two devices, unless the mark `chaos` says otherwise. JAX forgets all arrays when the
    cluster comes and goes. Scripts that the test runs are clients of the cluster, too.
    """
    from regrow.chaos import Chaos
    from regrow.cluster import LocalCluster

    mark = request.node.get_closest_marker(_MARK)
    options: dict[str, Any] = {"home": tmp_path_factory.getbasetemp() / "regrow"}
    options |= {} if mark is None else mark.kwargs
    strict = options.pop("strict", True)
    with LocalCluster(**options) as cluster, _connected(cluster):
        if mark is None:
            yield cluster
            return
        with Chaos(cluster, mark.args[0]) as chaos:
            request.node.stash[_CHAOS] = chaos
            yield cluster
    if strict:
        _check_made(chaos)


@pytest.fixture
def chaos(cluster: LocalCluster, request: pytest.FixtureRequest) -> Chaos:
    """What the mark `chaos` does in this test: the faults that were made, refused and are left."""
    found: Chaos | None = request.node.stash.get(_CHAOS, None)
    if found is None:
        pytest.fail("the fixture chaos needs the mark chaos, with a schedule", pytrace=False)
    return found


def _check_made(chaos: Chaos) -> None:
    """A test that no fault has met proves nothing."""
    what = [f"{event} was refused: {why}" for event, why in chaos.refused]
    what += [f"the moment of {event} never came" for event in chaos.left]
    if what:
        pytest.fail("chaos: " + "; ".join(what), pytrace=False)


@contextlib.contextmanager
def _connected(cluster: LocalCluster) -> Iterator[None]:
    from regrow.client import connect

    before, values = dict(os.environ), _jax_values()
    _forget_arrays()
    connect(cluster.target)
    os.environ.update(cluster.env)
    try:
        yield
    finally:
        _forget_arrays()
        os.environ.clear()
        os.environ.update(before)
        _set_jax_values(values)


_VALUES: Final = ("jax_platforms", "jax_backend_target")


def _jax_values() -> dict[str, Any]:
    import jax

    config: Any = jax.config
    return {name: config.values[name] for name in _VALUES}


def _set_jax_values(values: dict[str, Any]) -> None:
    import jax

    config: Any = jax.config
    for name, value in values.items():
        config.update(name, value)


def _forget_arrays() -> None:
    """Lets go of the clients of all backends, so that JAX makes new ones."""
    if "jax" in sys.modules:
        from jax.extend import backend

        clear: Any = backend.clear_backends
        clear()
