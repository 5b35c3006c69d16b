"""What elastic training code imports.

`regrow.elastic.manager` and `regrow.elastic.elastic` stand in for the modules of the same name of
pathwaysutils, `Snapshotter` for Orbax's. What needs a library says so when it is used; importing
this package needs none, not even JAX.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from regrow.elastic import planned
from regrow.elastic.batches import Batch, ConstantGlobalBatch, ScaledGlobalBatch
from regrow.elastic.causes import SliceLoss, explain
from regrow.elastic.loaders import ElasticLoader, GrainLoader
from regrow.elastic.progress import at_step, phase
from regrow.elastic.requests import suspend_requested
from regrow.lazy import attributes

if TYPE_CHECKING:
    from regrow.elastic.checkpoints import settle_checkpoints
    from regrow.elastic.manager import Manager
    from regrow.elastic.recording import record
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
    "record",
    "settle_checkpoints",
    "suspend_requested",
]

_HOMES: Final = {
    "Manager": "regrow.elastic.manager",
    "Snapshotter": "regrow.elastic.snapshotter",
    "record": "regrow.elastic.recording",
    "settle_checkpoints": "regrow.elastic.checkpoints",
}
__getattr__, __dir__ = attributes(__name__, _HOMES)

if planned.PLAN_VARIABLE in os.environ:
    # Before the program makes a manager: whoever records has imported this package by then.
    planned.follow_environment()
