"""Where a store's files are: a directory of this machine, or whatever fsspec reaches.

A name appears only with its whole content: locally a file is written aside, synced and renamed; object
stores make an object visible when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol, final
from urllib.parse import unquote, urlsplit

from regrow.errors import StorageError, UsageError
from regrow.suspend.points import reach
from regrow.suspend.sweep import PART_SUFFIX

_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_ONE_SLASH: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(?!/)")
_UNLASTING: Final = ("memory",)
_READ_ONLY: Final = ("data", "http", "https")
# So that a manifest can be written where neither fsspec nor their packages are installed.
_WELL_KNOWN: Final = ("file", "gs", "s3")
_numbers = itertools.count(1)

BLOCK_BYTES: Final = 4096
"""Memory and places in files that are multiples of it suit reads straight from a disk."""


class Storage(Protocol):
    """Files by names like "chunks/ab12"; every failure is a `StorageError` that names the place."""

    url: str

    def write(self, name: str, data: memoryview | bytes) -> None:
        """Writes a file; it is there whole or not at all, also after a crash once `sync` returned."""
        ...

    def sync(self, folder: str) -> None:
        """Makes what was written to a folder last."""
        ...

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None: there is none."""
        ...

    def read(self, name: str) -> bytes:
        """A whole file."""
        ...

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads a file into memory; returns its size, which may be larger than the memory."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names in a folder, without the folder; empty if there is no such folder."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is fine."""
        ...

    def below(self, folder: str) -> Storage:
        """The storage of a folder."""
        ...

    def clear(self) -> None:
        """Removes everything; what cannot be removed stays."""
        ...


def check_url(url: str) -> str:
    """Returns `url` if state can be kept there; a directory is tried, and nothing is left of that.

    Raises:
        UsageError: It cannot: says why.
    """
    storage = open_storage(url)
    if isinstance(storage, LocalStorage):
        storage.check_writable()
    return url


def check_scheme(url: str) -> str:
    """Returns `url` if it names a kind of storage that there is, whose package may be missing here.

    Raises:
        UsageError: It does not: says why.
    """
    scheme = _scheme(url)
    if scheme not in (None, *_WELL_KNOWN):
        fsspec = _fsspec(url)
        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError:
            pass
        except ValueError as error:
            raise UsageError(f"{url} is no storage that is known here: {error}") from None
    return url


def open_storage(url: str) -> Storage:
    """The storage at a path or an fsspec URL; nothing is read or written yet.

    Raises:
        UsageError: There is no such kind of storage here, or it does not outlive a process.
    """
    scheme = _scheme(url)
    if scheme is None:
        return LocalStorage(Path(url).absolute())
    if scheme == "file":
        return LocalStorage(Path(unquote(urlsplit(url).path)))
    return _open_remote(url, scheme)


def _scheme(url: str) -> str | None:
    """The scheme of a URL; None: it is a path.

    Raises:
        UsageError: State cannot be kept at such a place.
    """
    if not _URL.match(url):
        begun = _ONE_SLASH.match(url)
        if begun is not None:
            raise UsageError(f"{url} is no URL: it would begin {begun[1]}://")
        return None
    scheme = url.partition("://")[0].lower()
    if scheme == "file" and urlsplit(url).netloc not in ("", "localhost"):
        raise UsageError(f"{url} names another machine; a file URL begins file:///")
    if scheme in _UNLASTING:
        raise UsageError(f"{url} does not outlive the process that writes to it")
    if scheme in _READ_ONLY:
        raise UsageError(f"{url} can only be read")
    return scheme


def _fsspec(url: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{url} needs the package fsspec, which is not installed") from None
    return fsspec


def _open_remote(url: str, scheme: str) -> Storage:
    fsspec = _fsspec(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UsageError(f"{url} needs a further package: {error}") from None
    except ValueError as error:
        raise UsageError(f"{url} is no storage that is known here: {error}") from None
    except Exception as error:  # noqa: BLE001 - every file system has its own
        raise UsageError(f"{url} cannot be used: {_line(error)}") from None
    return RemoteStorage(url, scheme, filesystem, path)


@final
class LocalStorage:
    """A directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = str(path)

    def below(self, folder: str) -> LocalStorage:
        """The storage of a folder."""
        return LocalStorage(self._path / folder)

    def check_writable(self) -> None:
        """Makes a file for a moment, in the directory or where that would be made.

        Raises:
            UsageError: It cannot be written.
        """
        there = next(path for path in (self._path, *self._path.parents) if os.path.lexists(path))
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written: {there}: {error.strerror or error}"
            ) from None

    def write(self, name: str, data: memoryview | bytes) -> None:
        """Writes a file aside, syncs it and renames it."""
        path = self._path / name
        part = f"{path}.{os.getpid()}-{next(_numbers)}{PART_SUFFIX}"
        with self._told(name, "cannot be written"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                _write_synced(part, data)
                reach("aside")
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(part).unlink()
                raise

    def sync(self, folder: str) -> None:
        """Makes the names in a folder last, and that of the folder."""
        with self._told(folder, "cannot be synced"):
            path = self._path / folder
            for one in (path, path.parent, path.parent.parent):
                _sync_directory(one)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None: there is none."""
        try:
            return (self._path / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(name, "cannot be looked at", error) from None

    def read(self, name: str) -> bytes:
        """A whole file."""
        with self._told(name, "cannot be read"):
            return (self._path / name).read_bytes()

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads a file into memory; returns its size."""
        path = self._path / name
        with self._told(name, "cannot be read"), path.open("rb", 0) as file:
            done = _read_past_cache(path, file.fileno(), target)
            while done < len(target):
                count = os.preadv(file.fileno(), [target[done:]], done)
                if not count:
                    break
                done += count
            return os.fstat(file.fileno()).st_size

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        try:
            return os.listdir(self._path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._error(folder, "cannot be listed", error) from None

    def remove(self, name: str) -> None:
        """Removes a file."""
        with self._told(name, "cannot be removed"), contextlib.suppress(FileNotFoundError):
            (self._path / name).unlink()

    def clear(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self._path, ignore_errors=True)

    @contextlib.contextmanager
    def _told(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(name, what, error) from None

    def _error(self, name: str, what: str, error: OSError) -> StorageError:
        return StorageError(f"{self._path / name} {what}: {error.strerror or error}")


def _write_synced(path: str, data: memoryview | bytes) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_past_cache(path: Path, fd: int, target: memoryview) -> int:
    """Reads the beginning of a file straight from the disk, if the kernel does not hold it.

    Returns:
        How many bytes it has read; the rest is left to others.
    """
    whole = len(target) - len(target) % BLOCK_BYTES
    if not whole or _is_cached(fd):
        return 0
    done = 0
    # Not every file system can, nor into any memory.
    with contextlib.suppress(OSError):
        straight = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            while done < whole and (count := os.preadv(straight, [target[done:whole]], done)):
                done += count
        finally:
            os.close(straight)
    # What `_is_cached` has had read would tell the next one that all of it is there.
    os.posix_fadvise(fd, 0, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    return done


def _is_cached(fd: int) -> bool:
    """Whether the kernel holds the beginning of a file, or does not tell."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # So that asking reads no more than that.
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return True


def _sync_directory(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems know no sync of a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@final
class RemoteStorage:
    """What fsspec reaches."""

    def __init__(self, url: str, scheme: str, filesystem: Any, path: str) -> None:
        self.url = url.rstrip("/")
        self._scheme = scheme
        self._fs = filesystem
        self._root = path.rstrip("/")
        # A file system that shows a file while it is being written needs the detour of a rename.
        self._renames = "local" in type(filesystem).__name__.lower() or scheme in ("sftp", "ssh")

    def below(self, folder: str) -> RemoteStorage:
        """The storage of a folder."""
        url, path = f"{self.url}/{folder}", f"{self._root}/{folder}"
        return RemoteStorage(url, self._scheme, self._fs, path)

    def write(self, name: str, data: memoryview | bytes) -> None:
        """Writes an object."""
        path = f"{self._root}/{name}"
        with self._told(name, "cannot be written"):
            if self._renames:
                part = f"{path}.{os.getpid()}-{next(_numbers)}{PART_SUFFIX}"
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(part, bytes(data))
                self._fs.mv(part, path)
            else:
                self._fs.pipe_file(path, bytes(data))

    def sync(self, folder: str) -> None:
        """An object that was written lasts."""

    def size(self, name: str) -> int | None:
        """The size of an object in bytes; None: there is none."""
        try:
            return int(self._fs.info(f"{self._root}/{name}")["size"])
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - every file system has its own
            raise self._error(name, "cannot be looked at", error) from None

    def read(self, name: str) -> bytes:
        """A whole object."""
        with self._told(name, "cannot be read"):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads an object into memory; returns its size."""
        data = self.read(name)
        count = min(len(data), len(target))
        target[:count] = data[:count]
        return len(data)

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # noqa: BLE001 - every file system has its own
            raise self._error(folder, "cannot be listed", error) from None
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        """Removes an object."""
        with self._told(name, "cannot be removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def clear(self) -> None:
        """Removes all objects."""
        with contextlib.suppress(Exception):
            self._fs.rm(self._root, recursive=True)

    @contextlib.contextmanager
    def _told(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if what == "cannot be removed":
                raise
            raise StorageError(f"{self.url}/{name} {what}: there is no such file") from None
        except Exception as error:  # noqa: BLE001 - every file system has its own
            raise self._error(name, what, error) from None

    def _error(self, name: str, what: str, error: Exception) -> StorageError:
        return StorageError(f"{self.url}/{name} {what}: {_line(error)}")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
