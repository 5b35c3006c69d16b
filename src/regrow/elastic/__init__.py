"""What elastic training code imports.

`regrow.elastic.manager` and `regrow.elastic.elastic` stand in for the modules of the same name of
pathwaysutils, `Snapshotter` for Orbax's. What needs a library says so when it is used; importing
this package needs none, not even JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regrow.elastic.batches import Batch, ConstantGlobalBatch, ScaledGlobalBatch
from regrow.elastic.causes import SliceLoss, explain
from regrow.elastic.loaders import ElasticLoader, GrainLoader
from regrow.elastic.progress import at_step, phase

if TYPE_CHECKING:
    from regrow.elastic.checkpoints import settle_checkpoints
    from regrow.elastic.manager import Manager
    from regrow.elastic.snapshotter import Snapshotter

__all__ = [
    "Batch",
    "ConstantGlobalBatch",
    "ElasticLoader",
    "GrainLoader",
    "Manager",
    "ScaledGlobalBatch",
    "SliceLoss",
    "Snapshotter",
    "at_step",
    "explain",
    "phase",
    "settle_checkpoints",
]

_HOMES = {
    "Manager": "regrow.elastic.manager",
    "Snapshotter": "regrow.elastic.snapshotter",
    "settle_checkpoints": "regrow.elastic.checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow.elastic' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
