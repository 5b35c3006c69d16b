from __future__ import annotations

import gc
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.channel.arena import Arena, ArenaView, Block, size_class
from regrow.errors import ChannelError, ResourceError

MB = 1 << 20


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def memfds() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += "memfd:regrow" in str(entry.readlink())
        except OSError:
            continue
    return count


def resident_bytes(arena: Arena) -> int:
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena._segments.values())


@given(st.integers(0, 1 << 32))
def test_a_size_class_wastes_at_most_an_eighth_and_is_aligned(size: int) -> None:
    got = size_class(size)
    assert got >= max(size, 1)
    assert got % 64 == 0
    assert size_class(got) == got
    if size >= 64 << 10:
        assert got % mmap.PAGESIZE == 0
    if size >= 512:
        assert got <= size * 9 / 8 + 1


@given(small=st.integers(0, 1 << 30), more=st.integers(0, 1 << 20))
def test_a_larger_request_has_no_smaller_class(small: int, more: int) -> None:
    assert size_class(small) <= size_class(small + more)


@given(seed=st.integers(0, 1 << 32), watermark=st.sampled_from((0, 2 * MB, 100 * MB)))
@settings(max_examples=25, deadline=None)
def test_blocks_never_overlap_and_the_limit_holds(seed: int, watermark: int) -> None:
    rng = random.Random(seed)
    limit = 12 * MB
    arena = Arena(limit, watermark_bytes=watermark)
    live: list[tuple[Block, int]] = []
    for number in range(1, 80):
        if live and rng.random() < 0.45:
            block, mark = live.pop(rng.randrange(len(live)))
            assert block.view[0] == block.view[-1] == mark
            for _ in range(rng.choice((1, 1, 2))):
                block.release()
            continue
        size = rng.choice((rng.randrange(1, 5000), rng.randrange(1, 3 * MB)))
        try:
            block = arena.alloc(size)
        except ResourceError:
            assert arena.used_bytes + size_class(size) > limit
            continue
        block.view[0] = block.view[-1] = number % 256
        live.append((block, number % 256))
        assert block.view.nbytes == size
        assert block.offset % (mmap.PAGESIZE if size >= 64 << 10 else 64) == 0
        assert arena.used_bytes + arena.idle_bytes <= limit
    spans = sorted((b.segment_id, b.offset, b.offset + size_class(b.size)) for b, _mark in live)
    for (segment, _start, end), (next_segment, start, _end) in itertools.pairwise(spans):
        assert segment != next_segment or end <= start
    for block, _mark in live:
        block.release()
    assert arena.used_bytes == 0
    assert arena.idle_bytes <= watermark
    arena.close()


def test_a_released_block_is_used_again() -> None:
    arena = Arena(64 * MB)
    first = arena.alloc(MB)
    ref = first.ref()
    first.release()
    again = arena.alloc(MB - 100)
    assert again.ref()[:2] == ref[:2]
    assert arena.idle_bytes == 0
    arena.close()


def test_a_second_release_does_not_take_the_block_from_its_next_owner() -> None:
    arena = Arena(64 * MB)
    first = arena.alloc(MB)
    first.release()
    second = arena.alloc(MB)
    first.release()
    third = arena.alloc(MB)
    assert third.ref() != second.ref()
    arena.close()


def test_the_limit_is_an_error_that_says_what_was_wanted() -> None:
    arena = Arena(2 * MB)
    block = arena.alloc(2 * MB)
    with pytest.raises(ResourceError, match="shared memory: 2097153 bytes wanted") as caught:
        arena.alloc(1)
    assert caught.value.limit_bytes == 2 * MB
    block.release()
    arena.alloc(1).release()
    arena.close()


def test_a_request_of_just_the_limit_is_met() -> None:
    limit = 100_000_000
    assert size_class(limit) > limit
    arena = Arena(limit)
    arena.alloc(99_999_000).release()
    arena.close()


def test_idle_blocks_of_other_sizes_make_way_at_the_limit() -> None:
    arena = Arena(8 * MB)
    small = [arena.alloc(MB) for _ in range(8)]
    for block in small[1:]:
        block.release()
    assert arena.idle_bytes == 7 * MB
    large = arena.alloc(6 * MB)
    assert arena.used_bytes == 7 * MB
    large.release()
    small[0].release()
    arena.close()


