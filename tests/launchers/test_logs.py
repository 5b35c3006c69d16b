from __future__ import annotations

from regrow.launchers.logs import HostLog


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


def test_a_log_that_is_not_there_has_no_bounds(tmp_path):
    HostLog(tmp_path, "host").bound()
