"""The store: manifests, chunks, incremental writes, sweeping, damage."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import random
import shutil
from pathlib import Path

import pytest

from regrow.errors import StorageError, UsageError
from regrow.suspend import ArrayEntry, Manifest, PartEntry, ShardEntry, Snapshots, open_storage
from regrow.suspend.abandoned import Swept, sweep_abandoned
from regrow.suspend.export import export
from regrow.suspend.retention import Retention
from regrow.suspend.shards import pieces, read_shards, write_shards
from regrow.suspend.snapshots import manifest_name
from regrow.suspend.storage import check_scheme, check_url
from regrow.suspend.sweep import leftovers, old

CHUNK = 1000


def manifest(number: int, chunks: list[str], nbytes: int = 2500) -> Manifest:
    shard = ShardEntry(3, 11, (5, 125), "device", nbytes, tuple(chunks))
    array = ArrayEntry(
        1, 7, 11, "float32", (5, 125), "1 device", "", ((3, 40, ((0, 5), (0, 125))), (4, 41, None))
    )
    return Manifest(
        number=number,
        job="job",
        when=1.5,
        why="a test",
        versions={"regrow": "0"},
        slices=(1,),
        topology={"slices": 2, "hosts_per_slice": 1, "devices_per_slice": 2},
        chunk_bytes=CHUNK,
        arrays=(array,),
        parts=(PartEntry(40, (shard,)), PartEntry(41, (), (15, "slice 0 was lost"))),
    )


def written(url: str, data: bytes) -> tuple[list[str], int]:
    hashes, traffic = write_shards(open_storage(url), [memoryview(data)], chunk_bytes=CHUNK)
    return hashes[0], traffic.written


@pytest.fixture(params=["", "local://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory: reached directly, and by fsspec as any other storage is."""
    return f"{request.param}{tmp_path}/job"


def test_a_manifest_comes_back_as_it_was() -> None:
    one = manifest(3, ["a" * 32, "b" * 32, "c" * 32])
    assert Manifest.from_bytes(one.to_bytes(), "m") == one
    assert one.nbytes == 2500


def test_any_flipped_byte_of_a_manifest_is_noticed() -> None:
    data = manifest(3, ["a" * 32, "b" * 32, "c" * 32]).to_bytes()
    drawn = random.Random(5)
    for place in drawn.sample(range(len(data) - 1), 60):
        damaged = bytearray(data)
        damaged[place] ^= 1 << drawn.randrange(8)
        with pytest.raises(StorageError, match=r"^m is "):
            Manifest.from_bytes(bytes(damaged), "m")


def test_another_version_is_told() -> None:
    data = manifest(1, []).to_bytes().replace(b'"format":2', b'"format":9', 1)
    with pytest.raises(
        StorageError, match="m is a snapshot of format 9; this Regrow reads format 2"
    ):
        Manifest.from_bytes(data, "m")


def test_bytes_come_back_and_what_is_there_is_not_written_again(url: str) -> None:
    data = random.Random(1).randbytes(2500)
    names, count = written(url, data)
    assert (len(names), count) == (3, 2500)
    changed = bytearray(data)
    changed[1500] ^= 1
    again, count = written(url, bytes(changed))
    assert count == 1000
    assert [one == other for one, other in zip(names, again, strict=True)] == [True, False, True]
    target = bytearray(2500)
    read_shards(open_storage(url), [(memoryview(target), names)], chunk_bytes=CHUNK)
    assert target == data


def test_a_damaged_chunk_is_told(url: str, tmp_path: Path) -> None:
    names, _ = written(url, random.Random(2).randbytes(2500))
    path = tmp_path / "job" / "chunks" / names[1]
    target = memoryview(bytearray(2500))
    for damage in ("flip", "cut", "grow", "remove"):
        data = bytearray(path.read_bytes())
        match damage:
            case "flip":
                data[77] ^= 4
            case "cut":
                del data[-1]
            case "grow":
                data.append(0)
        good = path.read_bytes()
        path.unlink()
        if damage != "remove":
            path.write_bytes(data)
        with pytest.raises(StorageError, match=f"{names[1]} "):
            read_shards(open_storage(url), [(target, names)], chunk_bytes=CHUNK)
        path.write_bytes(good)


def test_the_last_committed_manifest_is_the_snapshot(url: str) -> None:
    store = Snapshots(open_storage(url))
    assert store.numbers() == []
    with pytest.raises(StorageError, match=r"there is no snapshot at .*job"):
        store.read()
    for number in (1, 2):
        store.commit(manifest(number, written(url, bytes([number]) * 2500)[0]))
    assert store.read() == manifest(2, list(store.read().parts[0].shards[0].chunks))
    assert store.read(1).number == 1


