"""Programs are compiled once, found again, and survive the compiler."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from head_world import Answer, Role, compiled
from hypothesis import given
from hypothesis import strategies as st

from regrow.channel import commands as c
from regrow.errors import Code, StatusError
from regrow.head import compile as compiling
from regrow.head.compile import CompileService, DiskCache, program_key

ENDED = StatusError(Code.UNAVAILABLE, "the compiler ended: SIGABRT (signal 6)")


class FakeLink:
    """A compiler that answers when the test says so; what a program is, it tells at once.

    Programs are their own identity up to a "@", behind which are locations.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.identified: list[bytes] = []
        self.tells = True
        self.lost: StatusError | None = None

    def ask(self, make: Any, waiter: Any) -> None:
        command = make(len(self.asked) + 1)
        if isinstance(command, c.Identify) and self.tells:
            self.identified.append(command.program)
            waiter(None, command.program.partition(b"@")[0])
        else:
            self.asked.append((command, waiter))

    def answer(self, error: StatusError | None = None, value: Any = None) -> None:
        _, waiter = self.asked.pop(0)
        waiter(error, value if value is not None or error else compiled())

    def end(self) -> None:
        self.lost = ENDED
        asked, self.asked = self.asked, []
        for _, waiter in asked:
            waiter(ENDED, None)


class Bench:
    def __init__(self, cache: DiskCache | None = None, up: bool = True) -> None:
        self.role: Any = Role()
        self.service = CompileService(self.role, cache)
        self.link = FakeLink()
        if up:
            self.start()

    def start(self) -> None:
        self.link = FakeLink()
        self.role.link = self.link
        self.service.compiler_up()

    def end(self) -> None:
        self.role.link = None
        self.link.end()

    def compile(self, program: bytes = b"p", callbacks: int = 0, spans: bool = False) -> Answer:
        answer = Answer()
        self.service.compile(program, b"options", spans, callbacks, answer)
        return answer


# --- keys -----------------------------------------------------------------------------------------


@given(st.binary(max_size=20), st.binary(max_size=20), st.booleans())
def test_keys_tell_programs_apart(one: bytes, other: bytes, spans: bool) -> None:
    assert program_key(one, other, spans) == program_key(one, other, spans)
    assert program_key(one, other, spans) != program_key(one, other, not spans)
    if one != other:
        assert program_key(one, other, spans) != program_key(other, one, spans)
    # Where the options end and the program begins is part of the key.
    assert program_key(one + b"x", other, spans) != program_key(one, b"x" + other, spans)


def test_the_key_knows_the_compiler_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    first = program_key(b"p", b"o", False)
    monkeypatch.setattr(compiling, "jaxlib_version", lambda: "0.0.1")
    second = program_key(b"p", b"o", False)
    monkeypatch.setattr(compiling, "_features", "another CPU")
    assert len({first, second, program_key(b"p", b"o", False)}) == 3


# --- the service ----------------------------------------------------------------------------------


def test_a_program_is_compiled_once() -> None:
    bench = Bench()
    first, second, other = bench.compile(), bench.compile(), bench.compile(b"q")
    assert len(bench.link.asked) == 2
    (command, _), _ = bench.link.asked
    assert command == c.Compile(1, program_key(b"p", b"options", False), b"p", b"options", False, 0)
    bench.link.answer()
    assert first.value is second.value
    assert first.value["key"] == command.key
    assert not other.there
    third = bench.compile()
    assert third.value is first.value
    assert len(bench.link.asked) == 1
    bench.link.answer()
    assert bench.service.compiled == 2


def test_where_it_was_traced_makes_no_difference(tmp_path: Path) -> None:
    bench = Bench(DiskCache(tmp_path))
    first, second = bench.compile(b"p@train.py:10"), bench.compile(b"p@train.py:20")
    bench.link.answer()
    assert first.value is second.value
    assert bench.compile(b"p@train.py:30").value is first.value
    assert (bench.service.compiled, bench.service.from_memory) == (1, 1)
    asked = list(bench.link.identified)
    assert bench.compile(b"p@train.py:30").value is first.value
    assert bench.link.identified == asked
    other = Bench(DiskCache(tmp_path))
    assert other.compile(b"p@edited.py:7").value["blob"] == first.value["blob"]
    assert (other.service.compiled, other.service.from_disk) == (0, 1)


