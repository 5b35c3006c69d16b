from __future__ import annotations

import pytest

from regrow.errors import UsageError
from regrow.planning import dcn


def test_the_bandwidth_is_that_of_the_least_traffic():
    """Of 8 bits in a second, 2 (n-1)/n leave each slice."""
    assert dcn.AllReduce(1, 2, [1.0, 1.0, 9.0]).bits_per_s == 8
    assert dcn.AllReduce(1, 4, [1.0]).bits_per_s == 12


@pytest.mark.parametrize(
    ("backward_s", "words"), [(2.0, "will scale"), (1.5, "barely"), (0.9, "wait for the network")]
)
def test_verdicts(backward_s, words):
    ratio = dcn.headroom(dcn.Backward(1, [backward_s]), dcn.AllReduce(1, 2, [1.0]))
    assert words in dcn.verdict(ratio)


def test_a_function_is_called_with_the_devices_of_a_slice(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def make(devices):\n    return len, devices, 3\n")
    assert dcn.load(f"{path}:make", ["a device"]) == (len, ["a device"], 3)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("make", "write FILE.py:NAME"),
        ("nothing.py:make", "there is no file 'nothing.py'"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("json:make", "there is no function 'make' in json"),
        ("builtins:len", r"must return \(loss, parameters, batch\)"),
        ("builtins:tuple", r"must return \(loss, parameters, batch\)"),
    ],
)
def test_what_is_no_function(reference, words):
    with pytest.raises(UsageError, match=words):
        dcn.load(reference, [])