def test_what_no_snapshot_needs_is_swept(url: str, tmp_path: Path) -> None:
    store = Snapshots(open_storage(url))
    for number in range(1, 5):
        store.commit(manifest(number, written(url, random.Random(number).randbytes(2500))[0]))
    half = tmp_path / "job" / "chunks" / f"{'d' * 32}.12-3.part"
    half.write_bytes(b"half")
    assert store.sweep(kept=2) == 2 + 6 + 1
    assert store.numbers() == [3, 4]
    needed = {chunk for number in (3, 4) for chunk in store.read(number).chunks()}
    assert set(os.listdir(tmp_path / "job" / "chunks")) == needed
    assert store.sweep(kept=2) == 0


def test_a_damaged_manifest_keeps_everything(tmp_path: Path) -> None:
    store = Snapshots(open_storage(str(tmp_path)))
    for number in (1, 2, 3):
        store.commit(manifest(number, []))
    path = tmp_path / manifest_name(3)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StorageError, match=r"000000003\.json is no manifest"):
        store.sweep(kept=2)
    assert store.numbers() == [1, 2, 3]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory://x", "does not outlive the process"),
        ("nonsense://x", "no storage that is known"),
        ("file://elsewhere/x", "names another machine"),
        ("https://x/y", "can only be read"),
        ("gs:/bucket/x", "is no URL: it would begin gs://"),
    ],
)
def test_what_is_no_storage_is_refused(url: str, why: str) -> None:
    for check in (open_storage, check_scheme):
        with pytest.raises(UsageError, match=why):
            check(url)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://bucket", "abfs://x@y/z", "/a/b", "a:b/c"])
def test_a_kind_of_storage_is_known_without_its_package(url: str) -> None:
    assert check_scheme(url) == url


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = open_storage(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"file/chunks/x cannot be written: "):
        storage.write("chunks/x", b"1")


