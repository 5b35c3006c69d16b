"""Priority classes from Kubernetes' own YAML."""

from __future__ import annotations

import pytest
import yaml

from regrow.errors import UsageError
from regrow.jobs.priorities import PriorityClass, parse_classes

# As it stands in the documentation of Pathways.
PAGE = """
kind: PriorityClass
metadata:
  name: high-prior-job
value: 2000
globalDefault: false
description: "This priority class should be used for high priority job."
"""


def test_the_class_of_the_page() -> None:
    one = parse_classes(PAGE).find("high-prior-job")
    assert one == PriorityClass(
        name="high-prior-job",
        value=2000,
        description="This priority class should be used for high priority job.",
    )
    assert one.preempts


def test_several_documents_and_lists() -> None:
    listed = {
        "kind": "List",
        "items": [
            PriorityClass(name="low", value=1, global_default=True).to_manifest(),
            PriorityClass(name="calm", value=2, preemption_policy="Never").to_manifest(),
        ],
    }
    classes = parse_classes(f"{PAGE}---\n{yaml.safe_dump(listed)}---\n")
    assert [one.name for one in classes] == ["high-prior-job", "low", "calm"]
    assert classes.find(None).name == "low"
    assert not classes.find("calm").preempts


def test_without_a_default_a_job_has_priority_zero() -> None:
    assert parse_classes(PAGE).find(None).value == 0


def test_an_unknown_class_names_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"no priority class 'urgent'.*has: high-prior-job"):
        parse_classes(PAGE).find("urgent")


def one(**changes: object) -> str:
    fields = {"kind": "PriorityClass", "metadata": {"name": "a"}, "value": 1} | changes
    return yaml.safe_dump({key: value for key, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no PriorityClass"),
        ("- 1", "is no PriorityClass"),
        ("kind: [", "no YAML"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
        (one(kind="Priority"), "is no PriorityClass"),
        (one(metadata=None), "no metadata.name"),
        (one(metadata={"name": "A_b"}), "cannot be the name"),
        (one(metadata={"name": "system-mine"}), "reserved"),
        (one(value=None), "has no value"),
        (one(value=1_000_000_001), "whole number"),
        (one(value="high"), "whole number"),
        (one(value=True), "whole number"),
        (one(globalDefault="yes"), "true or false"),
        (one(description=3), "no text"),
        (one(preemptionPolicy="Sometimes"), "preemptionPolicy"),
        (one(apiVersion="v1"), "apiVersion"),
        (one(vaule=3), "no such field: vaule"),
        (one() + "---\n" + one(), "two priority classes named 'a'"),
        (
            one(globalDefault=True) + "---\n" + one(metadata={"name": "b"}, globalDefault=True),
            "both the global default",
        ),
    ],
)
def test_a_wrong_class_is_one_clear_line(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error) as caught:
        parse_classes(text, "priorities.yaml")
    assert str(caught.value).startswith("priorities.yaml: ")
    assert "\n" not in str(caught.value)
