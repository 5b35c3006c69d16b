"""The hosts of a TPU that are to be nodes of a Ray cluster: made, seen, joined again, given up."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from regrow.errors import CloudApiError, Code, RayError
from regrow.ray.cluster import RayCluster, RayNode
from regrow.ray.readiness import Sight
from regrow.ray.silence import heard
from regrow.ray.startup import (
    AGAIN_VARIABLE,
    GENERATION_KEY,
    NAMESPACE,
    RESULT_KEY,
    Joining,
    rank_resource,
)
from regrow.ray.tpu import Say, TpuController

# ray start waits 30 s for a raylet that may come up later all the same.
_LATE: Final = "timed out during startup"
# Its words, and ours, for a head that died while a host joined, or that the host cannot reach.
_NO_HEAD: Final = re.compile(
    r"connect to GCS (within|at)|from GCS server|waiting for GCS|no Ray head answers|"
    r"Ray head at \S+ does not answer"
)
_STOCKOUT_S: Final = 15.0
_PAUSE_S: Final = 0.5


@final
class RayHosts:
    """The hosts of one TPU.

    Attributes:
        tpu: The TPU.
        cluster: The Ray cluster.
        spec: What the TPU is to be like when it is made.
        number: How many there are to be.
    """

    def __init__(
        self, tpu: TpuController, cluster: RayCluster, *, startup_script: str = "", say: Say
    ) -> None:
        """Asks nothing yet.

        Args:
            tpu: The TPU.
            cluster: That its hosts are to join.
            startup_script: What its hosts run before they join; a shell script.
            say: Is told what is done.

        Raises:
            UsageError: If there is no such accelerator.
        """
        self.tpu = tpu
        self.cluster = cluster
        self.spec = tpu.spec
        self.number = tpu.spec.hosts
        self._script = startup_script
        self._say = say
        self._lost: set[str] = set()
        self._complete = ""
        self._refused = False

    # --- what is there ---

    def nodes(self) -> list[RayNode]:
        """The nodes of the cluster that are alive, without those that only Ray takes for that."""
        return [node for node in heard(self.cluster.nodes) if node.id not in self._lost]

    def lose(self, node: str) -> None:
        """Takes a node for dead, which Ray will find out, too."""
        self._lost.add(node)

    def joined(self) -> dict[int, RayNode]:
        """The hosts that are nodes of the cluster, by rank."""
        generation = self.generation()
        return self._joined(generation) if generation else {}

    def generation(self) -> str:
        """Names the present set of hosts; empty if there is none, or it is none of ours."""
        return _generation(self.tpu.view().nodes)

    def resource(self, generation: str, rank: int) -> str:
        """Ray's resource that only one host has."""
        return rank_resource(self.spec.name, generation, rank)

    def _joined(self, generation: str) -> dict[int, RayNode]:
        nodes = self.nodes()
        return {
            rank: node
            for rank in range(self.number)
            for node in nodes
            if self.resource(generation, rank) in node.resources
        }

    def look(self) -> tuple[Sight, dict[int, RayNode]]:
        """What is to be seen of the hosts, and those that have joined.

        Raises:
            RayError: If the TPU was made by somebody else, or has another number of hosts.
        """
        view = self.tpu.view()
        if view.condition != "ready":
            return Sight(view.condition, view.state, 0, self.number), {}
        generation = _generation(view.nodes)
        if not generation:
            raise self._refusal("was not made by regrow, so its hosts cannot be told apart")
        if generation != self._complete:
            self._check_shape(view.nodes)
        nodes = self._joined(generation)
        if len(nodes) == self.number:
            self._complete = generation
            return Sight("ready", view.state, len(nodes), self.number), nodes
        error, lapsed = how_scripts_went(self._script_results(nodes))
        lost = generation == self._complete
        return Sight("ready", view.state, len(nodes), self.number, error, lapsed, lost), nodes

    def _check_shape(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """A TPU of that name that has other hosts is somebody's: it is not made anew for us."""
        there = sum(len(node.get("networkEndpoints", ())) for node in nodes)
        if there != self.number:
            shape = f"{there} hosts, not {self.number}"
            raise self._refusal(f"is there already, and has another shape ({shape})")

    def _refusal(self, why: str) -> RayError:
        self._refused = True
        return RayError(f"TPU {self.spec.name} {why}: delete it, or choose another name")

    def _script_results(self, present: Mapping[int, RayNode]) -> dict[int, tuple[str, str]]:
        """The exit status, or "running", and the last words of startup scripts of missing hosts."""
        try:
            told_by_hosts = self.tpu.guest_attributes(NAMESPACE)
        except CloudApiError:
            # Not every project lets guests tell something; then the deadline must do.
            return {}
        results: dict[int, tuple[str, str]] = {}
        for rank, attributes in enumerate(told_by_hosts):
            if rank not in present:
                status, _, text = attributes.get(RESULT_KEY, "running").partition(" ")
                results[rank] = (status, text)
        return results

    # --- what is done ---

    def create(self, *, timeout_s: float = 1800.0) -> None:
        """Makes the TPU, with a startup script that joins the cluster.

        Raises:
            CloudApiError: If it is there already, or cannot be made.
            WaitTimeout: If it is not READY in time.
        """
        generation = secrets.token_hex(4)
        metadata = {
            "startup-script": self._joining(generation).text(),
            GENERATION_KEY: generation,
            "enable-guest-attributes": "TRUE",
        }
        spec = self.spec.with_metadata(metadata)
        maker = TpuController(self.tpu.client, self.tpu.place, spec, say=self._say)
        maker.create(timeout_s=timeout_s)

    def _joining(self, generation: str) -> Joining:
        return Joining(
            tpu=self.spec.name,
            generation=generation,
            hosts_per_slice=self.spec.accelerator.hosts,
            head=self.cluster.address,
            ray_version=self.cluster.version,
            local=self.tpu.is_local,
            chips=self.spec.accelerator.chips_per_host,
            script=self._script,
        )

    def rejoin(self) -> None:
        """Has hosts of a READY TPU that are no nodes of the cluster join again, as they are.

        Raises:
            CloudApiError: If a slice is not READY.
        """
        generation = self.generation()
        present = self._joined(generation)
        missing = [host for rank, host in enumerate(self.tpu.hosts()) if rank not in present]
        if missing:
            self._say(f"Starting Ray again on {len(missing)} hosts of {self.spec.name}")
            script = self._joining(generation).text()
            user = "" if self.tpu.is_local else "sudo "
            self.tpu.run(
                f"{user}env {AGAIN_VARIABLE}=1 bash -c {shlex.quote(script)}",
                lambda *_: None,
                hosts=missing,
            )

    def delete(self, *, timeout_s: float = 600.0) -> bool:
        """Deletes the TPU; False if there was none, or it was refused: then it is somebody else's."""
        return not self._refused and self.tpu.delete(timeout_s=timeout_s)

    def rejoin_if_ready(self) -> None:
        """Has hosts join again, unless the TPU is no longer READY."""
        try:
            self.rejoin()
        except CloudApiError as error:
            # It is no longer READY: the next look tells.
            if error.code not in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                raise

    def create_missing(self, timeout_s: float, *, patient: bool) -> None:
        """Makes the TPU; whoever is patient is not told that there is no capacity."""
        self._say("TPU is not found, create tpu...")
        try:
            self.create(timeout_s=max(1.0, timeout_s))
        except CloudApiError as error:
            if patient and error.code is Code.RESOURCE_EXHAUSTED:
                self._say(f"{error}: tried again in {_STOCKOUT_S:g} s")
                time.sleep(min(_STOCKOUT_S, max(0.0, timeout_s)))
            # Somebody else was quicker, or deletes what we make: the next look tells.
            elif error.code in (Code.ALREADY_EXISTS, Code.ABORTED):
                time.sleep(_PAUSE_S)
            else:
                raise

    def delete_if_there(self, timeout_s: float) -> None:
        """Deletes the TPU, or leaves that to somebody else who does."""
        try:
            self.delete(timeout_s=max(1.0, timeout_s))
        except CloudApiError as error:
            # Somebody else deletes it, too.
            if error.code not in (Code.NOT_FOUND, Code.ABORTED, Code.FAILED_PRECONDITION):
                raise
            time.sleep(_PAUSE_S)


def how_scripts_went(results: Mapping[int, tuple[str, str]]) -> tuple[str, bool]:
    """What a startup script has failed with, and whether none is under way any more.

    Those that have found no head are no failure while others go on: all are to join again then.

    Args:
        results: The exit status, or "running", and the last words of each, by rank.
    """
    under_way, headless, failed = False, "", ""
    for rank, (status, text) in results.items():
        said = f"host {rank}: exit status {status}: {text}"
        if status == "running" or (status != "0" and _LATE in text):
            under_way = True
        elif status != "0" and _NO_HEAD.search(text):
            headless = headless or said
        elif status != "0":
            failed = failed or said
    if failed or under_way:
        return failed, False
    return headless, bool(results)


def _generation(nodes: tuple[dict[str, object], ...]) -> str:
    for node in nodes:
        metadata = node.get("metadata")
        if isinstance(metadata, Mapping):
            return str(metadata.get(GENERATION_KEY, ""))
    return ""
