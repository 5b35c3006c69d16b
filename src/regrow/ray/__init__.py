"""TPUs and slices on Ray clusters: the extra `regrow[ray]`.

Ray itself is imported when it is first needed; training code may import `current_attempt` without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from regrow.lazy import attributes

if TYPE_CHECKING:
    from regrow.ray.cluster import RayCluster
    from regrow.ray.controller import RayTpuController
    from regrow.ray.fence import AttemptId, current_attempt
    from regrow.ray.jobs import RankJob
    from regrow.ray.readiness import JoinPolicy
    from regrow.ray.restarts import RestartPolicy
    from regrow.ray.tpu import TpuController, TpuSpec

__all__ = [
    "AttemptId",
    "JoinPolicy",
    "RankJob",
    "RayCluster",
    "RayTpuController",
    "RestartPolicy",
    "TpuController",
    "TpuSpec",
    "current_attempt",
]

_HOMES: Final = {
    "AttemptId": "regrow.ray.fence",
    "JoinPolicy": "regrow.ray.readiness",
    "RankJob": "regrow.ray.jobs",
    "RayCluster": "regrow.ray.cluster",
    "RayTpuController": "regrow.ray.controller",
    "RestartPolicy": "regrow.ray.restarts",
    "TpuController": "regrow.ray.tpu",
    "TpuSpec": "regrow.ray.tpu",
    "current_attempt": "regrow.ray.fence",
}
__getattr__, __dir__ = attributes(__name__, _HOMES)
