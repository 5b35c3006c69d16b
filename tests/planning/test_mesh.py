from __future__ import annotations

import ast

import pytest

from regrow.errors import UsageError
from regrow.planning.mesh import Degrees, HybridMesh, hybrid_mesh

LEFT = Degrees(data=None)


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(data=1, fsdp=4, tensor=1),
        Degrees(data=1, fsdp=1, tensor=4),
        Degrees(data=1, fsdp=2, tensor=2),
    ],
)
def test_the_table_of_four_chips(degrees):
    mesh = hybrid_mesh(degrees, LEFT, chips_per_slice=4, slices=1)
    assert mesh.ici == (degrees.data, degrees.fsdp, degrees.tensor)
    assert mesh.cautions == ()


def test_the_table_of_two_slices():
    mesh = hybrid_mesh(Degrees(fsdp=8), Degrees(data=2), chips_per_slice=8, slices=2)
    assert (mesh.mesh_shape, mesh.dcn_mesh_shape) == ((1, 8, 1), (2, 1, 1))
    assert mesh.flags == "--dcn_data_parallelism 2 --ici_fsdp_parallelism 8"


@pytest.mark.parametrize(
    ("degrees", "chips", "ici"),
    [
        (Degrees(fsdp=None), 8, (1, 8, 1)),
        (Degrees(fsdp=None, tensor=4), 4, (1, 1, 4)),
        (Degrees(data=2, fsdp=None, tensor=2), 8, (2, 2, 2)),
    ],
)
def test_what_is_open_is_whatever_is_left(degrees, chips, ici):
    assert hybrid_mesh(degrees, LEFT, chips_per_slice=chips, slices=3).ici == ici


@pytest.mark.parametrize(
    ("ici", "dcn", "words"),
    [
        (Degrees(fsdp=2), LEFT, ["ici_data_parallelism * ici_fsdp", "1 * 2 * 1 = 2", "8 chips"]),
        (Degrees(fsdp=None, tensor=3), LEFT, ["1 * 2 * 3 = 6", "it must be 8"]),
        (Degrees(fsdp=None, tensor=16), LEFT, ["1 * 1 * 16 = 16", "it must be 8"]),
        (Degrees(fsdp=8), Degrees(fsdp=4), ["dcn_data_parallelism", "there are 2 slices"]),
        (Degrees(fsdp=0), LEFT, ["ici_fsdp_parallelism is 0", "at least 1"]),
        (Degrees(fsdp=-8, tensor=-1), LEFT, ["at least 1"]),
    ],
)
def test_products_that_are_wrong(ici, dcn, words):
    with pytest.raises(UsageError) as raised:
        hybrid_mesh(ici, dcn, chips_per_slice=8, slices=2)
    assert all(word in str(raised.value) for word in words)


def test_what_the_page_advises_against_is_told():
    mesh = hybrid_mesh(Degrees(data=2, fsdp=4), Degrees(tensor=2), chips_per_slice=8, slices=2)
    assert [text.split()[0] for text in mesh.cautions] == [
        "dcn_tensor_parallelism",
        "ici_data_parallelism",
    ]


def test_stages_are_an_axis_in_front():
    mesh = HybridMesh((1, 4, 1), (2, 1, 1), stages=2)
    assert mesh.axes == ("stage", "data", "fsdp", "tensor")
    assert mesh.dcn_mesh_shape == (2, 2, 1, 1)
    call = ast.parse(mesh.code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.literal_eval(part) for part in call.args[0].args] == [(1, 1, 4, 1), (2, 2, 1, 1)]
