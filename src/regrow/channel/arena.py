"""Pooled shared memory, so that tensors cross from head to worker without a copy through a socket.

The owner:

    arena = Arena(limit_bytes=4 << 30, on_closed=tell_peers_to_forget)
    block = arena.alloc(n)                 # block.view: a writable memoryview of n bytes
    segment_id, offset, size = block.ref()
    path, segment_bytes = arena.segment_path(segment_id), arena.segment_bytes(segment_id)
    block.release()                        # when the peer is done with it, or dead; harmless twice

The peer, a process of the same user on the same machine:

    views = ArenaView()
    views.open(segment_id, path, segment_bytes)    # OSError or ChannelError: use inline bytes instead
    data = views.view(block_ref)
    views.forget(segment_id)

Segments are memfd files: they have no name, so whatever dies, the kernel takes them back. They are sealed
against shrinking, so that a reader cannot be killed by SIGBUS. A segment is cut into blocks of one size;
released blocks are kept for reuse, because fresh pages cost more than the copy that fills them, up to
a watermark, above which the longest idle ones go back to the system.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias, final

from regrow.errors import ChannelError, ResourceError

BlockRef: TypeAlias = tuple[int, int, int]
"""Segment id, offset in the segment, and size in bytes."""

WATERMARK_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 64
_PAGE: Final = mmap.PAGESIZE
_PAGE_ALIGNED_FROM: Final = 64 << 10
_STEPS_PER_OCTAVE_BITS: Final = 3
_SMALL_SEGMENT_BYTES: Final = 1 << 20
_LARGE_SEGMENT_BYTES: Final = 32 << 20
_NAME: Final = "regrow-arena-"


@functools.lru_cache(maxsize=4096)
def size_class(size: int) -> int:
    """The block size that a request of `size` bytes gets: at most an eighth more, and aligned."""
    size = max(size, _ALIGNMENT)
    step = 1 << max(size.bit_length() - 1 - _STEPS_PER_OCTAVE_BITS, 0)
    grain = _PAGE if size > _PAGE_ALIGNED_FROM - _PAGE else _ALIGNMENT
    step = max(step, grain)
    return -(-size // step) * step


@final
class _Pool:
    """The idle blocks of one size: warm ones have their pages, the last released at the right."""

    __slots__ = ("block_bytes", "cold", "warm")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.warm: deque[_Slot] = deque()
        self.cold: dict[_Slot, None] = {}


@final
class _Segment:
    """One memfd file, cut into the blocks of a pool; `cold` counts those without pages."""

    __slots__ = ("cold", "fd", "id", "map", "pool", "slots", "view")

    def __init__(self, segment_id: int, pool: _Pool) -> None:
        block_bytes = pool.block_bytes
        whole = _SMALL_SEGMENT_BYTES if block_bytes < _PAGE_ALIGNED_FROM else _LARGE_SEGMENT_BYTES
        count = max(whole // block_bytes, 1)
        size = -(-count * block_bytes // _PAGE) * _PAGE
        self.id = segment_id
        self.pool = pool
        self.fd = os.memfd_create(f"{_NAME}{segment_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self.map)
        self.slots = [_Slot(self, index * block_bytes) for index in range(count)]
        self.cold = count

    def close(self) -> None:
        # Views that somebody still holds keep the mapping, and peers theirs; the pages go at once.
        self.map.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)
        for slot in self.slots:
            slot.serial += 1


@final
class _Slot:
    """Room for one block.

    `serial` counts its uses, so that a stale release is told apart; `released` is the arena's count of
    releases at the last one.
    """

    __slots__ = ("offset", "pool", "released", "segment", "serial")

    def __init__(self, segment: _Segment, offset: int) -> None:
        self.segment = segment
        self.pool = segment.pool
        self.offset = offset
        self.serial = 0
        self.released = 0


@final
class Block:
    """Shared memory that is handed out until `release`.

    Attributes:
        view: The memory, writable, `size` bytes; not to be used after the release.
        segment_id: The segment it is in.
        offset: Where in the segment it starts.
        size: Bytes that were asked for.
    """

    __slots__ = ("_arena", "_serial", "_slot", "offset", "segment_id", "size", "view")

    def __init__(self, arena: Arena, slot: _Slot, size: int) -> None:
        segment, offset = slot.segment, slot.offset
        self._arena = arena
        self._slot = slot
        self._serial = slot.serial
        self.segment_id = segment.id
        self.offset = offset
        self.size = size
        self.view = segment.view[offset : offset + size]

    def ref(self) -> BlockRef:
        """What a peer needs to find the block."""
        return self.segment_id, self.offset, self.size

    def release(self) -> None:
        """Gives the memory back. From any thread, also from a finalizer, and harmless twice."""
        arena = self._arena
        arena._returned.append(self)
        arena._settle()


@final
class Arena:
    """The owner's pool of shared memory; usable from several threads."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        watermark_bytes: int = WATERMARK_BYTES,
        on_closed: Callable[[int], None] | None = None,
    ) -> None:
        """Makes an empty pool.

        Args:
            limit_bytes: Blocks in use and idle ones together never take more.
            watermark_bytes: Idle blocks above this go back to the system.
            on_closed: Called with the id of each segment that was given up, for peers to forget.
                It must not use the arena.
        """
        self._limit_bytes = limit_bytes // _PAGE * _PAGE
        self._watermark_bytes = watermark_bytes
        self._reserve_bytes = 0
        self._on_closed = on_closed
        # Never waited for by `release`, which may run in a finalizer inside any of these methods.
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()
        self._segments: dict[int, _Segment] = {}
        self._next_id = 1
        self._pools: dict[int, _Pool] = {}
        self._releases = 0
        self._used_bytes = 0
        self._idle_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """What blocks in use and idle ones may take together."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that are handed out."""
        self._settle()
        return self._used_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of released blocks that are kept for reuse."""
        self._settle()
        return self._idle_bytes

    def alloc(self, size: int) -> Block:
        """Memory of `size` bytes; its contents are undefined.

        Raises:
            ResourceError: The limit would be passed, or the system has no more to give.
        """
        block_bytes = size_class(size)
        if size <= self._limit_bytes < block_bytes:
            block_bytes = self._limit_bytes
        with self._lock:
            if self._returned:
                self._take_back()
            slot = self._take_slot(block_bytes, size)
            self._used_bytes += block_bytes
        block = Block(self, slot, size)
        if self._returned:
            self._settle()
        return block

    def reserve_idle(self, size: int) -> None:
        """Keeps idle blocks above the watermark, too: as much as a block of `size` bytes takes."""
        with self._lock:
            self._take_back()
            self._reserve_bytes = size_class(size) if size else 0
            self._evict_down_to(self._watermark_bytes + self._reserve_bytes)
        self._settle()

    def segment_path(self, segment_id: int) -> str:
        """Where a peer of the same user opens the segment."""
        return f"/proc/{os.getpid()}/fd/{self._segments[segment_id].fd}"

    def segment_bytes(self, segment_id: int) -> int:
        """The size of a segment."""
        return len(self._segments[segment_id].view)

    def close(self) -> None:
        """Gives all memory back; views of it that are still held read as zeros."""
        with self._lock:
            self._take_back()
            for segment in list(self._segments.values()):
                self._close_segment(segment)
            self._pools.clear()
            self._used_bytes = self._idle_bytes = 0

    def _take_slot(self, block_bytes: int, size: int) -> _Slot:
        pool = self._pools.get(block_bytes)
        if pool is None:
            pool = self._pools[block_bytes] = _Pool(block_bytes)
        if pool.warm:
            self._idle_bytes -= block_bytes
            return pool.warm.pop()
        room = self._limit_bytes - self._used_bytes - block_bytes
        if room < 0:
            raise ResourceError("shared memory", self._used_bytes + size, self._limit_bytes)
        self._evict_down_to(room)
        if not pool.cold:
            self._grow(pool, size)
        slot = pool.cold.popitem()[0]
        slot.segment.cold -= 1
        return slot

    def _grow(self, pool: _Pool, size: int) -> None:
        try:
            segment = _Segment(self._next_id, pool)
        except OSError as error:
            what = f"shared memory ({error})"
            raise ResourceError(what, self._used_bytes + size, self._limit_bytes) from error
        self._next_id += 1
        self._segments[segment.id] = segment
        # Reversed, so that a segment is filled from its start.
        pool.cold.update(dict.fromkeys(reversed(segment.slots)))

    def _settle(self) -> None:
        # Looked at again after the release of the lock: another thread may have failed to get it.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
                self._evict_down_to(self._watermark_bytes + self._reserve_bytes)
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            slot = block._slot
            if slot.serial != block._serial:
                continue
            pool = slot.pool
            slot.serial += 1
            slot.released = self._releases = self._releases + 1
            pool.warm.append(slot)
            self._used_bytes -= pool.block_bytes
            self._idle_bytes += pool.block_bytes

    def _evict_down_to(self, idle_bytes: int) -> None:
        while self._idle_bytes > idle_bytes:
            idle = (pool for pool in self._pools.values() if pool.warm)
            pool = min(idle, key=lambda pool: pool.warm[0].released)
            slot = pool.warm.popleft()
            self._idle_bytes -= pool.block_bytes
            self._cool(pool, slot)

    def _cool(self, pool: _Pool, slot: _Slot) -> None:
        segment = slot.segment
        pool.cold[slot] = None
        segment.cold += 1
        if segment.cold == len(segment.slots):
            for each in segment.slots:
                del pool.cold[each]
            self._close_segment(segment)
        elif pool.block_bytes % _PAGE == 0:
            segment.map.madvise(mmap.MADV_REMOVE, slot.offset, pool.block_bytes)

    def _close_segment(self, segment: _Segment) -> None:
        del self._segments[segment.id]
        segment.close()
        if self._on_closed is not None:
            self._on_closed(segment.id)


@final
class ArenaView:
    """A peer's mappings of an owner's segments."""

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}

    def __contains__(self, segment_id: int) -> bool:
        return segment_id in self._views

    def open(self, segment_id: int, path: str, size: int) -> None:
        """Maps a segment of another process.

        Raises:
            OSError: It cannot be opened from here (another machine, user or namespace).
            ChannelError: What is there is not that segment.
        """
        if segment_id in self._views:
            return
        if not path.startswith("/proc/"):
            raise ChannelError(f"{path} is no path of a segment")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_segment(fd, segment_id, size)
            self._views[segment_id] = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def view(self, ref: BlockRef) -> memoryview:
        """The memory of a block.

        Raises:
            ChannelError: The segment is not open here, or the block lies outside it.
        """
        segment_id, offset, size = ref
        whole = self._views.get(segment_id)
        if whole is None:
            raise ChannelError(f"segment {segment_id} of the shared memory is not open")
        if offset < 0 or size < 0 or offset + size > len(whole):
            raise ChannelError(f"block {ref} lies outside its segment of {len(whole)} bytes")
        return whole[offset : offset + size]

    def forget(self, segment_id: int) -> None:
        """Drops a mapping; views of it that are still held stay readable."""
        self._views.pop(segment_id, None)

    def close(self) -> None:
        """Drops all mappings."""
        self._views.clear()


def _check_segment(fd: int, segment_id: int, size: int) -> None:
    # The owner's descriptor number may have been reused for another file meanwhile.
    name = str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("/memfd:").split(" ")[0]
    if name != f"{_NAME}{segment_id}" or os.fstat(fd).st_size != size:
        raise ChannelError(f"segment {segment_id} of the shared memory is gone")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ChannelError(f"segment {segment_id} of the shared memory is not sealed")
