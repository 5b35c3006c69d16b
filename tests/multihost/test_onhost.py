"""The files of a job: in a directory, and by fsspec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

from regrow.errors import UnsupportedError, UsageError
from regrow.multihost import onhost
from regrow.multihost.job import LogReader, absolute, open_store
from regrow.multihost.package import packed


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


@pytest.fixture
def host(tmp_path):
    """The only host of a job, as its startup script runs it; without an API, and with its bucket."""
    for name in ("home", "bucket"):
        (tmp_path / name).mkdir()
    job = {"run": "r", "bucket": str(tmp_path / "bucket"), "command": "cat code", "project": "p"}
    job |= {"zone": "z", "endpoint": "http://127.0.0.1:1", "grace_s": 0.0, "report_s": 0.05}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job | {"keep": True, "max_restarts": 0}))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", onhost.__file__, str(path)],
            env=os.environ | {"HOME": str(tmp_path / "home"), "GCE_METADATA_HOST": "127.0.0.1:1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def ended(host) -> str:
    with host() as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    return output


def test_a_folder_with_links_of_all_kinds_is_unpacked_at_every_start(host, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "original").write_text("content")
    (folder / "code").hardlink_to(folder / "original")
    (folder / "outside").symlink_to("/etc")
    (folder / "above").symlink_to("../../..")
    os.mkfifo(folder / "fifo")
    store = onhost.Store(f"{tmp_path}/bucket/r")
    with (
        packed(folder) as package,
        package.reader() as reader,
        open(reader, "rb", closefd=False) as f,
    ):
        store.write("code.tar.gz", f.read())
    for attempt in (1, 2):
        ended(host)
        assert store.read_json("outcome.json")["state"] == "succeeded"
        assert store.read(f"logs/slice-0-worker-0/000{attempt}-000000.log") == b"content"
        store.remove("outcome.json")
    assert os.listdir(tmp_path / "home" / "r").count("fifo") == 0


def test_a_host_that_cannot_unpack_the_code_fails_and_says_so(host, tmp_path):
    store = onhost.Store(f"{tmp_path}/bucket/r")
    store.write("code.tar.gz", b"no archive")
    ended(host)
    outcome = store.read_json("outcome.json")
    assert (outcome["state"], outcome["status"]) == ("failed", 1)
    log = store.read("logs/slice-0-worker-0/0001-000000.log")
    assert log.startswith(b"regrow job: the code cannot be unpacked: ")


def test_a_bucket_that_is_out_of_reach_is_tried_again(host, tmp_path):
    bucket = tmp_path / "bucket"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "code").write_text("content")
    store = onhost.Store(f"{bucket}/r")
    with (
        packed(folder) as package,
        package.reader() as reader,
        open(reader, "rb", closefd=False) as f,
    ):
        store.write("code.tar.gz", f.read())
    (bucket / "r" / "hosts").write_text("in the way")
    with host() as process:
        assert "the bucket is out of reach" in process.stdout.readline()
        (bucket / "r" / "hosts").unlink()
        assert process.wait(timeout=60) == 0
    assert store.read_json("outcome.json")["state"] == "succeeded"
