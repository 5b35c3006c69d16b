"""Planning: accelerators, meshes, and which parallelism to use across slices.

Only the benchmarks, `shardings` and `dcn`, import JAX; import them by their own names.
"""

from __future__ import annotations

from regrow.planning.accelerators import ACCELERATORS, GENERATIONS, Accelerator, accelerator
from regrow.planning.advise import Plan, Strategy, advise
from regrow.planning.mesh import Degrees, HybridMesh, hybrid_mesh
from regrow.planning.model import Model, Slices, slices_of

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Degrees",
    "GENERATIONS",
    "HybridMesh",
    "Model",
    "Plan",
    "Slices",
    "Strategy",
    "accelerator",
    "advise",
    "hybrid_mesh",
    "slices_of",
]
