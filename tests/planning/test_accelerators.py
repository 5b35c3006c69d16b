from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.planning.accelerators import (
    ACCELERATORS,
    GENERATIONS,
    accelerator,
    generation_of_device,
)


@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts", "devices"),
    [
        ("v4-8", "2x2x1", 4, 1, 4),
        ("v4-16", "2x2x2", 8, 2, 8),
        ("v4-4096", "8x16x16", 2048, 512, 2048),
        ("v5p-12288", "16x16x24", 6144, 1536, 6144),
        ("v5litepod-1", "1x1", 1, 1, 1),
        ("v5litepod-8", "2x4", 8, 1, 8),
        ("v5litepod-16", "4x4", 16, 4, 16),
        ("v6e-256", "16x16", 256, 64, 256),
        ("v3-8", "2x2", 4, 1, 8),
        ("v3-2048", "32x32", 1024, 256, 2048),
        ("tpu7x-8", "2x2x1", 4, 1, 8),
    ],
)
def test_shapes(name, topology, chips, hosts, devices):
    shape = accelerator(name)
    assert (shape.topology, shape.chips, shape.hosts, shape.devices) == (
        topology,
        chips,
        hosts,
        devices,
    )


def test_four_slices_of_v4_16_are_the_32_devices_of_the_page():
    assert 4 * accelerator("v4-16").devices == 32


def test_every_name_counts_its_topology():
    assert len(ACCELERATORS) > 50
    for name, shape in ACCELERATORS.items():
        assert int(name.rpartition("-")[2]) == shape.chips * shape.generation.cores_per_chip
        assert shape.hosts * shape.chips_per_host == shape.chips


def test_a_generation_goes_by_two_names():
    assert accelerator("v5e-16") is accelerator("v5litepod-16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v4-12", ["no accelerator type v4-12", "TensorCores", "8, 16, 32"]),
        ("v5litepod-2", ["counts chips", "1, 4, 8"]),
        ("v9-8", ["'v9-8' is no accelerator type", "did you mean"]),
        ("", ["such as v4-16"]),
        ("v4", ["such as v4-16"]),
        ("v4-16 ", ["such as v4-16"]),
    ],
)
def test_what_is_no_accelerator_type(name, words):
    with pytest.raises(UsageError) as raised:
        accelerator(name)
    assert all(word in str(raised.value) for word in words)


def test_devices_are_known_by_what_jax_calls_them():
    assert generation_of_device("TPU v4") is GENERATIONS["v4"]
    assert generation_of_device("TPU v5 lite") is GENERATIONS["v5e"]
    assert generation_of_device("cpu") is None