def test_the_compiler_may_die_while_it_identifies() -> None:
    bench = Bench()
    bench.link.tells = False
    first, second = bench.compile(b"p@1"), bench.compile(b"p@2")
    bench.end()
    assert not first.there
    bench.start()
    bench.link.answer()
    assert first.value is second.value
    assert bench.service.compiled == 1


def test_a_text_that_cannot_be_read_is_refused() -> None:
    bench = Bench()
    bench.link.tells = False
    answer = bench.compile()
    refusal = StatusError(Code.FAILED_PRECONDITION, "the server's jaxlib cannot read this program")
    bench.link.answer(refusal)
    assert answer.error is refusal


def test_a_program_that_is_identified_after_the_end_is_not_compiled() -> None:
    bench = Bench()
    bench.link.tells = False
    answer = bench.compile()
    bench.service.end(ENDED)
    assert answer.error is ENDED
    bench.link.answer(value=b"p")
    assert not bench.link.asked


def test_it_tells_where_programs_come_from() -> None:
    bench = Bench()
    sources: list[str] = []
    bench.service.on_done = sources.append
    bench.compile()
    bench.link.answer()
    bench.compile()
    assert sources == ["compiled", "from memory"]


def test_a_program_across_hosts_is_another() -> None:
    bench = Bench()
    bench.compile(spans=False)
    bench.compile(spans=True)
    assert [command.spans for command, _ in bench.link.asked] == [False, True]


def test_a_refusal_is_told_to_all_and_not_kept() -> None:
    bench = Bench()
    first, second = bench.compile(), bench.compile()
    refusal = StatusError(Code.INVALID_ARGUMENT, "no such op")
    bench.link.answer(refusal)
    assert first.error is refusal
    assert second.error is refusal
    again = bench.compile()
    bench.link.answer()
    assert again.value["name"] == "jit_f"


def test_programs_with_callbacks_are_kept_nowhere(tmp_path: Path) -> None:
    bench = Bench(DiskCache(tmp_path))
    bench.compile(callbacks=2)
    bench.link.answer()
    bench.compile(callbacks=2)
    assert len(bench.link.asked) == 1
    assert not list(tmp_path.iterdir())


def test_before_the_compiler_is_up() -> None:
    bench = Bench(up=False)
    answer = bench.compile()
    assert not answer.there
    bench.start()
    bench.link.answer()
    assert answer.value


def test_the_compiler_may_die_once() -> None:
    bench = Bench()
    first, second = bench.compile(), bench.compile(b"q")
    bench.end()
    late = bench.compile(b"r")
    assert not any(answer.there for answer in (first, second, late))
    bench.start()
    assert sorted(command.program for command, _ in bench.link.asked) == [b"p", b"q", b"r"]
    for _ in range(3):
        bench.link.answer()
    assert first.value
    assert second.value
    assert late.value


def test_a_program_that_ends_the_compiler_twice_is_to_blame() -> None:
    bench = Bench()
    answer = bench.compile()
    bench.end()
    bench.start()
    bench.end()
    assert answer.error is not None
    assert answer.error.code is Code.FAILED_PRECONDITION
    assert "XLA ended the compiler process 2 times on this program" in answer.error.message
    assert "SIGABRT" in answer.error.message
    bench.start()
    assert not bench.link.asked


def test_xlas_own_unavailable_is_an_answer() -> None:
    bench = Bench()
    answer = bench.compile()
    bench.link.answer(StatusError(Code.UNAVAILABLE, "of the compiler, not about it"))
    assert answer.error is not None
    assert answer.error.message == "of the compiler, not about it"


