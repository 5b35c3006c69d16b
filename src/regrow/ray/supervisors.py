"""The end of a job that has not begun: Ray itself stops it only once its runtime environment is made.

Until then, for minutes with pip, it would keep its host from the next job.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_NAME: Final = "_ray_internal_job_actor_{}"
_NAMESPACE: Final = "SUPERVISOR_ACTOR_RAY_NAMESPACE"
_ASK_S: Final = 5.0


def end_supervisor(address: str, job_id: str) -> bool:
    """Ends the actor that Ray has, or is about to start, for a job; what it needs is free then.

    Args:
        address: Of the head.
        job_id: Which.

    Returns:
        Whether there was one, and this version of Ray lets us.
    """
    try:
        grpc = importlib.import_module("grpc")
        messages = importlib.import_module("ray.core.generated.gcs_service_pb2")
        services = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
        open_channel = importlib.import_module("ray._private.grpc_utils").init_grpc_channel
    except (ImportError, AttributeError):
        return False
    with open_channel(address) as channel:
        try:
            return _end(messages, services.ActorInfoGcsServiceStub(channel), job_id)
        except grpc.RpcError:
            return False


def _end(messages: Any, actors: Any, job_id: str) -> bool:
    wanted = messages.GetNamedActorInfoRequest(name=_NAME.format(job_id), ray_namespace=_NAMESPACE)
    found = actors.GetNamedActorInfo(wanted, timeout=_ASK_S).actor_table_data.actor_id
    if not found:
        return False
    end = messages.KillActorViaGcsRequest(actor_id=found, force_kill=True, no_restart=True)
    actors.KillActorViaGcs(end, timeout=_ASK_S)
    return True
