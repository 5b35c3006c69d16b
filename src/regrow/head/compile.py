"""Compilation: asked of the compiler process, kept in memory and on disk.

The key of a program is what its blob depends on: its text, its options without the device
assignment, the jaxlib that made the blob, and whether it spans hosts. So a program for slices 0 and 2
finds the blob of the same program for slices 0 and 1.

A text also holds from where in the user's script it was traced, call stack and all. So a text that is
new is told by the compiler without that first: a step that is traced again from elsewhere, or from an
edited script, is found all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, final

import msgpack

from regrow.channel.commands import Compile, Describe, Identify
from regrow.errors import Code, StatusError
from regrow.head.links import Link
from regrow.wire.schema import jaxlib_version

log = logging.getLogger(__name__)

Compiled: TypeAlias = dict[str, Any]
Done: TypeAlias = Callable[[StatusError | None, Compiled | None], None]
Source: TypeAlias = Literal["compiled", "from memory", "from disk"]

_FORMAT: Final = 2
_TEXTS_KEPT: Final = 4096
_KEPT_BYTES: Final = 512 << 20
_DISK_BYTES: Final = 4 << 30
_TRIMS: Final = 64
_ATTEMPTS: Final = 2
_PART: Final = ".part"
_PART_S: Final = 600.0


class CompilerProcess(Protocol):
    """The process that compiles."""

    @property
    def link(self) -> Link | None:
        """The way to it, None while it is being started."""
        ...


@final
class Job:
    """One compilation, and who waits for it."""

    def __init__(
        self,
        key: bytes,
        program: bytes,
        options: bytes,
        spans: bool,
        callbacks: int,
        shared: bool = True,
    ) -> None:
        self.key = key
        self.program = program
        self.options = options
        self.spans = spans
        self.callbacks = callbacks
        self.shared = shared
        self.identified = False
        self.attempts = 0
        self.waiting: list[Done] = []


@final
class CompileService:
    """Compiles programs, each once.

    Attributes:
        compiled: How many were compiled.
        from_disk: How many were found on disk.
        from_memory: How often one was asked for that was there already.
        on_done: Called for each that is there, with where it comes from.
    """

    def __init__(self, compiler: CompilerProcess, cache: DiskCache | None) -> None:
        self._compiler = compiler
        self._cache = cache
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._kept_bytes = 0
        self._jobs: dict[bytes, Job] = {}
        # The keys of texts that are known, by the texts' own keys.
        self._texts: OrderedDict[bytes, bytes] = OrderedDict()
        self.compiled = 0
        self.from_disk = 0
        self.from_memory = 0
        self.on_done: Callable[[Source], None] = lambda source: None

    def compile(
        self,
        program: bytes,
        options: bytes,
        spans: bool,
        callbacks: int,
        done: Done,
        shared: bool = True,
    ) -> None:
        """Compiles a program; `options` is a CompileOptionsProto without a device assignment.

        One that is not `shared` depends on its client, as those with callbacks do, and is not kept.
        """
        shared = shared and not callbacks
        text = program_key(program, options, spans)
        known = self._texts.get(text) if shared else None
        found = None if known is None else self._find(known)
        if found is not None:
            done(None, found)
            return
        key = known or text
        job = self._jobs.get(key)
        if job is not None:
            job.waiting.append(done)
            return
        job = self._jobs[key] = Job(key, program, options, spans, callbacks, shared)
        job.identified = known is not None or not shared
        job.waiting.append(done)
        self._start(job)

    def describe(self, what: str, compiled: Compiled, options: bytes, devices: int, done: Done):  # type: ignore[no-untyped-def]
        """Asks for the "cost" or the "text" of a compiled program."""
        link = self._compiler.link
        if link is None:
            done(StatusError(Code.UNAVAILABLE, "the compiler is being restarted; try again"), None)
            return
        key, blob = compiled["key"], compiled["blob"]
        link.ask(lambda rid: Describe(rid, what, key, blob, options, devices), done)

    def compiler_up(self) -> None:
        """The compiler has been started (again): what was under way is asked of it anew."""
        for job in list(self._jobs.values()):
            self._start(job)

    def end(self, error: StatusError) -> None:
        """Whatever is under way fails with this error."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            # An answer may come all the same.
            waiting, job.waiting = job.waiting, []
            for done in waiting:
                done(error, None)

    def _start(self, job: Job) -> None:
        link = self._compiler.link
        if link is None:
            return
        job.attempts += 1
        if job.identified:
            link.ask(
                lambda rid: Compile(
                    rid, job.key, job.program, job.options, job.spans, job.callbacks
                ),
                lambda error, value: self._answered(job, link, error, value),
            )
        else:
            link.ask(
                lambda rid: Identify(rid, job.program),
                lambda error, value: self._identified(job, link, error, value),
            )

    def _identified(self, job: Job, link: Link, error: StatusError | None, value: Any) -> None:
        if error is not None:
            self._failed(job, link, error)
            return
        text = job.key
        if self._jobs.pop(text, None) is not job:
            return  # All has ended meanwhile.
        self._texts[text] = job.key = program_key(value, job.options, job.spans)
        if len(self._texts) > _TEXTS_KEPT:
            self._texts.popitem(last=False)
        found = self._find(job.key)
        same = self._jobs.get(job.key)
        if found is not None:
            for done in job.waiting:
                done(None, found)
        elif same is not None:
            same.waiting += job.waiting
        else:
            self._jobs[job.key] = job
            job.identified, job.attempts = True, 0
            self._start(job)

    def _answered(self, job: Job, link: Link, error: StatusError | None, value: Any) -> None:
        if error is not None:
            self._failed(job, link, error)
            return
        self._jobs.pop(job.key, None)
        self.compiled += 1
        self.on_done("compiled")
        value["key"] = job.key
        if job.shared:
            self._keep(job.key, value)
            if self._cache is not None:
                self._cache.write(job.key, value)
        for done in job.waiting:
            done(None, value)

    def _failed(self, job: Job, link: Link, error: StatusError) -> None:
        if link.lost is not None:
            if job.attempts < _ATTEMPTS:
                return  # The compiler ended; `compiler_up` asks again.
            error = StatusError.user(
                Code.FAILED_PRECONDITION,
                f"XLA ended the compiler process {job.attempts} times on this program: {error.message}",
            )
        self._jobs.pop(job.key, None)
        for done in job.waiting:
            done(error, None)

    def _find(self, key: bytes) -> Compiled | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self.from_memory += 1
            self.on_done("from memory")
            return found
        found = None if self._cache is None else self._cache.read(key)
        if found is not None:
            self.from_disk += 1
            self.on_done("from disk")
            self._keep(key, found)
        return found

    def _keep(self, key: bytes, compiled: Compiled) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self._kept_bytes -= len(old["blob"])
        self._kept[key] = compiled
        self._kept_bytes += len(compiled["blob"])
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._kept_bytes -= len(old["blob"])


