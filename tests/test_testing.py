"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["pytester"]

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs tests, given as their code, in a process of their own."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")

    def run(code: str) -> pytest.RunResult:
        pytester.makepyfile(code)
        return pytester.runpytest_subprocess("-p", "regrow.testing", timeout=100)

    return run


TRAINING = """
    import jax, jax.numpy as jnp, numpy as np, pytest, os
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from regrow.elastic import Snapshotter, at_step

    def total():
        devices = jax.devices()
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
        return float(jax.jit(jnp.sum)(jax.device_put(np.ones(len(devices)), sharding)))

    def test_on_plain_jax():
        assert jax.devices()[0].platform == "cpu"
        assert total() == len(jax.devices())

    @pytest.mark.chaos("kill:1@step=3,restore:1@step=3+500ms", slices=3, devices_per_slice=1)
    def test_training(cluster, chaos):
        assert len(jax.devices()) == total() == 3
        lost = 0
        for step in range(6):
            at_step(step)
            chaos.wait(20) if step == 3 else None
            if step == 3:
                cluster.wait_healthy(30)
            try:
                keep = total()
            except jax.errors.JaxRuntimeError as error:
                assert "DATA_LOSS: slice 1" in str(error)
                lost += 1
        assert [event.fault for event in chaos.done] == ["kill", "restore"]
        assert cluster.slices[1].incarnation == 2

    @pytest.mark.filterwarnings("error")
    def test_a_cluster_without_faults(cluster):
        assert len(jax.devices()) == total() == 4
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "model"))
        state = jax.device_put(np.ones(4), NamedSharding(mesh, P("model")))
        snapshotter = Snapshotter()
        assert snapshotter.save(0, state)
        snapshotter.join()
        assert np.array_equal(snapshotter.load(state), state)

    def test_on_plain_jax_again():
        assert "JAX_BACKEND_TARGET" not in os.environ
        assert jax.devices()[0].platform == "cpu"
        assert total() == len(jax.devices())
"""


def test_training_code_under_faults(run) -> None:
    run(TRAINING).assert_outcomes(passed=4)


def test_a_fault_that_is_never_made_fails_the_test(run) -> None:
    result = run(
        """
        import pytest

        @pytest.mark.chaos("kill:1@phase=load")
        def test_nothing(cluster):
            pass

        @pytest.mark.chaos("kill:1@phase=load", strict=False)
        def test_little(cluster, chaos):
            assert chaos.left

        def test_without_a_mark(chaos):
            pass
        """
    )
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*chaos: the moment of kill:1@phase=load never came*"])
    result.stdout.fnmatch_lines(["*the fixture chaos needs the mark chaos*"])


@pytest.mark.parametrize(
    ("mark", "arguments", "text"),
    [
        ('"kil:1@1s"', "cluster", "test_it: chaos entry 1 ('kil:1@1s', column 1): no fault 'kil'"),
        ('"kill:2@1s"', "cluster", "there is no slice 2; allowed: 0 to 1"),
        ('"kill:1@1s"', "", "test_it: the mark chaos needs the fixture cluster"),
        ('"kill:1@1s", slice=3', "cluster", "no argument 'slice'; did you mean 'slices'?"),
        ("slices=3", "cluster", "test_it: write chaos(spec, slices=2"),
    ],
)
def test_a_wrong_mark_is_told_before_anything_runs(
    run, mark: str, arguments: str, text: str
) -> None:
    result = run(
        f"""
        import pytest

        @pytest.mark.chaos({mark})
        def test_it({arguments}):
            pass
        """
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert text in str(result.stderr) + str(result.stdout)


def test_it_costs_nothing_where_it_is_not_used(run) -> None:
    result = run(
        """
        import sys

        def test_it():
            for name in ("jax", "numpy", "regrow.cluster", "regrow.chaos", "regrow.elastic"):
                assert name not in sys.modules
        """
    )
    result.assert_outcomes(passed=1)
    assert os.environ.get("JAX_BACKEND_TARGET") is None
