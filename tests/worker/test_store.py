"""Parts: values, errors, and what is still to come."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from regrow.errors import SLICE_DOWN_WORDS, Code, ResourceError, StatusError, WaitTimeout
from regrow.worker import store as stores
from regrow.worker.platform import COPY_NOW, Domain, shards_of
from regrow.worker.store import Part, PartError, Store, epoch_ended, is_ready, wait_for


def make(domain: Domain, *values: Any, devices: Any = None, epoch: int = 0) -> Part:
    devices = devices or sorted(domain.local)[: len(values)]
    shards = [
        domain.put(np.float32(value), device, "device", COPY_NOW)
        for value, device in zip(values, devices, strict=True)
    ]
    return Part(domain, devices, shards, epoch=epoch)


def values(part: Part) -> list[Any]:
    return [np.asarray(single).tolist() for single in part.singles()]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (StatusError(Code.ABORTED, "text"), Code.ABORTED, "text"),
        (RuntimeError("INVALID_ARGUMENT: text"), Code.INVALID_ARGUMENT, "text"),
        (RuntimeError("INTERNAL: text"), Code.UNKNOWN, "text"),
        (RuntimeError("DATA_LOSS: text"), Code.UNKNOWN, "text"),
        (ValueError("text"), Code.UNKNOWN, "ValueError: text"),
        (ResourceError("memory", 2, 1), Code.RESOURCE_EXHAUSTED, "memory"),
        (WaitTimeout("a thing", 3), Code.UNKNOWN, "waited 3 s for a thing"),
    ],
)
def test_whatever_was_raised(raised: Exception, code: Code, text: str) -> None:
    error = PartError.of(raised, 7)
    assert error.code is code
    assert text in error.message
    assert error.epoch == 7
    assert not any(word in error.message for word in SLICE_DOWN_WORDS)


def test_poison_is_known_again_in_whatever_derives_from_it() -> None:
    text = f"INTERNAL: in thunk: {epoch_ended(12, 'slice 1 was lost')}"
    error = PartError.of(RuntimeError(text), 3)
    assert (error.code, error.message, error.epoch) == (Code.DATA_LOSS, "slice 1 was lost", 12)


def test_an_error_that_is_kept_holds_no_frames() -> None:
    class Big:
        pass

    def failing() -> PartError:
        big = Big()
        seen.append(weakref.ref(big))
        try:
            raise PartError(Code.ABORTED, "text", 4)
        except PartError as error:
            return PartError.of(error)

    seen: list[Any] = []
    kept = failing()
    assert seen[0]() is None
    assert (kept.code, kept.message, kept.epoch) == (Code.ABORTED, "text", 4)


def test_reading_a_failed_part_does_not_keep_what_reads_it(home: Domain) -> None:
    part = Part.failed(home, PartError(Code.ABORTED, "text"))

    def reading() -> None:
        array = make(home, 1).singles()[0]
        seen.append(weakref.ref(array))
        with pytest.raises(PartError):
            part.singles()

    seen: list[Any] = []
    gc.disable()
    try:
        reading()
        assert seen[0]() is None
        assert part.error is not None
        assert part.error.__traceback__ is None
    finally:
        gc.enable()


# --- parts ----------------------------------------------------------------------------------------


def test_a_part_of_shards(home: Domain) -> None:
    part = make(home, 1, 2)
    assert values(part) == [1, 2]
    assert list(part.arrays()) == part.singles()
    assert not part.pending
    wait_for([part])
    assert is_ready(part)


def test_a_whole_array_has_its_shards(home: Domain) -> None:
    single = make(home, 1, 2)
    whole = home.assemble((4, 5), single.singles())
    part = Part(home, (4, 5), whole=whole)
    assert values(part) == [1, 2]
    assert list(part.arrays()) == [whole]


def test_an_expected_part_is_resolved_once(home: Domain) -> None:
    part = Part.expected(home, (4,))
    assert part.pending
    assert not is_ready(part)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(values(part)))
    thread.start()
    part.resolve(make(home, 3))
    thread.join(10)
    assert got == [3]
    part.resolve(make(home, 4))
    part.resolve(Part.failed(home, PartError(Code.ABORTED, "late")))
    assert values(part) == [3]
    assert not part.pending
    make(home, 5).resolve(make(home, 6))  # one that is not expected takes nothing over


def test_what_never_comes_is_a_timeout_that_says_so(
    home: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_PART_DEADLINE_S", 0.02)
    part = Part.expected(home, (4,))
    with pytest.raises(WaitTimeout, match="data that another host was to send"):
        part.singles()
    with pytest.raises(PartError, match="data that another host was to send"):
        wait_for([part])


def test_an_expected_part_may_become_an_error(home: Domain) -> None:
    part = Part.expected(home, (4,))
    part.resolve(Part.failed(home, PartError(Code.ABORTED, "text", 5)))
    with pytest.raises(PartError, match="text") as caught:
        part.singles()
    assert caught.value.epoch == part.epoch == 5
    assert is_ready(part)


def test_readers(home: Domain) -> None:
    part = make(home, 1)
    assert not part.being_read()
    one, other = part.read(), part.read()
    assert part.being_read() == [one, other]
    one.set()
    assert part.being_read() == [other]
    third = part.read()
    other.set()
    third.set()
    assert not part.being_read()


@pytest.mark.parametrize("given", [0, 1])
def test_a_part_of_which_a_program_was_given_one_shard_before_the_other(
    home: Domain, given: int
) -> None:
    """Nobody hears of an error who waits for it, and it is not moved."""
    ended = Domain.home((4, 5))
    whole = ended.assemble((4, 5), make(ended, 1, 2).singles())
    part = Part(ended, (4, 5), whole=whole, epoch=3)
    store = Store(home)
    store.set(1, part)
    wait_for([part])
    assert part.epoch == 0
    shards_of(whole)[given].delete()
    wait_for([part])
    assert store.adopt_idle(None) == 0
    assert part.error is None


# --- domains --------------------------------------------------------------------------------------


def test_to_another_domain_without_a_copy() -> None:
    one, other = Domain.home((0, 1)), Domain.home((0, 1))
    value = np.arange(1000, dtype=np.float32)
    shards = [one.put(value + d, d, "pinned_host", COPY_NOW) for d in (0, 1)]
    part = Part(one, (0, 1), shards, epoch=3)
    pointers = [shard.unsafe_buffer_pointer() for shard in shards]
    del shards
    part.move(other)
    assert part.domain is other
    assert part.epoch == 0
    moved = part.singles()
    assert [single.unsafe_buffer_pointer() for single in moved] == pointers
    assert [single.sharding.memory_kind for single in moved] == ["pinned_host"] * 2
    assert {next(iter(single.devices())) for single in moved} == set(other.devices.values())
    assert np.asarray(moved[1]).tolist() == (value + 1).tolist()
    again = part.singles()
    part.move(other)
    assert part.singles() is again


def test_an_error_moves_as_it_is(home: Domain) -> None:
    other = Domain.home((4, 5))
    part = Part.failed(home, PartError(Code.ABORTED, "text"))
    part.move(other)
    assert part.domain is home
    deleted = make(home, 1)
    deleted.shards = [object()]  # nothing that an array can be made of
    deleted.move(other)
    assert deleted.error is not None
    with pytest.raises(PartError):
        deleted.singles()


# --- the store ------------------------------------------------------------------------------------


def test_the_store(home: Domain) -> None:
    store = Store(home)
    part = make(home, 1)
    store.set(1, part)
    assert store.get(1) is part
    assert store.find(1) is part
    assert len(store) == 1
    assert store.find(2) is None
    missing = store.get(2)
    with pytest.raises(PartError, match="buffer 2 is not on this host") as caught:
        missing.singles()
    assert caught.value.code is Code.FAILED_PRECONDITION
    store.free([1, 2, 3])
    assert not len(store)


def test_idle_arrays_of_ended_epochs_come_home(home: Domain) -> None:
    ended, present = Domain.home((4, 5)), Domain.home((4, 5))
    store = Store(home)
    parts = {
        1: make(home, 1),
        2: make(ended, 2),
        3: make(present, 3),
        4: Part.expected(ended, (4,)),
        5: Part.failed(ended, PartError(Code.ABORTED, "text")),
        6: Part(ended, (4,), whole=[object()]),
    }
    for aid, part in parts.items():
        store.set(aid, part)
    wait_for([parts[2], parts[3]])
    assert store.adopt_idle(present) == 1
    assert parts[2].domain is home
    assert values(parts[2]) == [2]
    assert parts[3].domain is present
    assert parts[4].pending
    assert store.adopt_idle(None) == 1
    assert parts[3].domain is home


def test_waiting_tells_the_first_error(home: Domain) -> None:
    seen: list[Any] = []
    good, bad = make(home, 1), Part.failed(home, PartError(Code.ABORTED, "text", 6))
    with pytest.raises(PartError, match="text") as caught:
        wait_for([good, bad, Part.expected(home, ())], seen.append)
    assert caught.value.epoch == 6
    assert seen == [good]
    assert not is_ready(Part.expected(home, ()))
