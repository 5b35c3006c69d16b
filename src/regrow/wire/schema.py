"""The message classes of the IFRT proxy, made from what the installed jaxlib carries inside itself.

jaxlib ships no `.proto` files, but its shared library holds the serialized descriptor of each of
them. They are read from there, without importing jaxlib, into a descriptor pool of our own, so the
messages always are those of the jaxlib that is installed. The descriptors that are needed are kept
in the user's cache directory, since to search 350 MB takes a second.

    schema.proxy.IfrtRequest.FromString(data)
    schema.ifrt.DTypeProto(kind=11)
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper
from google.protobuf.message import DecodeError

from regrow.errors import UnsupportedError

_REQUIRED: Final = (
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt_proxy/common/ifrt_service.proto",
    "xla/python/ifrt_proxy/common/types.proto",
    "xla/python/ifrt_proxy/common/array_util.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/ifrt/layout_serdes.proto",
    "xla/python/pjrt_ifrt/pjrt_layout_serdes.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
    "xla/python/pjrt_ifrt/xla_host_callback.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/pjrt/proto/compile_options.proto",
    "xla/service/hlo.proto",
    "xla/pjrt/distributed/coordination/coordination_service.proto",
)

# A descriptor begins with field 1, its own file name: tag 0x0a, length, text.
_FILE_NAME = re.compile(rb"\x0a[\x01-\x7f][A-Za-z0-9_/\-.]+\.proto")
_LAST_FIELD: Final = 14  # of FileDescriptorProto
_CACHED: Final = 8
_CACHE_FILES: Final = ("descriptors-*", ".descriptors-*")


def jaxlib_version() -> str:
    """The version of the installed jaxlib.

    Raises:
        UnsupportedError: No jaxlib is installed.
    """
    try:
        return importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError("jaxlib is not installed; install jax") from None


def library_path() -> Path:
    """The shared library of jaxlib that holds the descriptors.

    Raises:
        UnsupportedError: jaxlib is not installed, or is laid out in another way.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError("jaxlib is not installed; install jax")
    path = Path(spec.submodule_search_locations[0]) / "libjax_common.so"
    if not path.is_file():
        raise UnsupportedError(f"jaxlib {jaxlib_version()} has no {path.name}")
    return path


def extract(library: Path) -> descriptor_pb2.FileDescriptorSet:
    """Reads the descriptors out of `library`: the needed ones and what they import, imports first.

    Raises:
        UnsupportedError: The library lacks one of them.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
        for descriptor in _scan(data):
            found.setdefault(descriptor.name, descriptor)
    result = descriptor_pb2.FileDescriptorSet()
    done: set[str] = set()
    for name in _REQUIRED:
        _add_with_imports(name, found, done, result)
    return result


def _scan(data: mmap.mmap) -> Iterator[descriptor_pb2.FileDescriptorProto]:
    for match in _FILE_NAME.finditer(data):
        start = match.start()
        length = data[start + 1]
        name = match.group()[2 : 2 + length]
        if len(name) != length or not name.endswith(b".proto"):
            continue
        try:
            yield descriptor_pb2.FileDescriptorProto.FromString(data[start : _end(data, start)])
        except (DecodeError, IndexError):
            continue  # text that only looks like the beginning of a descriptor


def _end(data: mmap.mmap, start: int) -> int:
    """Where the descriptor ends: its fields are in ascending order, and a NUL byte follows."""
    end = start
    last_field = 1
    while True:
        tag, position = _varint(data, end)
        field, wire_type = tag >> 3, tag & 7
        if not last_field <= field <= _LAST_FIELD or (field == 1 and end != start):
            return end
        if wire_type == 2:
            length, position = _varint(data, position)
            position += length
        elif wire_type == 0:
            _, position = _varint(data, position)
        else:
            return end
        end, last_field = position, field


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return value, position


def _add_with_imports(
    name: str,
    found: dict[str, descriptor_pb2.FileDescriptorProto],
    done: set[str],
    result: descriptor_pb2.FileDescriptorSet,
) -> None:
    if name in done:
        return
    done.add(name)
    if name not in found:
        raise UnsupportedError(
            f"jaxlib {jaxlib_version()} carries no description of {name}; it is too old or too new"
        )
    for dependency in found[name].dependency:
        _add_with_imports(dependency, found, done, result)
    result.file.append(found[name])


def _cache_path(library: Path) -> Path | None:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None  # no home directory
    status = library.stat()
    name = f"descriptors-{jaxlib_version()}-{status.st_size}-{status.st_mtime_ns}.binpb"
    return root / "regrow" / name


def _read_cache(path: Path) -> descriptor_pool.DescriptorPool | None:
    try:
        return _pool(descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file)
    except (OSError, DecodeError, UnsupportedError):
        return None


def _write_cache(path: Path, descriptors: descriptor_pb2.FileDescriptorSet) -> None:
    """Writes the cache file, if that is possible: without it the next start is slower, no more."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".descriptors-", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(descriptors.SerializeToString())
        temporary.replace(path)
        _remove_old(path.parent)
    except OSError:
        if temporary:
            temporary.unlink(missing_ok=True)


def _remove_old(directory: Path) -> None:
    """Keeps the latest files, those of every jaxlib in use; also what a killed writer has left."""
    files = [file for pattern in _CACHE_FILES for file in directory.glob(pattern)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_CACHED:]:
        file.unlink(missing_ok=True)


def _pool(
    files: Iterable[descriptor_pb2.FileDescriptorProto],
) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    names = set()
    try:
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
            names.add(file.name)
    except TypeError as error:  # what upb raises for a file that does not link
        raise UnsupportedError(
            f"the message descriptions of jaxlib {jaxlib_version()} do not fit together: {error}"
        ) from error
    missing = sorted(set(_REQUIRED) - names)
    if missing:
        raise UnsupportedError(f"no description of {', '.join(missing)}")
    return pool


def load_pool() -> descriptor_pool.DescriptorPool:
    """Makes a new descriptor pool from the cache, or from the library when there is none.

    Raises:
        UnsupportedError: The installed jaxlib has no such messages.
    """
    library = library_path()
    path = _cache_path(library)
    pool = _read_cache(path) if path else None
    if pool is None:
        descriptors = extract(library)
        pool = _pool(descriptors.file)
        if path:
            _write_cache(path, descriptors)
    return pool


_lock = threading.Lock()
_cached_pool = functools.cache(load_pool)


def _the_pool() -> descriptor_pool.DescriptorPool:
    with _lock:  # two pools would make two classes of each message
        return _cached_pool()


@final
class Namespace:
    """The messages and enums of one protobuf package, by attribute.

    A name that this jaxlib does not have raises AttributeError, so `hasattr` tells whether it does.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = _find(f"{self._package}.{name}")
        setattr(self, name, value)  # the next look-up does not come here
        return value


def _find(full_name: str) -> Any:
    pool = _the_pool()
    try:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
    except KeyError:
        pass
    try:
        return enum_type_wrapper.EnumTypeWrapper(pool.FindEnumTypeByName(full_name))
    except KeyError:
        raise AttributeError(f"jaxlib {jaxlib_version()} has no {full_name}") from None


proxy: Final = Namespace("xla.ifrt.proxy")
ifrt: Final = Namespace("xla.ifrt")
ifrt_proto: Final = Namespace("xla.ifrt.proto")
xla: Final = Namespace("xla")
coordination: Final = Namespace("xla.coordination")
tensorflow: Final = Namespace("tensorflow")