def test_memory_above_the_watermark_goes_back_to_the_system() -> None:
    closed: list[int] = []
    arena = Arena(512 * MB, watermark_bytes=16 * MB, on_closed=closed.append)
    blocks = [arena.alloc(8 * MB) for _ in range(8)]
    for block in blocks:
        block.view[:: mmap.PAGESIZE] = b"x" * (len(block.view) // mmap.PAGESIZE)
    assert resident_bytes(arena) >= 64 * MB
    before = memfds()
    for block in blocks:
        block.release()
    assert arena.idle_bytes == 16 * MB
    assert resident_bytes(arena) <= 17 * MB
    assert closed
    assert memfds() < before
    arena.close()
    assert memfds() <= before - 2


def test_an_idle_block_above_the_watermark_is_kept_where_one_like_it_is_to_come() -> None:
    arena = Arena(512 * MB, watermark_bytes=MB)
    arena.reserve_idle(40 * MB)
    first = arena.alloc(40 * MB)
    segment = first.segment_id
    for _ in range(3):
        first.release()
        assert arena.idle_bytes == 40 * MB
        first = arena.alloc(40 * MB)
        assert first.segment_id == segment
    first.release()
    arena.alloc(8 * MB).release()
    assert arena.idle_bytes <= 41 * MB
    arena.reserve_idle(0)
    assert arena.idle_bytes <= MB
    arena.close()


def test_pages_of_an_idle_block_go_back_though_its_segment_is_in_use() -> None:
    arena = Arena(64 * MB, watermark_bytes=0)
    keep, drop = arena.alloc(4 * MB), arena.alloc(4 * MB)
    for block in (keep, drop):
        block.view[:] = b"x" * (4 * MB)
    drop.release()
    assert resident_bytes(arena) <= 4 * MB + 4 * mmap.PAGESIZE
    assert keep.view[-1:] == b"x"
    keep.release()
    arena.close()


def test_a_view_outlives_the_segment_without_harm() -> None:
    arena = Arena(64 * MB, watermark_bytes=0)
    block = arena.alloc(MB)
    view = block.view
    view[:3] = b"abc"
    block.release()
    assert not arena._segments
    assert view[:3] == b"\0\0\0"
    arena.close()


def test_blocks_of_a_closed_arena_may_be_released() -> None:
    arena = Arena(64 * MB)
    block = arena.alloc(MB)
    arena.close()
    block.release()
    assert arena.used_bytes == 0 == arena.idle_bytes


def test_a_refusal_of_the_system_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_args: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_more)
    arena = Arena(64 * MB)
    with pytest.raises(ResourceError, match="Too many open files"):
        arena.alloc(MB)
    assert arena.used_bytes == 0


