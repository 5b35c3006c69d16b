"""What a program prints is passed on and kept."""

from __future__ import annotations

import os

from regrow.cli.tee import Tee


def test_what_is_written_goes_on_and_is_kept_by_lines() -> None:
    end, to = os.pipe()
    with Tee(to) as tee:
        assert not tee.copy()
        os.write(tee.fd, b"one\ntw")
        assert tee.copy()
        assert [line for _, line in tee.lines] == ["one"]
        os.write(tee.fd, b"o\n\xff torn")
    assert [line for _, line in tee.lines] == ["one", "two", "\ufffd torn"]
    os.close(to)
    with open(end, "rb") as copied:
        assert copied.read() == b"one\ntwo\n\xff torn"


def test_nobody_that_reads_any_more_is_no_reason_to_stop() -> None:
    end, to = os.pipe()
    os.close(end)
    with Tee(to) as tee:
        os.write(tee.fd, b"one\n")
    assert [line for _, line in tee.lines] == ["one"]
    os.close(to)
