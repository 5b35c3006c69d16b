"""Table B of the accelerators, as the documentation of the generations has it."""

from __future__ import annotations

import pytest

from regrow.cloud.accelerators import ACCELERATORS, by_topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "devices_per_host", "topology"),
    [
        ("v2-8", 4, 1, 8, "2x2"),
        ("v3-32", 16, 4, 8, "4x4"),
        ("v3-2048", 1024, 256, 8, "32x32"),
        ("v4-8", 4, 1, 4, "2x2x1"),
        ("v4-16", 8, 2, 4, "2x2x2"),
        ("v4-4096", 2048, 512, 4, "8x16x16"),
        ("v5litepod-1", 1, 1, 1, "1x1"),
        ("v5litepod-4", 4, 1, 4, "2x2"),
        ("v5litepod-8", 8, 1, 8, "2x4"),
        ("v5litepod-16", 16, 4, 4, "4x4"),
        ("v5litepod-256", 256, 64, 4, "16x16"),
        ("v5p-12288", 6144, 1536, 4, "16x16x24"),
        ("v6e-16", 16, 4, 4, "4x4"),
    ],
)
def test_shapes(name: str, chips: int, hosts: int, devices_per_host: int, topology: str) -> None:
    one = ACCELERATORS[name]
    assert (one.chips, one.hosts, one.devices_per_host, one.topology) == (
        chips,
        hosts,
        devices_per_host,
        topology,
    )


def test_every_name_counts_its_cores_or_chips() -> None:
    for name, one in ACCELERATORS.items():
        assert int(name.partition("-")[2]) == one.chips * one.generation.cores_per_chip, name
        x, y, z = one.slice_axes
        assert x * y * z == one.hosts, name
        assert by_topology(one.generation.type, one.topology) == one


def test_the_page_has_32_devices() -> None:
    one = ACCELERATORS["v4-16"]
    assert 4 * one.hosts * one.devices_per_host == 32


@pytest.mark.parametrize(
    ("kind", "topology", "name"),
    [
        ("V4", "4x4x16", "v4-512"),
        ("V5P", "2x2x4", "v5p-32"),
        ("V4", "3x3x3", None),
        ("V4", "4x4", None),
        ("V4", "4x2x2", None),
        ("V4", "16x16x16", None),
        ("V6E", "3x3", None),
        ("V7", "2x2x1", None),
        ("V4", "x", None),
    ],
)
def test_topologies(kind: str, topology: str, name: str | None) -> None:
    found = by_topology(kind, topology)
    assert (found and found.name) == name


def test_rings() -> None:
    assert ACCELERATORS["v4-128"].wraps == (True, True, True)
    assert ACCELERATORS["v4-16"].wraps == (False, False, False)
    assert ACCELERATORS["v5litepod-128"].wraps == (False, True, False)
    assert ACCELERATORS["v5litepod-256"].wraps == (True, True, False)
