"""The files of a job: in a directory, and by fsspec."""

from __future__ import annotations

import uuid

import pytest

from regrow.errors import UnsupportedError, UsageError
from regrow.multihost import onhost
from regrow.multihost.job import LogReader, absolute, open_store


@pytest.fixture(params=["directory", "file", "fsspec"])
def store(request, tmp_path):
    url = {
        "directory": str(tmp_path),
        "file": f"file://{tmp_path}",
        "fsspec": f"memory://{uuid.uuid4()}",
    }[request.param]
    return onhost.Store(url)


def test_files(store):
    assert store.read("a/b") is None
    assert store.names("a") == []
    store.write("a/b", b"1")
    store.write("a/b", b"22")
    store.write_json("a/c.json", {"x": [1]})
    assert store.read("a/b") == b"22"
    assert store.read_json("a/c.json") == {"x": [1]}
    assert store.read_json("a/d.json") is None
    assert store.names("a") == ["b", "c.json"]
    store.remove("a/b")
    store.remove("a/b")
    assert store.names("a") == ["c.json"]


def test_a_log_is_uploaded_in_parts_and_read_as_it_grows(store, tmp_path, monkeypatch):
    monkeypatch.setattr(onhost, "PART_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"")
    log = onhost.Log(store, "h", 1, path)
    reader = LogReader(store, "h")
    assert reader.more() == b""
    log.upload()
    assert store.names("logs/h") == ["0001-000000.log"]
    told = b""
    for text in (b"0123", b"456789", b"", b"abcdefghijklmnopqrstuvwxyz"):
        with path.open("ab") as file:
            file.write(text)
        log.upload()
        told += reader.more()
    assert told == path.read_bytes()
    assert len(store.names("logs/h")) == 4
    again = onhost.Log(store, "h", 2, path)
    again.upload()
    assert reader.more() == b"--- attempt 2\n" + path.read_bytes()


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("x") == f"file://{tmp_path.resolve()}/x"
    assert absolute("gs://b/c/") == "gs://b/c"
    with pytest.raises(UsageError, match="--bucket=nothing://x"):
        open_store("nothing://x", "r")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(UnsupportedError, match="pip install fsspec s3fs"):
            open_store("s3://x", "r")