def test_least_recently_used_programs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_KEPT_BYTES", 25)
    bench = Bench()

    def compile_now(program: bytes) -> bool:
        answer = bench.compile(program)
        asked = bool(bench.link.asked)
        if asked:
            bench.link.answer(value=compiled(blob=bytes(10)))
        assert answer.there
        return asked

    assert compile_now(b"a")
    assert compile_now(b"b")
    assert not compile_now(b"a")
    assert compile_now(b"c")
    assert not compile_now(b"a")
    assert compile_now(b"b")


def test_describe() -> None:
    bench = Bench()
    answer = Answer()
    bench.service.describe("cost", compiled(key=b"k"), b"options", 4, answer)
    ((command, _),) = bench.link.asked
    assert command == c.Describe(1, "cost", b"k", b"blob", b"options", 4)
    bench.link.answer(value={"flops": 1.0})
    assert answer.value == {"flops": 1.0}
    bench.end()
    without = Answer()
    bench.service.describe("cost", compiled(key=b"k"), b"options", 4, without)
    assert without.error is not None
    assert without.error.code is Code.UNAVAILABLE


# --- on disk --------------------------------------------------------------------------------------


def test_another_head_finds_it_on_disk(tmp_path: Path) -> None:
    bench = Bench(DiskCache(tmp_path / "a" / "cache"))
    first = bench.compile()
    bench.link.answer()
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700
    other = Bench(DiskCache(tmp_path / "a" / "cache"))
    found = other.compile()
    assert not other.link.asked
    assert found.value["name"] == first.value["name"]
    assert found.value["blob"] == b"blob"
    assert (other.service.from_disk, other.service.compiled) == (1, 0)
    other.compile()
    assert other.service.from_disk == 1


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


@given(
    st.binary(max_size=40)
    | st.sampled_from([msgpack.packb(x) for x in (7, None, [], {}, {"key": 1})])
)
def test_a_file_that_is_damaged_counts_as_none(tmp_path_factory: Any, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = DiskCache(folder)
    cache.write(b"key", compiled(key=b"key"))
    (file,) = files(folder)
    file.write_bytes(data)
    assert cache.read(b"key") is None
    file.write_bytes(msgpack.packb(compiled(key=b"another")))
    assert cache.read(b"key") is None


def test_any_truncation_counts_as_none(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.write(b"key", compiled(key=b"key"))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert cache.read(b"key") is None
    file.write_bytes(whole)
    assert cache.read(b"key") is not None


def test_a_file_of_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    cache.write(b"key", compiled(key=b"key"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.read(b"key") is None


def test_a_file_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.write(b"key", compiled(key=b"key"))
    (file,) = files(tmp_path)
    file.chmod(0o666)
    assert cache.read(b"key") is None


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    cache.write(b"key", compiled(key=b"key"))
    (file,) = files(tmp_path / "cache")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert cache.read(b"key") is None


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    size = len(msgpack.packb(compiled(key=b"0", blob=bytes(1000))))
    cache = DiskCache(tmp_path, limit_bytes=3 * size + 10)
    for number in range(3):
        cache.write(b"%d" % number, compiled(key=b"%d" % number, blob=bytes(1000)))
        file = tmp_path / f"{(b'%d' % number).hex()}.xla"
        os.utime(file, (1000 + number, 1000 + number))
    assert cache.read(b"0") is not None
    cache.write(b"3", compiled(key=b"3", blob=bytes(1000)))
    assert [cache.read(b"%d" % n) is not None for n in range(4)] == [True, False, True, True]


def test_what_cannot_be_written_is_not_kept_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        cache.write(b"key", compiled(key=b"key"))
    assert "No space left" in caplog.text
    assert not files(tmp_path)
    monkeypatch.undo()
    cache.write(b"key", compiled(key=b"key"))
    assert [file.suffix for file in files(tmp_path)] == [".xla"]


def test_remains_of_a_head_that_was_killed_are_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    old, fresh = tmp_path / "old.part", tmp_path / "fresh.part"
    for file in (old, fresh):
        file.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache.write(b"key", compiled(key=b"key"))
    assert not old.exists()
    assert fresh.exists()


def test_a_cache_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = Bench(DiskCache(tmp_path / "file" / "cache"))
    answer = bench.compile()
    bench.link.answer()
    assert answer.value
