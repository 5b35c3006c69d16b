"""A job over slices as a JobSet (jobset.x-k8s.io/v1alpha2), with what it needs beside it.

The schema: github.com/kubernetes-sigs/jobset. A JobSet that is elastic keeps its head while pods of a
slice fail or are preempted, and the slice comes back by its own Job; one that is not is started anew
as a whole, by its failure policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from regrow.errors import UsageError
from regrow.jobs.priorities import PriorityClass, check_object_name
from regrow.manifests.nodes import Nodes
from regrow.manifests.pods import head_pod, program_pod, spare_pod, worker_pod
from regrow.suspend.storage import check_scheme

Controller = Literal["single", "multi"]
API_VERSION: Final = "jobset.x-k8s.io/v1alpha2"
SPARE_PRIORITY: Final = -10
_HEAD: Final = "pathways-head"
_WORKER: Final = "worker"
# The head's address NAME-pathways-head-0-0.NAME is a label, which may have 63 characters.
_LONGEST_NAME: Final = 22
_JOBSET_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SLICE_RESTARTS: Final = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetOptions:
    """What a JobSet is to be like.

    Attributes:
        name: Its name.
        image: The image of all its containers (see the Containerfile).
        nodes: What a slice is made of.
        command: The program and its arguments.
        controller: One program for all slices (single), or one on every host (multi).
        slices: Number of slices.
        spare_slices: Slices beside them that are held for the one that fails.
        num_elastic_instances: Slices that may come and go while the program runs; single only.
        scratch: Where state is kept that outlives the pods, such as gs://bucket/dir; single only.
        priority_class: Name of the PriorityClass of its pods; None: the cluster's default.
        grace_s: Whole seconds between the notice that a pod is to end and its end.
        max_restarts: How often the JobSet is started anew as a whole.
        secret: Secret whose `token` clients and workers present; None: none is asked for.
        namespace: Its namespace; None: that of whoever applies it.
    """

    name: str
    image: str
    nodes: Nodes
    command: Sequence[str]
    controller: Controller = "single"
    slices: int = 1
    spare_slices: int = 0
    num_elastic_instances: int | None = None
    scratch: str | None = None
    priority_class: str | None = None
    grace_s: int = 120
    max_restarts: int = 0
    secret: str | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for what, value, least in (
            ("slices", self.slices, 1),
            ("spare_slices", self.spare_slices, 0),
            ("grace period", self.grace_s, 0),
            ("max_restarts", self.max_restarts, 0),
        ):
            if type(value) is not int or value < least:
                raise UsageError(f"{what} is {value!r}; it must be {least} or more")
        elastic = self.num_elastic_instances
        if elastic is not None and not 0 <= elastic <= self.slices:
            raise UsageError(
                f"num_elastic_instances is {elastic}; it must be from 0 to {self.slices}, the slices"
            )
        if self.controller == "multi" and (elastic is not None or self.scratch is not None):
            raise UsageError(
                "num_elastic_instances and gcs_scratch_location are of the single controller; "
                "a program that runs on every host restarts as a whole"
            )
        if self.scratch is not None:
            check_scheme(self.scratch)
        if not self.command:
            raise UsageError("there is no command for the JobSet to run")

    def _check_names(self) -> None:
        if not _JOBSET_NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise UsageError(
                f"{self.name!r} cannot be the name of a JobSet: use lower-case letters, digits and "
                f"'-', {_LONGEST_NAME} at most, beginning with a letter"
            )
        if not self.image or self.image != "".join(self.image.split()):
            raise UsageError(f"{self.image!r} is no name of an image")
        if self.priority_class is not None:
            check_object_name(self.priority_class, "a priority class")
        if self.secret is not None:
            check_object_name(self.secret, "a secret")

    @property
    def elastic(self) -> bool:
        """Whether it goes on when slices are lost."""
        return bool(self.num_elastic_instances)


def documents(options: JobSetOptions) -> list[dict[str, Any]]:
    """The JobSet; before it, where spare slices are wanted, what holds them."""
    make = _single if options.controller == "single" else _multi
    return [*_spares(options), make(options)]


def _single(options: JobSetOptions) -> dict[str, Any]:
    shared = [] if options.scratch is None else [f"--gcs_scratch_location={options.scratch}"]
    proxy = list(shared)
    if options.grace_s:
        proxy.append(f"--grace={options.grace_s}")
    if options.num_elastic_instances is not None:
        proxy.append(f"--num_elastic_instances={options.num_elastic_instances}")
    head = head_pod(
        image=options.image,
        nodes=options.nodes,
        slices=options.slices,
        flags=proxy,
        command=options.command,
        secret=options.secret,
    )
    worker = worker_pod(
        image=options.image,
        nodes=options.nodes,
        slices=options.slices,
        flags=shared,
        secret=options.secret,
    )
    jobs = [
        _replicated(_HEAD, 1, _job(head, 1, options)),
        _replicated(_WORKER, options.slices, _slice_job(worker, options), options.nodes),
    ]
    spec = _spec(options, jobs, coordinator=_HEAD)
    spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [_HEAD]}
    return _document(options, options.name, spec)


def _multi(options: JobSetOptions) -> dict[str, Any]:
    program = program_pod(
        image=options.image,
        nodes=options.nodes,
        slices=options.slices,
        command=options.command,
    )
    job = _job(program, options.nodes.hosts, options)
    jobs = [_replicated(_WORKER, options.slices, job, options.nodes)]
    return _document(options, options.name, _spec(options, jobs, coordinator=_WORKER))


def _spares(options: JobSetOptions) -> list[dict[str, Any]]:
    """Pods of the lowest priority that hold whole slices: the hot-swap takes their nodes."""
    if not options.spare_slices:
        return []
    name = f"{options.name}-spare"
    priority = PriorityClass(
        name=name,
        value=SPARE_PRIORITY,
        description=f"Holds spare slices for {options.name}; any other pod may take them.",
        preemption_policy="Never",
    )
    nodes = options.nodes
    pod = spare_pod(image=options.image, nodes=nodes)
    pod |= {"restartPolicy": "Never", "priorityClassName": name}
    # The nodes are to be free at once: there is nothing to save.
    pod["terminationGracePeriodSeconds"] = 0
    job = _completing(pod, nodes.hosts) | _forgiving()
    job["backoffLimit"] = nodes.hosts * _SLICE_RESTARTS
    jobs = [_replicated("spare", options.spare_slices, job, nodes)]
    return [priority.to_manifest(), _document(options, name, {"replicatedJobs": jobs})]


def _spec(
    options: JobSetOptions, jobs: list[dict[str, Any]], *, coordinator: str
) -> dict[str, Any]:
    return {
        "coordinator": {"replicatedJob": coordinator, "jobIndex": 0, "podIndex": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": options.max_restarts},
        "replicatedJobs": jobs,
    }


def _document(options: JobSetOptions, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": metadata, "spec": spec}


def _replicated(
    name: str, replicas: int, job: dict[str, Any], nodes: Nodes | None = None
) -> dict[str, Any]:
    template: dict[str, Any] = {"spec": job}
    if nodes is not None and nodes.pool_label is not None:
        # One Job, one slice: never two on a part each.
        label = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        template = {"metadata": {"annotations": {label: nodes.pool_label}}} | template
    return {"name": name, "replicas": replicas, "template": template}


def _slice_job(pod: dict[str, Any], options: JobSetOptions) -> dict[str, Any]:
    """A preemption may lose nothing, so it is forgiven to every slice; a failure to an elastic job's."""
    job = _job(pod, options.nodes.hosts, options) | _forgiving()
    if options.elastic:
        job["backoffLimit"] = options.nodes.hosts * _SLICE_RESTARTS
    return job


def _job(pod: dict[str, Any], pods: int, options: JobSetOptions) -> dict[str, Any]:
    pod = pod | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
    }
    if options.priority_class is not None:
        pod["priorityClassName"] = options.priority_class
    return _completing(pod, pods)


def _completing(pod: dict[str, Any], pods: int) -> dict[str, Any]:
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _forgiving() -> dict[str, Any]:
    """A slice that is preempted comes back by itself, and that counts for nothing."""
    return {
        # Two pods of one index would be two incarnations of one host.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
    }
