from __future__ import annotations

import pytest

from regrow.launchers.logs import HostLog, tail, telling_line


def test_a_log_for_each_incarnation_and_few_of_them(tmp_path):
    log = HostLog(tmp_path, "host", kept=3)
    for number in range(5):
        log.begin().write_text(str(number))
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"host.log": "4", "host.log.1": "3", "host.log.2": "2"}


def test_a_log_that_grows_too_large_is_moved_aside(tmp_path):
    log = HostLog(tmp_path, "host", max_bytes=100)
    with log.begin().open("a") as writer:
        writer.write("a" * 100)
        writer.flush()
        log.bound()
        assert log.path.stat().st_size == 100
        writer.write("b")
        writer.flush()
        log.bound()
        assert log.path.stat().st_size == 0
        writer.write("c")
    assert log.path.read_text() == "c"
    assert (tmp_path / "host.log.full").read_text() == "a" * 100 + "b"


def test_a_log_that_is_not_there_has_no_bounds_and_no_tail(tmp_path):
    log = HostLog(tmp_path, "host")
    log.bound()
    assert tail(log.path) == []


def test_the_tail_is_the_last_lines_that_hold_something(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100000 + b"\none\n\n  \ntwo \xff\nthree\n\n")
    assert tail(path, lines=2) == ["two \N{REPLACEMENT CHARACTER}", "three"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("Traceback:\n  File x\nValueError: no\n", "ValueError: no"),
        (
            "F1129 15:14:34 1 x.cc:2] Unknown flag\nFatal Python error: Aborted\n  File x\n",
            "F1129 15:14:34 1 x.cc:2] Unknown flag",
        ),
        ("regrow.errors.LaunchError: a\nregrow: b\nregrow.head  INFO  ends\n", "regrow: b"),
    ],
)
def test_the_line_that_tells_why(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert telling_line(tmp_path / "log") == line