def test_many_threads_share_an_arena() -> None:
    arena = Arena(256 * MB, watermark_bytes=MB)
    failures: list[str] = []

    def churn(mark: int) -> None:
        rng = random.Random(mark)
        for _ in range(400):
            block = arena.alloc(rng.choice((100, 5000, 100_000)))
            block.view[:8] = bytes([mark]) * 8
            if bytes(block.view[:8]) != bytes([mark]) * 8:
                failures.append("overlap")
            block.release()

    threads = [threading.Thread(target=churn, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures
    assert arena.used_bytes == 0
    arena.close()


def test_a_release_by_a_finalizer_inside_alloc_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena(64 * MB)
    victim = [arena.alloc(MB)]
    take_slot = Arena._take_slot

    def take_slot_with_a_finalizer(self: Arena, block_bytes: int, size: int) -> Any:
        while victim:
            victim.pop().release()
        return take_slot(self, block_bytes, size)

    monkeypatch.setattr(Arena, "_take_slot", take_slot_with_a_finalizer)
    block = arena.alloc(5000)
    assert arena.idle_bytes == MB
    block.release()
    arena.close()


def open_view(arena: Arena, block: Block) -> ArenaView:
    views = ArenaView()
    segment_id = block.segment_id
    views.open(segment_id, arena.segment_path(segment_id), arena.segment_bytes(segment_id))
    return views


def test_a_view_of_the_same_memory() -> None:
    arena = Arena(64 * MB)
    block = arena.alloc(100)
    views = open_view(arena, block)
    block.view[:5] = b"hello"
    there = views.view(block.ref())
    assert bytes(there[:5]) == b"hello"
    there[5:6] = b"!"
    assert bytes(block.view[:6]) == b"hello!"
    views.forget(block.segment_id)
    with pytest.raises(ChannelError, match="is not open"):
        views.view(block.ref())
    assert bytes(there[:6]) == b"hello!"
    views.close()
    arena.close()


@pytest.mark.parametrize("ref", [(-1, 10), (0, -1), (0, 1 << 40), (1 << 40, 1)])
def test_a_reference_outside_its_segment_is_refused(ref: tuple[int, int]) -> None:
    arena = Arena(64 * MB)
    block = arena.alloc(100)
    views = open_view(arena, block)
    with pytest.raises(ChannelError, match="lies outside its segment"):
        views.view((block.segment_id, *ref))
    arena.close()


def test_only_the_announced_segment_is_opened(tmp_path: Path) -> None:
    arena = Arena(64 * MB)
    block = arena.alloc(100)
    other = arena.alloc(100_000)
    views = ArenaView()
    size = arena.segment_bytes(block.segment_id)
    with pytest.raises(ChannelError, match="is gone"):
        views.open(block.segment_id, arena.segment_path(other.segment_id), size)
    with pytest.raises(ChannelError, match="is gone"):
        views.open(block.segment_id, arena.segment_path(block.segment_id), size * 2)
    plain = tmp_path / "file"
    plain.write_bytes(b"x" * size)
    with pytest.raises(ChannelError, match="is no path of a segment"):
        views.open(block.segment_id, str(plain), size)
    with pytest.raises(FileNotFoundError):
        views.open(block.segment_id, "/proc/self/fd/99999", size)
    fd = os.memfd_create(f"regrow-arena-{block.segment_id}")
    os.ftruncate(fd, size)
    with pytest.raises(ChannelError, match="is not sealed"):
        views.open(block.segment_id, f"/proc/self/fd/{fd}", size)
    os.close(fd)
    assert block.segment_id not in views
    arena.close()


def test_nobody_can_shrink_a_segment_under_its_readers() -> None:
    arena = Arena(64 * MB)
    block = arena.alloc(100)
    with pytest.raises(PermissionError):
        os.truncate(arena.segment_path(block.segment_id), 0)
    arena.close()


PEER = """
import sys
from regrow.channel.arena import ArenaView
views = ArenaView()
segment, path, size, offset, count = (sys.argv[1:])
views.open(int(segment), path, int(size))
view = views.view((int(segment), int(offset), int(count)))
view[:] = bytes(view)[::-1]
print("done", flush=True)
sys.stdin.read()
"""


def test_another_process_reads_and_writes_and_its_death_leaves_nothing() -> None:
    files = shared_memory_files()
    arena = Arena(64 * MB)
    block = arena.alloc(200_000)
    block.view[:] = bytes(range(200)) * 1000
    segment_id, offset, size = block.ref()
    peer = subprocess.Popen(
        [
            *(sys.executable, "-c", PEER, str(segment_id), arena.segment_path(segment_id)),
            *(str(arena.segment_bytes(segment_id)), str(offset), str(size)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"done\n"
        assert bytes(block.view) == (bytes(range(200)) * 1000)[::-1]
        peer.kill()
    block.release()
    arena.close()
    assert shared_memory_files() == files


OWNER = """
import os, sys
from regrow.channel.arena import Arena
arena = Arena(64 << 20)
block = arena.alloc(1 << 20)
block.view[:4] = b"mine"
print(block.segment_id, arena.segment_path(block.segment_id),
      arena.segment_bytes(block.segment_id), flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_nothing_and_its_readers_live() -> None:
    files = shared_memory_files()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    views = ArenaView()
    with owner:
        assert owner.stdout is not None
        segment, path, size = owner.stdout.readline().decode().split()
        views.open(int(segment), path, int(size))
        owner.kill()
    assert bytes(views.view((int(segment), 0, 4))) == b"mine"
    assert shared_memory_files() == files
    views.close()


def test_no_descriptor_is_left_after_close() -> None:
    gc.collect()
    before = memfds()
    arena = Arena(512 * MB)
    blocks = [arena.alloc(size) for size in (1, 5000, MB, 40 * MB)]
    assert memfds() == before + 2 * len(blocks)
    del blocks
    arena.close()
    gc.collect()
    assert memfds() == before
