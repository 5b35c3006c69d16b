"""A job with a rank on every host of a TPU, over all its attempts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

from regrow.errors import NoRayHeadError, RayError, RayJobError, RegrowError, WaitTimeout
from regrow.ray.attempts import Attempt, RankView, Verdict, told
from regrow.ray.causes import output_tail, why
from regrow.ray.cluster import RayJob, RayNode
from regrow.ray.directories import require_writable
from regrow.ray.fence import AttemptId, Guard, attempt_key, lost_key
from regrow.ray.hosts import RayHosts
from regrow.ray.jobs import JOB_META, TOKEN_META, TPU_META, RankJob
from regrow.ray.logs import LogKeeper, TellLine
from regrow.ray.restarts import Again, Budgets, RestartPolicy
from regrow.ray.silence import await_head, heard
from regrow.ray.tpu import Say

Ready = Callable[[float, bool], Mapping[int, RayNode]]
"""Waits so many seconds for the hosts, patiently or not."""

_LOOK_S: Final = 0.5
_ASK_S: Final = 0.1
_STOP_S: Final = 15.0
_CLAIM_S: Final = 30.0
_LOG_S: Final = 30.0
_LOST_LOG_S: Final = 0.2
_FIRST_PORT: Final = 20_000
_PORTS: Final = 10_000


@final
class JobRun:
    """Runs one job to its end."""

    def __init__(
        self,
        job: RankJob,
        hosts: RayHosts,
        ready: Ready,
        *,
        restarts: RestartPolicy,
        log_dir: Path,
        tell: TellLine | None,
        say: Say,
    ) -> None:
        """Starts nothing yet.

        Args:
            job: What is run.
            hosts: Where.
            ready: Waits until they are there.
            restarts: How often it is tried again.
            log_dir: Where logs of ranks are kept.
            tell: Is given each line that a rank prints.
            say: Is told what is done.
        """
        self._job = job
        self._hosts = hosts
        self._cluster = hosts.cluster
        self._ready = ready
        self._budgets = Budgets(restarts, time.monotonic())
        self._log_dir = log_dir
        self._tell = tell
        self._say = say
        self._ids: dict[int, str] = {}
        self._logs: LogKeeper | None = None

    def run(self, ready_timeout_s: float) -> None:
        """Makes one attempt after the other.

        Args:
            ready_timeout_s: How long the hosts may take to be there, for each, in seconds.

        Raises:
            UsageError: If the directory or that of the logs cannot be made or written.
            RayJobError: If it has failed, and is not tried again.
            NoRayHeadError: If the head of the Ray cluster is lost, and it is not tried again.
            WaitTimeout: If its deadline is over.
        """
        self._job.prepare()
        require_writable(self._log_dir, "logs")
        try:
            self._run(ready_timeout_s)
        except BaseException:
            # Nobody waits for them any more.
            self._stop_all()
            raise
        finally:
            self._end_logs()

    def _run(self, ready_timeout_s: float) -> None:
        name, budgets = self._job.name, self._budgets
        number = 0
        while True:
            number += 1
            left_s = budgets.left_s(time.monotonic())
            if left_s <= 0:
                raise WaitTimeout(f"job {name} to end", budgets.deadline_s)
            try:
                nodes = self._ready(min(ready_timeout_s, left_s), number > 1)
                verdict, text = self._attempt(number, nodes)
            except NoRayHeadError as error:
                self._await_head(error, ready_timeout_s)
                continue
            decision = budgets.after(verdict.kind, time.monotonic())
            if isinstance(decision, Again):
                self._say(f"Attempt {number} of {name} is over ({text}): it is tried again")
                time.sleep(decision.pause_s)
                continue
            if decision.succeeded:
                self._say(f"Job {name}: all {self._hosts.number} ranks SUCCEEDED")
                return
            status = verdict.exit_code or 1
            raise RayJobError(f"job {name} failed: {text}; {decision.why}", status)

    def _await_head(self, lost: NoRayHeadError, timeout_s: float) -> None:
        """Waits for a head that is lost to be there again; for the job that is as a lost host."""
        now = time.monotonic()
        # Nobody could stop its ranks; they end by themselves.
        self._ids = {}
        if not isinstance(self._budgets.after("preempted", now), Again):
            raise lost
        limit_s = min(timeout_s, self._budgets.left_s(now))
        self._say(f"{lost}; waiting for it, {limit_s:.0f} s at most")
        await_head(self._cluster, limit_s)
        self._say(f"The Ray head at {self._cluster.address} answers again")

    def _attempt(self, number: int, nodes: Mapping[int, RayNode]) -> tuple[Verdict, str]:
        """One attempt; how it ended, and why in one line."""
        token = secrets.token_hex(8)
        self._fence(token)
        self._end_logs()
        directory = self._log_dir / self._job.name / f"attempt-{number}-{token[:6]}"
        logs = self._logs = LogKeeper(self._cluster, directory, self._tell)
        self._submit(number, token, nodes)
        self._say(f"Queued {len(self._ids)} jobs; their logs are in {directory}")
        verdict = self._watch(token, nodes, logs)
        self._settle(verdict, logs)
        if verdict.kind == "succeeded":
            return verdict, ""
        if verdict.kind == "setup":
            logs.add(verdict.rank, output_tail(verdict.cause))
        cause = why(verdict.cause, logs.tail(verdict.rank))
        self._say(f"Detected job of rank {verdict.rank} {verdict.kind}: {cause}")
        return verdict, f"{verdict.kind}, rank {verdict.rank}: {cause}"

    def _settle(self, verdict: Verdict, logs: LogKeeper) -> None:
        """Ends what is left of an attempt."""
        if verdict.kind == "preempted":
            # While its host comes back: the next attempt waits for their end, and takes their last words.
            for job_id in self._ids.values():
                self._stop(job_id)
            return
        if verdict.kind != "succeeded":
            self._stop_all()
        logs.settle(_LOG_S)

    def _end_logs(self) -> None:
        logs, self._logs = self._logs, None
        if logs is not None:
            # A node that is gone says no more.
            logs.settle(_LOST_LOG_S)
            logs.close()

    # --- fences ---

    def _fence(self, token: str) -> None:
        """Ends what is left of earlier attempts, and makes this the one that may write."""
        job = self._job
        self._cluster.keys.put(attempt_key(job.name), token)
        self._clean_stale(token)
        if job.directory is not None:
            # Ranks on hosts that Ray cannot reach any more end by this token at the latest.
            Guard(Path(job.directory)).claim(token, timeout_s=_CLAIM_S)

    def _clean_stale(self, token: str) -> None:
        """Stops jobs of earlier attempts, and waits until they have ended."""
        name, tpu = self._job.name, self._hosts.spec.name

        def is_stale(one: RayJob) -> bool:
            told_by = one.metadata
            ours = told_by.get(JOB_META) == name or told_by.get(TPU_META) == tpu
            return ours and told_by.get(TOKEN_META) != token

        found = [one for one in self._cluster.jobs() if one.runs and is_stale(one)]
        if not found:
            return
        self._say(f"Requested to clean up {len(found)} stale jobs from previous failures.")
        for one in found:
            self._stop(one.id)
        self._await_end(is_stale, "stale jobs")

    def _await_end(self, which: Callable[[RayJob], bool], what: str) -> None:
        deadline = time.monotonic() + _STOP_S
        while True:
            alive = {node.id for node in self._hosts.nodes()}
            running = [one for one in self._cluster.jobs() if one.runs and which(one)]
            # Ray may take long to see that the job of a dead node has ended: it has.
            # One that has no place yet would be refused by the token if it ever got one.
            if not [one for one in running if one.view.node in alive]:
                return
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{len(running)} {what} to end", _STOP_S)
            time.sleep(_LOOK_S)

    # --- ranks ---

    def _submit(self, number: int, token: str, nodes: Mapping[int, RayNode]) -> None:
        """Submits a job for each rank."""
        job, hosts = self._job, self._hosts
        self._ids = {}
        generation = hosts.generation()
        meeting = f"{nodes[0].address}:{_FIRST_PORT + int(token[:6], 16) % _PORTS}"
        for rank in range(hosts.number):
            attempt = AttemptId(
                job=job.name,
                token=token,
                number=number,
                rank=rank,
                ranks=hosts.number,
                directory="" if job.directory is None else str(Path(job.directory).absolute()),
            )
            self._ids[rank] = f"regrow-{job.name}-{token[:6]}-{rank}"
            self._cluster.submit(
                job.entrypoint(),
                job_id=self._ids[rank],
                resources={hosts.resource(generation, rank): 1},
                metadata=job.metadata(hosts.spec.name, attempt),
                runtime_env=job.runtime_env(attempt, self._variables(rank, meeting)),
            )

    def _variables(self, rank: int, meeting: str) -> dict[str, str]:
        """What a rank is told; on hosts of TPUs JAX itself finds the others."""
        return {
            "REGROW_RANK": str(rank),
            "REGROW_RANKS": str(self._hosts.number),
            "REGROW_COORDINATOR_ADDRESS": meeting,
        }

    def _watch(self, token: str, nodes: Mapping[int, RayNode], logs: LogKeeper) -> Verdict:
        homes = {rank: node.id for rank, node in nodes.items()}
        attempt = Attempt(self._hosts.number, homes=homes)
        ranks = {job_id: rank for rank, job_id in self._ids.items()}
        followed: set[int] = set()
        views: dict[int, RankView] = {}
        while True:
            jobs = heard(self._cluster.jobs)
            before, views = views, {ranks[one.id]: one.view for one in jobs if one.id in ranks}
            lost = homes.get(self._lost_rank(token))
            if lost is not None:
                self._hosts.lose(lost)
            alive = frozenset(node.id for node in self._hosts.nodes())
            for rank in sorted(set(views) - followed):
                if views[rank].node is not None:
                    followed.add(rank)
                    logs.follow(rank, self._ids[rank])
            self._tell_states(before, views)
            verdict = attempt.judge(views, alive, time.monotonic())
            if verdict is not None:
                return verdict
            self._check_deadline(told(views))
            self._pause(token)

    def _tell_states(self, before: Mapping[int, RankView], views: Mapping[int, RankView]) -> None:
        """Tells the state of each job that has another one than before, and counts them all."""
        changed = [
            rank
            for rank, view in sorted(views.items())
            if rank not in before or before[rank].state != view.state
        ]
        for rank in changed:
            self._say(f"[ADMIN]: {self._ids[rank]}: Status is {views[rank].state}")
        if changed:
            self._say(f"Job status: {told(views)}")

    def _check_deadline(self, text: str) -> None:
        if self._budgets.left_s(time.monotonic()) <= 0:
            what = f"job {self._job.name} to end ({text})"
            raise WaitTimeout(what, self._budgets.deadline_s)

    def _lost_rank(self, token: str) -> int:
        """A rank that has told that its raylet has ended; -1: none."""
        told_last = heard(lambda: self._cluster.keys.get(lost_key(self._job.name))) or ""
        attempt, _, rank = told_last.partition(" ")
        return int(rank) if attempt == token else -1

    def _pause(self, token: str) -> None:
        """Until the next look, or a rank tells that its raylet has ended."""
        end = time.monotonic() + _LOOK_S
        while time.monotonic() < end:
            time.sleep(_ASK_S)
            if self._lost_rank(token) >= 0:
                return

    def _stop_all(self) -> None:
        """Ends what is left of an attempt; a host that is gone has ended it by itself."""
        ours = set(self._ids.values())
        if not ours:
            return
        for job_id in ours:
            self._stop(job_id)
        try:
            self._await_end(lambda one: one.id in ours, f"ranks of {self._job.name}")
        except (RegrowError, OSError) as error:
            self._say(f"some ranks of {self._job.name} may run still: {error}")

    def _stop(self, job_id: str) -> None:
        try:
            self._cluster.stop(job_id)
        except (RayError, NoRayHeadError) as error:
            self._say(f"{job_id} could not be stopped: {error}")
