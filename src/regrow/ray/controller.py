"""`RayTpuController`: a TPU whose hosts are nodes of a Ray cluster, and jobs with a rank on each."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import (
    CloudApiError,
    Code,
    NoRayHeadError,
    RayError,
    RayJobError,
    RegrowError,
    WaitTimeout,
)
from regrow.ray.attempts import Attempt, RankView, Verdict, told
from regrow.ray.causes import why
from regrow.ray.cluster import RayCluster, RayJob, RayNode
from regrow.ray.fence import AttemptId, Guard, attempt_key
from regrow.ray.jobs import JOB_META, RANK_META, TOKEN_META, TPU_META, RankJob
from regrow.ray.logs import LogKeeper, TellLine
from regrow.ray.readiness import (
    Create,
    Delete,
    Done,
    GiveUp,
    JoinPolicy,
    Readiness,
    Rejoin,
    Sight,
    Wait,
)
from regrow.ray.restarts import Again, Budgets, RestartPolicy
from regrow.ray.silence import await_head, heard
from regrow.ray.startup import (
    AGAIN_VARIABLE,
    GENERATION_KEY,
    NAMESPACE,
    RESULT_KEY,
    Joining,
    check_tpu_name,
    rank_resource,
)
from regrow.ray.tpu import Say, TpuController, TpuSpec

_LOOK_S: Final = 0.5
# ray start waits 30 s for a raylet that may come up later all the same.
_LATE: Final = "timed out during startup"
_STOP_S: Final = 15.0
_CLAIM_S: Final = 30.0
_LOG_S: Final = 30.0
_LOST_LOG_S: Final = 1.0
_STOCKOUT_S: Final = 15.0
_FIRST_PORT: Final = 20_000
_PORTS: Final = 10_000


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
            UsageError: If there is no such accelerator, or the name cannot name a resource.
        """
        check_tpu_name(spec.name)
        self._hosts = spec.hosts
        self._spec = spec
        self._client = client
        self._place = place
        self.cluster = cluster
        self._script = startup_script
        self._policy = policy or JoinPolicy()
        self._log_dir = log_dir or Path("regrow-ray-logs")
        self._say = say
        self.tpu = TpuController(client, place, spec, say=say)

    # --- hosts ---

    def joined(self) -> dict[int, RayNode]:
        """The hosts of the TPU that are nodes of the cluster, by rank.

        Hosts of a TPU of that name that was there before are none of them.
        """
        generation = self._generation(self.tpu.view().nodes)
        return self._joined(generation) if generation else {}

    def _joined(self, generation: str) -> dict[int, RayNode]:
        nodes = heard(self.cluster.nodes)
        return {
            rank: node
            for rank in range(self._hosts)
            for node in nodes
            if rank_resource(self._spec.name, generation, rank) in node.resources
        }

    @staticmethod
    def _generation(nodes: tuple[dict[str, object], ...]) -> str:
        for node in nodes:
            metadata = node.get("metadata")
            if isinstance(metadata, Mapping):
                return str(metadata.get(GENERATION_KEY, ""))
        return ""

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
        spec = self._spec.with_metadata(metadata)
        maker = TpuController(self._client, self._place, spec, say=self._say)
        maker.create(timeout_s=timeout_s)

    def _joining(self, generation: str) -> Joining:
        return Joining(
            tpu=self._spec.name,
            generation=generation,
            hosts_per_slice=self._spec.accelerator.hosts,
            head=self.cluster.address,
            ray_version=self.cluster.version,
            local=self.tpu.is_local,
            chips=self._spec.accelerator.chips_per_host,
            script=self._script,
        )

    def rejoin(self) -> None:
        """Has hosts of a READY TPU that are no nodes of the cluster join again, as they are.

        Raises:
            CloudApiError: If a slice is not READY.
        """
        generation = self._generation(self.tpu.view().nodes)
        present = self._joined(generation)
        missing = [host for rank, host in enumerate(self.tpu.hosts()) if rank not in present]
        if missing:
            self._say(f"Starting Ray again on {len(missing)} hosts of {self._spec.name}")
            script = self._joining(generation).text()
            user = "" if self.tpu.is_local else "sudo "
            self.tpu.run(
                f"{user}env {AGAIN_VARIABLE}=1 bash -c {shlex.quote(script)}",
                lambda *_: None,
                hosts=missing,
            )

    def delete(self, *, timeout_s: float = 600.0) -> bool:
        """Deletes the TPU; False if there was none."""
        return self.tpu.delete(timeout_s=timeout_s)

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
        deadline = time.monotonic() + timeout_s
        readiness = Readiness(self._spec.name, self._policy)
        while True:
            sight, nodes = self._look()
            now = time.monotonic()
            action = readiness.next(sight, now)
            if now > deadline and not isinstance(action, Done):
                what = f"the {sight.expected} hosts of {self._spec.name} to join the Ray cluster"
                raise WaitTimeout(f"{what} ({sight.joined} have, it is {sight.state})", timeout_s)
            match action:
                case Done():
                    self._say(f"Ray already started on each of {sight.expected} hosts.")
                    return nodes
                case Create():
                    self._create_missing(deadline - now, patient=patient)
                case Rejoin():
                    self._rejoin_quietly()
                case Delete():
                    self._say(f"{action.reason}: it is made anew")
                    self._delete_quietly(deadline - now)
                case GiveUp():
                    raise RayError(action.reason)
                case Wait():
                    if action.text:
                        self._say(action.text)
                    time.sleep(action.pause_s)

    def _look(self) -> tuple[Sight, dict[int, RayNode]]:
        view = self.tpu.view()
        if view.condition != "ready":
            return Sight(view.condition, view.state, 0, self._hosts), {}
        generation = self._generation(view.nodes)
        if not generation:
            raise RayError(
                f"TPU {self._spec.name} was not made by regrow, so its hosts cannot be told apart: "
                "delete it, or choose another name"
            )
        nodes = self._joined(generation)
        if len(nodes) == self._hosts:
            return Sight("ready", view.state, len(nodes), self._hosts), nodes
        results = self._script_results(nodes)
        failed = [
            f"host {rank}: exit status {status}: {text}"
            for rank, (status, text) in results.items()
            if status not in ("running", "0") and _LATE not in text
        ]
        lapsed = bool(results) and all(status == "0" for status, _ in results.values())
        error = failed[0] if failed else ""
        return Sight("ready", view.state, len(nodes), self._hosts, error, lapsed), nodes

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

    def _rejoin_quietly(self) -> None:
        try:
            self.rejoin()
        except CloudApiError as error:
            # It is no longer READY: the next look tells.
            if error.code not in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                raise

    def _create_missing(self, timeout_s: float, *, patient: bool) -> None:
        self._say("TPU is not found, create tpu...")
        try:
            self.create(timeout_s=max(1.0, timeout_s))
        except CloudApiError as error:
            if patient and error.code is Code.RESOURCE_EXHAUSTED:
                self._say(f"{error}: tried again in {_STOCKOUT_S:g} s")
                time.sleep(min(_STOCKOUT_S, max(0.0, timeout_s)))
            # Somebody else was quicker, or deletes what we make: the next look tells.
            elif error.code not in (Code.ALREADY_EXISTS, Code.NOT_FOUND, Code.ABORTED):
                raise

    def _delete_quietly(self, timeout_s: float) -> None:
        try:
            self.delete(timeout_s=max(1.0, timeout_s))
        except CloudApiError as error:
            # Somebody else deletes it, too.
            if error.code not in (Code.NOT_FOUND, Code.ABORTED, Code.FAILED_PRECONDITION):
                raise
            time.sleep(_LOOK_S)

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
            RayJobError: If it has failed, and is not tried again.
            NoRayHeadError: If the head of the Ray cluster is lost, and it is not tried again.
            WaitTimeout: If its deadline is over.
        """
        policy = restarts or RestartPolicy()
        budgets = Budgets(policy, time.monotonic())
        number = 0
        while True:
            number += 1
            left_s = budgets.left_s(time.monotonic())
            if left_s <= 0:
                raise WaitTimeout(f"job {job.name} to end", policy.deadline_s)
            limit_s = min(ready_timeout_s, left_s)
            try:
                nodes = self.ensure_ready(timeout_s=limit_s, patient=number > 1)
                verdict, text = self._attempt(job, number, nodes, budgets, tell)
            except NoRayHeadError as error:
                self._await_head(error, budgets, ready_timeout_s)
                continue
            decision = budgets.after(verdict.kind, time.monotonic())
            if isinstance(decision, Again):
                self._say(f"Attempt {number} of {job.name} is over ({text}): it is tried again")
                time.sleep(decision.pause_s)
                continue
            if decision.succeeded:
                self._say(f"Job {job.name}: all {self._hosts} ranks SUCCEEDED")
                return
            status = verdict.exit_code or 1
            raise RayJobError(f"job {job.name} failed: {text}; {decision.why}", status)

    def _await_head(self, lost: NoRayHeadError, budgets: Budgets, timeout_s: float) -> None:
        """Waits for a head that is lost to be there again; for the job that is as a lost host."""
        now = time.monotonic()
        if not isinstance(budgets.after("preempted", now), Again):
            raise lost
        limit_s = min(timeout_s, budgets.left_s(now))
        self._say(f"{lost}; waiting for it, {limit_s:.0f} s at most")
        await_head(self.cluster, limit_s)
        self._say(f"The Ray head at {self.cluster.address} answers again")

    def _attempt(
        self,
        job: RankJob,
        number: int,
        nodes: Mapping[int, RayNode],
        budgets: Budgets,
        tell: TellLine | None,
    ) -> tuple[Verdict, str]:
        """One attempt; how it ended, and why in one line."""
        token = secrets.token_hex(8)
        self._fence(job, token)
        directory = self._log_dir / job.name / f"attempt-{number}-{token[:6]}"
        with LogKeeper(self.cluster, directory, tell) as logs:
            ids: dict[int, str] = {}
            try:
                self._submit(job, number, token, nodes, ids)
                self._say(f"Queued {len(ids)} jobs; their logs are in {directory}")
                verdict = self._watch(job, ids, nodes, logs, budgets)
            except NoRayHeadError:
                # Nobody could stop them; they end by themselves.
                raise
            except BaseException:
                # Nobody waits for them any more.
                self._stop_all(job, ids)
                raise
            if verdict.kind != "succeeded":
                self._stop_all(job, ids)
            # A node that is gone says no more, and its job is to run elsewhere soon.
            logs.settle(_LOST_LOG_S if verdict.kind == "preempted" else _LOG_S)
            if verdict.kind == "succeeded":
                return verdict, ""
            cause = why(verdict.cause, logs.tail(verdict.rank))
            text = f"{verdict.kind}, rank {verdict.rank}: {cause}"
            self._say(f"Detected job of rank {verdict.rank} {verdict.kind}: {cause}")
            return verdict, text

    def _fence(self, job: RankJob, token: str) -> None:
        """Ends what is left of earlier attempts, and makes this the one that may write."""
        self.cluster.put(attempt_key(job.name), token)
        self._clean_stale(job, token)
        if job.directory:
            # Ranks on hosts that Ray cannot reach any more end by this token at the latest.
            Guard(Path(job.directory)).claim(token, timeout_s=_CLAIM_S)

    def _clean_stale(self, job: RankJob, token: str) -> None:
        """Stops jobs of earlier attempts, and waits until they have ended."""

        def is_stale(one: RayJob) -> bool:
            told_by = one.metadata
            ours = told_by.get(JOB_META) == job.name or told_by.get(TPU_META) == self._spec.name
            return ours and told_by.get(TOKEN_META) != token

        found = [one for one in self.cluster.jobs() if one.runs and is_stale(one)]
        if not found:
            return
        self._say(f"Requested to clean up {len(found)} stale jobs from previous failures.")
        for one in found:
            self._stop(one.id)
        self._await_end(is_stale, "stale jobs")

    def _await_end(self, which: Callable[[RayJob], bool], what: str) -> None:
        deadline = time.monotonic() + _STOP_S
        while True:
            alive = {node.id for node in self.cluster.nodes()}
            running = [one for one in self.cluster.jobs() if one.runs and which(one)]
            # Ray may take long to see that the job of a dead node has ended: it has.
            # One that has no place yet would be refused by the token if it ever got one.
            if not [one for one in running if one.view.node in alive]:
                return
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{len(running)} {what} to end", _STOP_S)
            time.sleep(_LOOK_S)

    def _submit(
        self,
        job: RankJob,
        number: int,
        token: str,
        nodes: Mapping[int, RayNode],
        ids: dict[int, str],
    ) -> None:
        """Submits a job for each rank; tells as it goes in `ids` what has been submitted."""
        generation = self._generation(self.tpu.view().nodes)
        meeting = f"{nodes[0].address}:{_FIRST_PORT + int(token[:6], 16) % _PORTS}"
        for rank in range(self._hosts):
            attempt = AttemptId(
                job=job.name,
                token=token,
                number=number,
                rank=rank,
                ranks=self._hosts,
                directory=str(Path(job.directory).absolute()) if job.directory else "",
            )
            ids[rank] = f"regrow-{job.name}-{token[:6]}-{rank}"
            self.cluster.submit(
                job.entrypoint(),
                job_id=ids[rank],
                resources={rank_resource(self._spec.name, generation, rank): 1},
                metadata=job.metadata(self._spec.name, attempt),
                runtime_env=job.runtime_env(attempt, self._variables(rank, meeting)),
            )

    def _variables(self, rank: int, meeting: str) -> dict[str, str]:
        """What a rank is told; on hosts of TPUs JAX itself finds the others."""
        return {
            "REGROW_RANK": str(rank),
            "REGROW_RANKS": str(self._hosts),
            "REGROW_COORDINATOR_ADDRESS": meeting,
        }

    def _watch(
        self,
        job: RankJob,
        ids: Mapping[int, str],
        nodes: Mapping[int, RayNode],
        logs: LogKeeper,
        budgets: Budgets,
    ) -> Verdict:
        attempt = Attempt(len(ids), homes={rank: node.id for rank, node in nodes.items()})
        ranks = {job_id: rank for rank, job_id in ids.items()}
        followed: set[int] = set()
        last = ""
        while True:
            jobs = heard(self.cluster.jobs)
            views = {ranks[one.id]: one.view for one in jobs if one.id in ranks}
            alive = frozenset(node.id for node in heard(self.cluster.nodes))
            for rank in sorted(set(views) - followed):
                if views[rank].node is not None:
                    followed.add(rank)
                    logs.follow(rank, ids[rank])
            text = told(views)
            if text != last:
                self._say(f"Job status: {text}")
                last = text
            verdict = attempt.judge(views, alive, time.monotonic())
            if verdict is not None:
                return verdict
            if budgets.left_s(time.monotonic()) <= 0:
                raise WaitTimeout(f"job {job.name} to end ({text})", budgets.deadline_s)
            time.sleep(_LOOK_S)

    def _stop_all(self, job: RankJob, ids: Mapping[int, str]) -> None:
        """Ends what is left of an attempt; a host that is gone has ended it by itself."""
        ours = set(ids.values())
        for job_id in ours:
            self._stop(job_id)
        try:
            self._await_end(lambda one: one.id in ours, f"ranks of {job.name}")
        except (RegrowError, OSError) as error:
            self._say(f"some ranks of {job.name} may run still: {error}")

    def _stop(self, job_id: str) -> None:
        try:
            self.cluster.stop(job_id)
        except (RayError, NoRayHeadError) as error:
            self._say(f"{job_id} could not be stopped: {error}")

    def jobs(self) -> dict[int, tuple[RankView, list[str]]]:
        """The newest job of each rank on this TPU, and its command."""
        found = [
            one for one in self.cluster.jobs() if one.metadata.get(TPU_META) == self._spec.name
        ]
        return {
            int(one.metadata[RANK_META]): (one.view, json.loads(one.metadata["command"]))
            for one in found
        }