def test_a_full_disk_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, left = os.write, [3]

    def write(fd: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        written(str(tmp_path), random.Random(3).randbytes(9500))
    assert not [name for name in os.listdir(tmp_path / "chunks") if "." in name]


def test_hosts_that_hold_the_same_bytes_write_them_once(tmp_path: Path) -> None:
    storage, data = open_storage(str(tmp_path)), memoryview(random.Random(4).randbytes(4000))
    one, first = write_shards(storage, [data], chunk_bytes=CHUNK)
    other, second = write_shards(storage, [data], turn=0.5, chunk_bytes=CHUNK)
    assert one == other
    assert (first.written, second.written) == (4000, 0)


def test_nothing_is_a_shard_too(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert pieces(memoryview(b"")) == []
    assert write_shards(storage, [memoryview(b"")])[0] == [[]]
    read_shards(storage, [(memoryview(b""), [])])


def test_the_rules_of_sweeping_need_no_storage() -> None:
    assert old([4, 1, 3]) == (1,)
    assert old([]) == ()
    one = manifest(4, ["a" * 32])
    found = leftovers([one], [3, 4], ["a" * 32, "b" * 32, "c.part"])
    assert found.manifests == (3,)
    assert found.chunks == ("b" * 32, "c.part")


def test_what_killed_clusters_leave_is_swept_but_no_snapshot(tmp_path: Path) -> None:
    rule = Retention(days=None)
    stays = Swept((), (tmp_path / "kept-0123abcd",))

    def swept(place: Path) -> Swept:
        return sweep_abandoned(place, lambda: {"owned-0123abcd"}, rule, 0.0)

    kept, half, owned = (tmp_path / f"{name}-0123abcd" for name in ("kept", "half", "owned"))
    for place in (kept, half, owned, tmp_path / "notes"):
        hashes, _ = written(str(place), b"x" * 2500)
        (place / "chunks" / "ab.1-1.part").touch()
    Snapshots(open_storage(str(kept))).commit(manifest(1, hashes))
    assert swept(tmp_path) == stays
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "notes", owned.name]
    assert sorted(os.listdir(kept / "chunks")) == sorted(set(hashes))
    assert "ab.1-1.part" in os.listdir(owned / "chunks")
    (kept / manifest_name(1)).write_text("{}")
    (kept / "chunks" / "unknown").touch()
    assert swept(tmp_path) == stays
    assert "unknown" in os.listdir(kept / "chunks"), "what cannot be read keeps everything"
    assert swept(tmp_path / "nowhere") == Swept((), ())


def test_old_snapshots_of_killed_clusters_go_but_the_latest_of_each_name(tmp_path: Path) -> None:
    day_s = 86400.0
    for number in range(5):
        place = tmp_path / f"run-{number:08x}"
        hashes, _ = written(str(place), b"x" * 2500)
        made = dataclasses.replace(manifest(1, hashes), when=number * day_s)
        Snapshots(open_storage(str(place))).commit(made)
    (tmp_path / "run-00000000" / manifest_name(1)).write_text("{}")
    swept = sweep_abandoned(tmp_path, lambda: {"run-00000001"}, Retention(1.5, 1), 5 * day_s)
    assert [path.name for path in swept.removed] == ["run-00000002", "run-00000003"]
    assert [path.name for path in swept.left] == ["run-00000000", "run-00000004"]
    assert sorted(os.listdir(tmp_path)) == ["run-00000000", "run-00000001", "run-00000004"]


def test_what_a_crash_leaves_of_a_snapshot_that_is_removed_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Snapshots(open_storage(str(tmp_path / "run-01234567")))
    store.commit(manifest(1, written(store.url, b"x" * 2500)[0]))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        store.clear()
    assert store.storage.names("chunks")
    assert sweep_abandoned(tmp_path, lambda: (), Retention(None), 0.0) == Swept((), ())
    assert os.listdir(tmp_path) == []


def exported(tmp_path: Path) -> tuple[Snapshots, Manifest]:
    """A snapshot of one array that is whole."""
    hashes, _ = written(str(tmp_path / "job"), b"x" * 2500)
    shards = ((3, 40, ((0, 5), (0, 125))),)
    array = ArrayEntry(1, 7, 11, "float32", (5, 125), "1", "", shards)
    store = Snapshots(open_storage(str(tmp_path / "job")))
    return store, dataclasses.replace(manifest(1, hashes), arrays=(array,))


def test_an_export_that_fails_leaves_no_half_of_an_array(tmp_path: Path) -> None:
    store, whole = exported(tmp_path)
    assert export(store, whole, tmp_path / "good") == (1, 0)
    assert sorted(os.listdir(tmp_path / "good")) == ["array00000.npy", "index.json"]
    (tmp_path / "job" / "chunks" / list(whole.chunks())[-1]).write_bytes(b"y" * 500)
    with pytest.raises(StorageError, match="is damaged"):
        export(store, whole, tmp_path / "bad")
    assert os.listdir(tmp_path / "bad") == []
    # The index of an earlier export would tell a mixture.
    with pytest.raises(StorageError, match="is damaged"):
        export(store, whole, tmp_path / "good")
    assert os.listdir(tmp_path / "good") == ["array00000.npy"]


def test_an_export_to_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would end by SIGBUS if the file were written without room being made for it."""
    store, whole = exported(tmp_path)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="out cannot be written: No space left on device"):
        export(store, whole, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_of_a_store_without_a_snapshot_nothing_stays(tmp_path: Path) -> None:
    hashes, _ = written(str(tmp_path / "job"), b"x" * 2500)
    assert Snapshots(open_storage(str(tmp_path / "job"))).sweep() == len(set(hashes))
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file", "file/x", "link", "link/x"):
        with pytest.raises(UsageError, match=f"{tmp_path}/{place} cannot be written: {tmp_path}"):
            check_url(f"{tmp_path}/{place}")
    for place in ("", "new", "new/and/newer"):
        assert check_url(f"file://{tmp_path}/{place}")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}, "nothing is left"


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("beside", [0, 64])
@pytest.mark.parametrize("size", [1, 4096, 40_000, 131_072])
def test_what_the_disk_has_is_read_into_any_memory(
    tmp_path: Path, size: int, beside: int, cold: bool
) -> None:
    storage, data = open_storage(str(tmp_path)), random.Random(size).randbytes(size)
    storage.write("file", data)
    memory = memoryview(mmap.mmap(-1, size + beside))[beside:]
    for _ in range(2):
        if cold:
            with (tmp_path / "file").open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory[:] = bytes(size)
        assert storage.read_into("file", memory) == size
        assert memory == data
    assert storage.read_into("file", memory[: size // 2]) == size, "it tells how long it is"
    os.truncate(tmp_path / "file", size // 2)
    assert storage.read_into("file", memory) == size // 2
