"""The journal of a training: nothing of it is lost or invented, wherever its writer is killed."""

from __future__ import annotations

import pytest

from regrow.elastic.journal import JournalWriter, Loss, StepRecord, read_journal
from regrow.errors import RegrowError

LOSS = Loss("float32", "0000803f", 1.0)
FULL = StepRecord(3, LOSS, {"w": "float32[2] 00ff"}, (7, "a"), (0, 2), 12.5)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "journal"
    records = [StepRecord(0, LOSS), FULL, StepRecord(1, Loss("float", "", float("nan")))]
    for record in records[:2]:
        JournalWriter(str(path)).write(record)
    assert read_journal(path) == records[:2]
    JournalWriter(str(path)).write(records[2])
    assert read_journal(path)[2].loss.value != read_journal(path)[2].loss.value
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_is_not_read(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(FULL.line() + FULL.line()[:-9])
    assert read_journal(path) == [FULL]


def test_there_may_be_none(tmp_path):
    assert read_journal(tmp_path / "journal") == []


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"nothing", b'{"step":1,"loss":{}}'])
def test_a_line_that_is_no_record_is_told(tmp_path, line):
    path = tmp_path / "journal"
    path.write_bytes(line + b"\n")
    with pytest.raises(RegrowError, match="no line of a journal"):
        read_journal(path)


def test_a_journal_that_cannot_be_opened_is_told(tmp_path):
    with pytest.raises(RegrowError, match=r"cannot open the journal .*: Is a directory"):
        JournalWriter(str(tmp_path))
