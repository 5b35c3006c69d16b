"""`RayTpuController`: a TPU whose hosts are nodes of a Ray cluster, and jobs with a rank on each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import RayError, WaitTimeout
from regrow.ray.attempts import RankView
from regrow.ray.cluster import RayCluster, RayNode
from regrow.ray.hosts import RayHosts
from regrow.ray.job_run import JobRun
from regrow.ray.jobs import RANK_META, TPU_META, RankJob
from regrow.ray.logs import TellLine
from regrow.ray.readiness import (
    Create,
    Delete,
    Done,
    GiveUp,
    JoinPolicy,
    Readiness,
    Rejoin,
    Wait,
)
from regrow.ray.restarts import RestartPolicy
from regrow.ray.tpu import Say, TpuController, TpuSpec


@final
class RayTpuController:
    """One TPU as a part of a Ray cluster.

    Its methods raise CloudApiError if the Cloud TPU API refuses, RayError if Ray does, and
    NoClusterError if either does not answer.

    Attributes:
        tpu: The TPU.
        cluster: The Ray cluster.
    """

    def __init__(
        self,
        client: CloudClient,
        place: Place,
        spec: TpuSpec,
        cluster: RayCluster,
        *,
        startup_script: str = "",
        policy: JoinPolicy | None = None,
        log_dir: Path | None = None,
        say: Say = lambda _: None,
    ) -> None:
        """Asks nothing yet.

        Args:
            client: Of the Cloud TPU API.
            place: Project and zone.
            spec: What the TPU is to be like when it is made.
            cluster: That its hosts are to join.
            startup_script: What its hosts run before they join; a shell script.
            policy: How patient it is with hosts that do not join.
            log_dir: Where logs of ranks are kept; default: regrow-ray-logs here.
            say: Is told what is done.

        Raises:
            UsageError: If there is no such accelerator.
        """
        self.tpu = TpuController(client, place, spec, say=say)
        self.cluster = cluster
        self._hosts = RayHosts(self.tpu, cluster, startup_script=startup_script, say=say)
        self._policy = policy or JoinPolicy()
        self._log_dir = log_dir or Path("regrow-ray-logs")
        self._say = say

    # --- hosts ---

    def joined(self) -> dict[int, RayNode]:
        """The hosts of the TPU that are nodes of the cluster, by rank.

        Hosts of a TPU of that name that was there before are none of them.
        """
        return self._hosts.joined()

    def create(self, *, timeout_s: float = 1800.0) -> None:
        """Makes the TPU, with a startup script that joins the cluster.

        Raises:
            CloudApiError: If it is there already, or cannot be made.
            WaitTimeout: If it is not READY in time.
        """
        self._hosts.create(timeout_s=timeout_s)

    def rejoin(self) -> None:
        """Has hosts of a READY TPU that are no nodes of the cluster join again, as they are.

        Raises:
            CloudApiError: If a slice is not READY.
        """
        self._hosts.rejoin()

    def delete(self, *, timeout_s: float = 600.0) -> bool:
        """Deletes the TPU; False if there was none, or it was refused: then it is somebody else's."""
        return self._hosts.delete(timeout_s=timeout_s)

    def ensure_ready(
        self, *, timeout_s: float = 3600.0, patient: bool = False
    ) -> dict[int, RayNode]:
        """Makes the TPU if there is none, and waits until all of its hosts have joined.

        One whose hosts do not join, or which is dead, is made anew, as often as the policy allows.

        Args:
            timeout_s: How long all of that may take, in seconds.
            patient: Whether to try again, in that time, where there is no capacity.

        Returns:
            Its hosts, by rank.

        Raises:
            RayError: If it was made anew often enough.
            WaitTimeout: If it takes too long.
        """
        hosts = self._hosts
        deadline = time.monotonic() + timeout_s
        readiness = Readiness(hosts.spec.name, self._policy)
        while True:
            sight, nodes = hosts.look()
            now = time.monotonic()
            action = readiness.next(sight, now)
            if now > deadline and not isinstance(action, Done):
                what = f"the {sight.expected} hosts of {hosts.spec.name} to join the Ray cluster"
                raise WaitTimeout(f"{what} ({sight.joined} have, it is {sight.state})", timeout_s)
            match action:
                case Done():
                    self._say(f"Ray already started on each of {sight.expected} hosts.")
                    return nodes
                case Create():
                    hosts.create_missing(deadline - now, patient=patient)
                case Rejoin():
                    hosts.rejoin_if_ready()
                case Delete():
                    self._say(f"{action.reason}: it is made anew")
                    hosts.delete_if_there(deadline - now)
                case GiveUp():
                    raise RayError(action.reason)
                case Wait():
                    if action.text:
                        self._say(action.text)
                    time.sleep(action.pause_s)

    # --- jobs ---

    def run(
        self,
        job: RankJob,
        *,
        restarts: RestartPolicy | None = None,
        tell: TellLine | None = None,
        ready_timeout_s: float = 3600.0,
    ) -> None:
        """Runs a job with a rank on every host, to its end.

        Args:
            job: What is run.
            restarts: How often it is tried again; default: never.
            tell: Is given each line that a rank prints.
            ready_timeout_s: How long the hosts may take to be there, for each attempt, in seconds.

        Raises:
            UsageError: If a directory of it cannot be made or written.
            RayJobError: If it has failed, and is not tried again.
            NoRayHeadError: If the head of the Ray cluster is lost, and it is not tried again.
            WaitTimeout: If its deadline is over.
        """
        course = JobRun(
            job,
            self._hosts,
            lambda timeout_s, patient: self.ensure_ready(timeout_s=timeout_s, patient=patient),
            restarts=restarts or RestartPolicy(),
            log_dir=self._log_dir,
            tell=tell,
            say=self._say,
        )
        course.run(ready_timeout_s)

    def jobs(self) -> dict[int, tuple[RankView, list[str]]]:
        """The newest job of each rank on this TPU, and its command."""
        name = self._hosts.spec.name
        found = [one for one in self.cluster.jobs() if one.metadata.get(TPU_META) == name]
        return {
            int(one.metadata[RANK_META]): (one.view, json.loads(one.metadata["command"]))
            for one in found
        }
