"""The numbers of the Multislice page, and what they are derived from."""

from __future__ import annotations

import math

import pytest

from regrow.planning import intensity
from regrow.planning.accelerators import GENERATIONS, accelerator
from regrow.planning.model import slices_of

V4 = intensity.hardware_intensity(275e12, 4, 50e9)


def test_intensity_of_v4():
    assert V4 == 22_000
    assert slices_of(accelerator("v4-128"), 2).intensity == pytest.approx(22_000)


@pytest.mark.parametrize(("generation", "flop_per_bit"), [("v5e", 7880), ("v5p", 9180)])
def test_intensity_of_others(generation, flop_per_bit):
    made_of = GENERATIONS[generation]
    assert (
        intensity.hardware_intensity(
            made_of.peak_flops_per_s, made_of.dcn_host_chips, made_of.dcn_bits_per_s
        )
        == flop_per_bit
    )


@pytest.mark.parametrize(("slices", "bits"), [(1, 0), (2, 32), (3, 64), (4, 64), (256, 64)])
def test_bits_of_data_parallelism(slices, bits):
    assert intensity.data_parallel_bits(slices) == bits


@pytest.mark.parametrize(("slices", "bits"), [(2, 32), (3, 64)])
def test_operational_intensity(slices, bits):
    assert intensity.data_parallel_intensity(1000, slices) == 4 * 1000 / bits
    assert intensity.data_parallel_intensity(1000, 1) == math.inf


@pytest.mark.parametrize("slices", [2, 3, 16])
def test_fsdp_needs_what_data_parallelism_needs(slices):
    assert intensity.fsdp_intensity(1000, slices) == intensity.data_parallel_intensity(1000, slices)
    # Both of its passes are as tight: half of the arithmetic, half of the bits.
    assert intensity.fsdp_forward_bits(slices) * 2 == intensity.fsdp_backward_bits(slices)
    assert intensity.fsdp_intensity(1000, slices, 16) > intensity.fsdp_intensity(1000, slices)


@pytest.mark.parametrize(
    ("slices", "least", "advised"), [(2, 176_000, 350_000), (3, 352_000, 700_000)]
)
def test_batches(slices, least, advised):
    tokens = intensity.least_batch(V4, intensity.data_parallel_bits(slices))
    assert tokens == least
    assert intensity.advised_batch(tokens) == pytest.approx(advised)


def test_the_least_batch_is_where_both_take_as_long():
    """From the time of a backward pass and of an all-reduce, for 7e9 parameters on v4-128."""
    parameters, chips, hosts = 7e9, 64, 16
    backward_s = 4 * 176_000 * parameters / (chips * 275e12)
    all_reduce_s = 32 * parameters / (hosts * 50e9)
    assert backward_s == pytest.approx(all_reduce_s)


@pytest.mark.parametrize("slices", [2, 3, 4, 6, 12, 256])
def test_a_split_moves_as_much_in_the_backward_pass_however_it_is_made(slices):
    whole = intensity.data_parallel_bits(slices)
    for fsdp in (degree for degree in range(1, slices + 1) if slices % degree == 0):
        forward, scattered, reduced = intensity.split_bits(slices // fsdp, fsdp)
        assert scattered + reduced == pytest.approx(whole)
        assert forward <= whole / 2 * (1 + 1e-9)
    assert forward == pytest.approx(intensity.fsdp_forward_bits(slices))
    assert intensity.split_bits(slices, 1) == (0, 0, pytest.approx(whole))
    assert intensity.split_bits(1, 1) == (0, 0, 0)


def test_pipelines_in_the_order_of_the_page():
    assert intensity.pipeline_shapes(8) == [(2, 4), (4, 2), (8, 1)]
    assert intensity.pipeline_shapes(6) == [(2, 3), (3, 2), (6, 1)]
    assert intensity.pipeline_shapes(1) == []


@pytest.mark.parametrize(
    ("batch", "pipeline"),
    [
        (700_001, (1, 8)),
        (699_999, (2, 4)),
        (350_001, (2, 4)),
        (349_999, (4, 2)),  # two replicas, whose all-reduce takes half
        (87_501, (4, 2)),
        (87_499, (8, 1)),
        (1, (8, 1)),
    ],
)
def test_a_pipeline_is_as_deep_as_it_must(batch, pipeline):
    assert intensity.least_pipeline(V4, batch, 8) == pipeline


def test_bubble():
    assert intensity.pipeline_bubble(1, 8) == 0
    assert intensity.pipeline_bubble(4, 1) == 0.75
    assert intensity.pipeline_bubble(2, 8) == pytest.approx(1 / 9)
