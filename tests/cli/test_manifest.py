"""`regrow manifest` from the command line."""

from __future__ import annotations

import pytest
import yaml

from regrow.cli import main
from regrow.jobs.priorities import parse_classes

JOBSET = ("manifest", "jobset", "train", "--image", "regrow:1")
SCRATCH = (*JOBSET, "--cpu", "4", "--allow-no-token", "--gcs_scratch_location")


def test_what_is_printed_is_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--tpu", "v5e:4x4", "--spare-slices", "1", "--token-secret", "token")
    assert main([*JOBSET, *more, "--", "python", "train.py", "--steps", "5"]) == 0
    text, said = capsys.readouterr()
    assert "hosts compute on CPU devices only" in said
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    assert kinds == ["PriorityClass", "JobSet", "JobSet"]
    assert "&id" not in text
    assert "--steps" in text


def test_a_printed_priority_class_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--value", "2000", "--description", "urgent: yes", "--never-preempt")
    assert main(["manifest", "priorityclass", "high", *options]) == 0
    one = parse_classes(capsys.readouterr().out).find("high")
    assert (one.value, one.description, one.preempts) == (2000, "urgent: yes", False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*JOBSET, "--allow-no-token", "--", "a"), "one of --tpu, --gpu and --cpu"),
        ((*JOBSET, "--cpu", "4", "--", "a"), "--token-secret"),
        ((*JOBSET, "--tpu", "v5p:9x9x9", "--allow-no-token", "--", "a"), "no v5p slice"),
        ((*JOBSET, "--tpu", "v5p:2x2x2", "--hosts-per-slice", "2", "--", "a"), "its topology"),
        ((*JOBSET, "--cpu", "0", "--allow-no-token", "--", "a"), "from 1 up"),
        ((*JOBSET, "--cpu", "4"), "COMMAND"),
        ((*SCRATCH, "nosuch://x", "--", "a"), "nosuch://x is no storage that is known"),
        ((*SCRATCH, "gs:/bucket", "--", "a"), "gs:/bucket is no URL"),
        (("manifest", "priorityclass", "high", "--value", "2000000000"), "whole number"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("regrow: ")
    assert printed.err.count("\n") == 1
    assert text in printed.err
