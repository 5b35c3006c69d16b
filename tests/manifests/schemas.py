"""The published schemas, as packages carry them: Kubernetes' own, and JobSet's as Kubeflow has it."""

from __future__ import annotations

import warnings
from typing import Any

import kubernetes_validate

with warnings.catch_warnings():
    # Generated code for an older pydantic.
    warnings.simplefilter("ignore")
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

# Sidecars came with 1.29; the other is the newest that the package knows.
OLDEST, NEWEST = "1.29", kubernetes_validate.latest_version()


def check(document: dict[str, Any]) -> None:
    """Raises unless a document is what its kind says, without a field that the schema lacks."""
    if document["kind"] == "JobSet":
        _check_jobset(document)
        return
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(document, version, strict=True)


def _check_jobset(document: dict[str, Any]) -> None:
    # The models leave out what they do not know: whatever does not come back is unknown.
    again = JobsetV1alpha2JobSet.from_dict(document).to_dict()
    assert again == document, "there are fields that JobSet does not know"
    for job in document["spec"]["replicatedJobs"]:
        metadata = {"name": f"{document['metadata']['name']}-{job['name']}-0"}
        template = job["template"]
        check(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": template.get("metadata", {}) | metadata,
                "spec": template["spec"],
            }
        )
