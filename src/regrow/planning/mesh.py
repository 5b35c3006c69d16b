"""Meshes over slices: degrees of parallelism within a slice (ICI) and across slices (DCN)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, final

from regrow.errors import UsageError

AXES: Final = ("data", "fsdp", "tensor")
"""The axes of a mesh, from the least to the most network traffic."""


@final
@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ways each kind of parallelism splits; None, once at most: whatever is left."""

    data: int | None = 1
    fsdp: int | None = 1
    tensor: int | None = 1

    def complete(self, network: str, total: int, what: str) -> tuple[int, int, int]:
        """The degrees with the open one filled in.

        Args:
            network: "ici" or "dcn", as in the names of the flags.
            total: What their product must be.
            what: What `total` counts, for the error.

        Raises:
            UsageError: The product is another.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in given.items():
            if value is not None and value < 1:
                raise UsageError(f"{network}_{name}_parallelism is {value}; it must be at least 1")
        known = math.prod(value for value in given.values() if value is not None)
        left = max(1, total // known)
        data, fsdp, tensor = (left if value is None else value for value in given.values())
        if data * fsdp * tensor != total:
            names = " * ".join(f"{network}_{name}_parallelism" for name in given)
            product = f"{data} * {fsdp} * {tensor} = {data * fsdp * tensor}"
            raise UsageError(f"{names} = {product}, but {what}: it must be {total}")
        return (data, fsdp, tensor)


@final
@dataclass(frozen=True, slots=True)
class HybridMesh:
    """A mesh over slices, in the terms of `jax.experimental.mesh_utils.create_hybrid_device_mesh`.

    Attributes:
        ici: Degrees within a slice, in the order of `AXES`.
        dcn: Degrees across slices.
        stages: Stages of a pipeline across slices; an axis "stage" in front if there are several.
    """

    ici: tuple[int, int, int]
    dcn: tuple[int, int, int]
    stages: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return AXES if self.stages == 1 else ("stage", *AXES)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Within a slice: the argument `mesh_shape`."""
        return self.ici if self.stages == 1 else (1, *self.ici)

    @property
    def dcn_mesh_shape(self) -> tuple[int, ...]:
        """Across slices: the argument `dcn_mesh_shape`."""
        return self.dcn if self.stages == 1 else (self.stages, *self.dcn)

    @property
    def code(self) -> str:
        """Python that makes the mesh."""
        return f"Mesh(create_hybrid_device_mesh({self.mesh_shape}, {self.dcn_mesh_shape}), {self.axes})"

    @property
    def flags(self) -> str:
        """The flags of `regrow bench shardings` for it; it knows no stages."""
        return " ".join(
            f"--{network}_{axis}_parallelism {degree}"
            for network, degrees in (("dcn", self.dcn), ("ici", self.ici))
            for axis, degree in zip(AXES, degrees, strict=True)
            if degree > 1
        )

    @property
    def cautions(self) -> tuple[str, ...]:
        """What the Multislice page advises against in this mesh."""
        said = []
        if self.dcn[2] > 1:
            said.append(
                "dcn_tensor_parallelism should be 1: tensor parallelism needs more bandwidth than "
                "there is between slices"
            )
        if self.ici[0] > 1:
            said.append(
                "ici_data_parallelism should be 1 in most cases: ICI is fast enough for "
                "ici_fsdp_parallelism instead, which needs less memory"
            )
        return tuple(said)


def hybrid_mesh(ici: Degrees, dcn: Degrees, *, chips_per_slice: int, slices: int) -> HybridMesh:
    """Checks the degrees against the slices that there are.

    Raises:
        UsageError: A product is not the number of chips of a slice, or of slices.
    """
    chips = f"a slice has {_count(chips_per_slice, 'chip')}"
    return HybridMesh(
        ici.complete("ici", chips_per_slice, chips),
        dcn.complete("dcn", slices, f"there {_be(slices)} {_count(slices, 'slice')}"),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"
