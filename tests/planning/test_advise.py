from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import UsageError
from regrow.planning import Model, Slices, accelerator, advise, slices_of

V4_128 = accelerator("v4-128")
SEVEN_BILLION = Model(7e9)


def first(model, slices, batch_tokens, **options):
    return advise(model, slices, batch_tokens, **options).strategies[0]


def test_a_batch_as_advised_is_for_data_parallelism():
    plan = advise(SEVEN_BILLION, slices_of(V4_128, 4), 4 * 700_000)
    assert plan.least_slice_tokens == pytest.approx(352_000)
    assert plan.advised_slice_tokens == pytest.approx(700_000)
    best = plan.strategies[0]
    assert (best.name, best.cost.network, best.relative) == ("data 4", "hidden", 1)
    assert (best.mesh.mesh_shape, best.mesh.dcn_mesh_shape) == ((1, 64, 1), (4, 1, 1))


@pytest.mark.parametrize(
    ("slice_tokens", "network"),
    [(700_000, "hidden"), (699_000, "tight"), (352_000, "tight"), (351_000, "exposed")],
)
def test_the_network_hides_from_the_batches_of_the_page_on(slice_tokens, network):
    plan = advise(SEVEN_BILLION, slices_of(V4_128, 4), 4 * slice_tokens)
    (data,) = (one for one in plan.strategies if one.name == "data 4")
    assert data.cost.network == network


def test_a_smaller_batch_makes_deeper_pipelines():
    slices = dataclasses.replace(slices_of(V4_128, 8), ici_bytes_per_s=None)
    stages = [
        first(SEVEN_BILLION, slices, 8 * tokens).mesh.stages
        for tokens in (800e3, 400e3, 150e3, 20e3)
    ]
    assert stages == [1, 2, 4, 8]


def test_memory_is_what_fsdp_is_for():
    plan = advise(Model(400e9), slices_of(accelerator("v5p-128"), 4), 4 * 300_000)
    best = plan.strategies[0]
    assert (best.name, best.fits, best.cost.network) == ("fsdp 2 x data 2", True, "hidden")
    (data,) = (one for one in plan.strategies if one.name == "data 4")
    assert not data.fits
    assert "GB of memory a chip" in data.reasons[-1]


def test_a_larger_batch_is_named_that_would_spare_the_pipeline():
    slices = slices_of(V4_128, 4)
    assert advise(SEVEN_BILLION, slices, 2e6).batch_instead == pytest.approx(2_800_000)
    assert advise(SEVEN_BILLION, slices, 3e6).batch_instead is None
    # Data parallelism would not fit, whatever the batch.
    assert advise(Model(16e9), slices_of(accelerator("v4-16"), 4), 8e6).batch_instead is None


def test_spreading_weights_frees_memory():
    plan = advise(Model(70e9), slices_of(V4_128, 4), 4 * 750_000)
    states = {one.name: one.cost.state_bytes for one in plan.strategies}
    assert states["data 4"] == 16 * 70e9 / 64
    assert states["fsdp 4"] == states["pipeline 4"] == states["data 4"] / 4
    assert states["pipeline 2 x fsdp 2"] == states["data 4"] / 4


def test_one_slice_has_no_network():
    (only,) = advise(Model(1e9), slices_of(accelerator("v3-8"), 1), 1e5).strategies
    assert (only.name, only.cost.network, only.cost.headroom) == ("one slice", "none", math.inf)


def test_nothing_fits():
    plan = advise(Model(1e12), slices_of(accelerator("v4-8"), 2), 1e6)
    assert not any(one.fits for one in plan.strategies)


def test_experts_that_a_token_does_not_meet_cost_network_but_no_arithmetic():
    plan = advise(Model(7e9, active_parameters=7e8), slices_of(V4_128, 4), 4e6)
    assert plan.least_slice_tokens == pytest.approx(3_520_000)


def test_few_tokens_a_chip_ask_for_tensor_parallelism_within_the_slice():
    slices = slices_of(accelerator("v4-512"), 2)
    assert first(SEVEN_BILLION, slices, 2 * 2e6).mesh.ici == (1, 256, 1)
    assert first(SEVEN_BILLION, slices, 2 * 350_000).mesh.ici == (1, 128, 2)


