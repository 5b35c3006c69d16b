from __future__ import annotations

import json

import pytest

from regrow.cli import main
from regrow.cli.plan import quantity

SEVEN_BILLION = ["--parameters", "7B"]
FOUR_SLICES = ["--accelerator-type", "v4-128", "--num-slices", "4"]


@pytest.fixture
def plan(capsys):
    """Runs the command; returns its exit status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["plan", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_best_strategy_and_its_mesh(plan):
    status, output, errors = plan(*FOUR_SLICES, *SEVEN_BILLION, "--batch-tokens", "2.8M")
    assert (status, errors) == (0, "")
    assert "22,000 FLOP" in output
    assert "352,000 tokens a slice, advised are 700,000 (2,800,000 in all)" in output
    (best,) = (line for line in output.splitlines() if line.startswith(" 1 "))
    assert best.split()[1:3] == ["data", "4"]
    assert "create_hybrid_device_mesh((1, 64, 1), (4, 1, 1))" in output
    assert "--dcn_data_parallelism 4 --ici_fsdp_parallelism 64" in output


@pytest.mark.parametrize("parameters", ["350M", "7B", "1.5T"])
def test_the_size_of_the_model_is_told_as_it_was_given(plan, parameters):
    _, output, _ = plan(*FOUR_SLICES, "--parameters", parameters, "--batch-tokens", "4M")
    assert f" {parameters} parameters" in output


def test_a_pipeline_tells_of_the_batch_that_would_spare_it(plan):
    _, output, _ = plan(*FOUR_SLICES, *SEVEN_BILLION, "--batch-tokens", "1M", "--top", "1")
    assert "'stage'" in output
    assert "a batch of 2,800,000 tokens" in output
    assert " 2 " not in [line[:3] for line in output.splitlines()]


def test_json(plan):
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    status, output, _ = plan(*FOUR_SLICES, *SEVEN_BILLION, "--batch-tokens", "4e6", "--json")
    told = json.loads(output, parse_constant=refuse)
    assert status == 0
    assert told["hardware_flop_per_bit"] == pytest.approx(22_000)
    assert told["strategies"][0]["dcn_mesh_shape"] == [4, 1, 1]
    assert {one["name"] for one in told["strategies"]} >= {"data 4", "fsdp 4", "pipeline 4"}


def test_json_of_one_slice_has_no_infinity(plan):
    _, output, _ = plan(
        "--accelerator-type", "tpu7x-8", *SEVEN_BILLION, "--batch-tokens", "1M", "--json"
    )
    assert "Infinity" not in output


def test_slices_that_a_user_measured(plan):
    status, output, _ = plan(
        *["--chips", "2", "--peak-tflops", "0.1", "--hbm-gb", "8", "--dcn-gbits-per-slice", "1"],
        *["--num-slices", "2", "--parameters", "1M", "--batch-tokens", "10k"],
    )
    assert status == 0
    assert "the hardware does 200 FLOP" in output


def test_nothing_fits(plan):
    status, _, errors = plan(
        "--accelerator-type", "v4-8", "--parameters", "1T", "--batch-tokens", "1M"
    )
    assert status == 1
    assert "nothing fits into memory" in errors


def test_what_is_known_of_accelerators(plan):
    status, output, _ = plan("--list-accelerators")
    assert status == 0
    (line,) = (line for line in output.splitlines() if line.startswith("v4"))
    assert "176k-352k, 350k-700k" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--accelerator-type v4-9", "no accelerator type v4-9"),
        ("--accelerator-type v3-8 --num-slices 2", "needs TPU v4 or later"),
        ("--accelerator-type v4-8 --num-slices 257", "at most 256"),
        ("--accelerator-type v4-8 --num-slices 0", "slices is 0"),
        ("--accelerator-type v4-8 --chips 4", "give one of them"),
        ("--accelerator-type v4-8 --hbm-gb 0", "hbm_bytes is 0"),
        ("--accelerator-type v4-8 --parameters many", "'many' is no number"),
        ("--accelerator-type v4-8 --batch-tokens 1e999", "need one each"),
        ("--accelerator-type v4-8 --num-slices 2 --dcn-gbits-per-slice 0", "dcn_bits_per_s is 0"),
        ("--accelerator-type v4-8 --batch-tokens 1", "need one each"),
        ("--chips 4", "--peak-tflops --hbm-gb --dcn-gbits-per-slice"),
        ("", "give --accelerator-type"),
    ],
)
def test_wrong_usage_is_one_line(plan, arguments, words):
    status, output, errors = plan(*SEVEN_BILLION, "--batch-tokens", "1M", *arguments.split())
    assert (status, output) == (2, "")
    assert errors.startswith("regrow: ")
    assert errors.count("\n") == 1
    assert words in errors


@pytest.mark.parametrize(
    ("text", "number"),
    [("7B", 7e9), ("350k", 350e3), ("1.5e9", 1.5e9), ("4_000_000", 4e6), ("2,5", 25), ("1T", 1e12)],
)
def test_quantities(text, number):
    assert quantity(text) == number