def program_key(program: bytes, options: bytes, spans: bool) -> bytes:
    """The key of a program in the caches."""
    digest = hashlib.sha256()
    for part in (
        f"{_FORMAT} {jaxlib_version()} {platform.machine()} {_cpu_features()} {spans}".encode(),
        options,
        program,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _cpu_features() -> str:
    """What machine code of another machine may lack here."""
    global _features
    if _features is None:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        _features = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return _features


_features: str | None = None


@final
class DiskCache:
    """Compiled programs as files in a directory of the owner's; the least recently used go first."""

    def __init__(self, directory: Path, limit_bytes: int = _DISK_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        # To look at thousands of files takes long, and the head waits meanwhile.
        self._trim_after = limit_bytes // _TRIMS
        self._untrimmed = self._trim_after
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            log.warning("compile cache: nothing will be kept: %s", error)

    def read(self, key: bytes) -> Compiled | None:
        """The program of that key, or None; a file that cannot be read counts as none."""
        path = self._path(key)
        try:
            compiled = msgpack.unpackb(_read_own(path), strict_map_key=False)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
            log.warning("compile cache: %s: %s", path.name, error)
            return None
        return compiled if isinstance(compiled, dict) and compiled.get("key") == key else None

    def write(self, key: bytes, compiled: Compiled) -> None:
        """Keeps a program."""
        part = None
        try:
            with tempfile.NamedTemporaryFile(
                dir=self._directory, suffix=_PART, delete=False
            ) as file:
                part = Path(file.name)
                self._untrimmed += file.write(msgpack.packb(compiled))
            os.replace(part, self._path(key))
            if self._untrimmed > self._trim_after:
                self._untrimmed = 0
                self._trim()
        except OSError as error:
            log.warning("compile cache: not kept: %s", error)
            if part is not None:
                part.unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}.xla"

    def _trim(self) -> None:
        """Other heads may be doing the same in the same directory."""
        files = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                files.append((path.stat(), path))
        # A head that was killed while it wrote has left a part behind.
        stale = time.time() - _PART_S
        used = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda entry: entry[0].st_mtime):
            is_stale = path.suffix == _PART and stat.st_mtime < stale
            if is_stale or (path.suffix == ".xla" and used > self._limit_bytes):
                path.unlink(missing_ok=True)
                used -= stat.st_size


def _read_own(path: Path) -> bytes:
    """A file that only this user can have written: a blob is machine code."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
            raise PermissionError("others than this user can have written it")
        return file.read()