def test_a_slice_can_be_too_large_for_its_batch():
    best = first(SEVEN_BILLION, slices_of(accelerator("v4-4096"), 1), 100_000)
    assert any(reason.startswith("within a slice, too") for reason in best.reasons)
    assert best.cost.step_s > best.cost.forward_s + best.cost.backward_s


def test_layers_must_divide_into_stages():
    names = [
        one.name for one in advise(Model(7e9, layers=30), slices_of(V4_128, 4), 1e6).strategies
    ]
    assert "pipeline 2 x data 2" in names
    assert "pipeline 4" not in names


def test_microbatches_as_asked():
    plan = advise(SEVEN_BILLION, slices_of(V4_128, 4), 1e6, microbatches=3)
    (deep,) = (one for one in plan.strategies if one.name == "pipeline 4")
    assert deep.cost.microbatches == 3
    assert deep.cost.bubble == 0.5


def test_what_was_measured_replaces_the_table():
    slices = slices_of(V4_128, 2, flops_per_s=100e12, hbm_bytes=1e9, dcn_bits_per_s=64 * 1e9)
    assert (slices.flops_per_s, slices.hbm_bytes, slices.intensity) == (100e12, 1e9, 100_000)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: slices_of(accelerator("v3-8"), 2), "v3-8: Multislice needs TPU v4 or later"),
        (lambda: slices_of(accelerator("tpu7x-8"), 2), "no source gives the bandwidth"),
        (lambda: slices_of(V4_128, 257), "at most 256"),
        (lambda: slices_of(V4_128, 0), "slices is 0"),
        (lambda: Model(0), "parameters is 0"),
        (lambda: Model(math.inf), "parameters is inf"),
        (lambda: Model(1e9, layers=-1), "layers is -1"),
        (lambda: Model(1e9, active_parameters=2e9), "are more than all"),
        (lambda: advise(SEVEN_BILLION, slices_of(V4_128, 2), 127), "need one each"),
        (lambda: advise(SEVEN_BILLION, slices_of(V4_128, 2), math.inf), "need one each"),
        (lambda: advise(SEVEN_BILLION, slices_of(V4_128, 2), math.nan), "need one each"),
        (lambda: advise(SEVEN_BILLION, slices_of(V4_128, 2), 1e6, 0), "microbatches is 0"),
    ],
)
def test_numbers_that_cannot_be(make, words):
    with pytest.raises(UsageError, match=words):
        make()


_slices = st.builds(
    Slices,
    slices=st.integers(1, 24),
    chips=st.sampled_from([1, 4, 8, 64]),
    vm_chips=st.sampled_from([1, 4]),
    flops_per_s=st.floats(1e12, 1e15),
    hbm_bytes=st.floats(1e9, 2e11),
    dcn_bits_per_s=st.floats(1e9, 1e11),
    ici_bytes_per_s=st.none() | st.floats(1e10, 1e12),
)
_models = st.builds(Model, parameters=st.floats(1e6, 1e12))


@settings(max_examples=60, deadline=None)
@given(_models, _slices, st.floats(1e4, 1e9))
def test_every_strategy_uses_every_chip_once(model, slices, batch_tokens):
    plan = advise(model, slices, batch_tokens)
    for one in plan.strategies:
        assert math.prod(one.mesh.dcn_mesh_shape) == slices.slices
        assert math.prod(one.mesh.mesh_shape) == slices.chips
        assert one.cost.step_s > 0
        assert one.cost.microbatches >= 1
        assert one.fits == (one.cost.memory_bytes <= 0.9 * slices.hbm_bytes)
    assert len({one.mesh for one in plan.strategies}) == len(plan.strategies)
    fits = [one.fits for one in plan.strategies]
    assert fits == sorted(fits, reverse=True)


@settings(max_examples=40, deadline=None)
@given(_models, _slices, st.floats(1e4, 1e9))
def test_a_faster_network_makes_no_strategy_slower(model, slices, batch_tokens):
    faster = dataclasses.replace(slices, dcn_bits_per_s=2 * slices.dcn_bits_per_s)
    before = {one.name: one.cost.step_s for one in advise(model, slices, batch_tokens).strategies}
    after = {one.name: one.cost.step_s for one in advise(model, faster, batch_tokens).strategies}
    assert before.keys() == after.keys()
    assert all(after[name] <= before[name] for name in before)
