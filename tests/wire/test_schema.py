"""The messages that are read out of jaxlib."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from regrow.errors import UnsupportedError
from regrow.wire import schema


@pytest.fixture(scope="module")
def extracted() -> descriptor_pb2.FileDescriptorSet:
    return schema.extract(schema.library_path())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "regrow"


@pytest.fixture
def count_extractions(
    monkeypatch: pytest.MonkeyPatch, extracted: descriptor_pb2.FileDescriptorSet
) -> list[Path]:
    calls: list[Path] = []

    def extract(library: Path) -> descriptor_pb2.FileDescriptorSet:
        calls.append(library)
        return extracted

    monkeypatch.setattr(schema, "extract", extract)
    return calls


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        (schema.proxy, "IfrtRequest"),
        (schema.proxy, "IfrtResponse"),
        (schema.proxy, "GrpcIfrtSessionMetadata"),
        (schema.proxy, "GrpcHostBufferStoreMetadata"),
        (schema.ifrt, "ShardingProto"),
        (schema.ifrt, "SingleDeviceShardingProto"),
        (schema.ifrt, "HloShardingProto"),
        (schema.ifrt, "ConcreteShardingProto"),
        (schema.ifrt, "ConcreteEvenShardingProto"),
        (schema.ifrt, "OpaqueShardingProto"),
        (schema.ifrt, "XlaCompileOptionsProto"),
        (schema.ifrt, "CustomCallProgramProto"),
        (schema.ifrt, "XlaHostCallbackProto"),
        (schema.ifrt_proto, "StringArrayContents"),
        (schema.ifrt_proto, "ByteStrides"),
        (schema.xla, "OpSharding"),
        (schema.xla, "CompileOptionsProto"),
        (schema.xla, "HloModuleProto"),
        (schema.tensorflow, "StatusProto"),
    ],
)
def test_messages_that_the_head_uses_exist(namespace: schema.Namespace, name: str) -> None:
    message = getattr(namespace, name)
    assert message.FromString(message().SerializeToString()) == message()


def test_request_round_trip() -> None:
    request = schema.proxy.IfrtRequest()
    request.request_metadata.op_id = 7
    request.copy_arrays_request.array_handles.extend([1, 2**63])
    request.copy_arrays_request.memory_kind = "pinned_host"
    again = schema.proxy.IfrtRequest.FromString(request.SerializeToString())
    assert again == request
    assert again.WhichOneof("request") == "copy_arrays_request"


def test_enum_by_attribute() -> None:
    semantics = schema.ifrt_proto.ArrayCopySemantics
    assert semantics.Value("ARRAY_COPY_SEMANTICS_DONATE_INPUT") == 3


def test_a_name_that_is_not_there() -> None:
    assert not hasattr(schema.xla, "NoSuchMessage")
    assert not hasattr(schema.xla, "__wrapped__")
    with pytest.raises(AttributeError, match=r"jaxlib [0-9.]+ has no xla\.NoSuchMessage"):
        _ = schema.xla.NoSuchMessage


def test_a_class_is_made_once_by_all_threads() -> None:
    namespace = [schema.Namespace("xla.ifrt") for _ in range(8)]
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(n.RemapPlanProto)) for n in namespace
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 8
    assert len({id(message) for message in found}) == 1


def test_messages_are_those_of_jaxlib() -> None:
    xc = pytest.importorskip("jaxlib.xla_client")
    options = xc.CompileOptions()
    options.num_partitions = 4
    parsed = schema.xla.CompileOptionsProto.FromString(options.SerializeAsString())
    assert parsed.executable_build_options.num_partitions == 4
    parsed.executable_build_options.num_partitions = 2
    back = xc.CompileOptions.ParseFromString(parsed.SerializeToString())
    assert back.num_partitions == 2


def test_neither_jax_nor_jaxlib_is_imported() -> None:
    code = (
        "import sys; from regrow.wire import schema, dtypes, status, shardings, regions; "
        "shardings.single_device(0, None); "
        "print(sorted({'jax', 'jaxlib'} & {m.partition('.')[0] for m in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_imports_come_first(extracted: descriptor_pb2.FileDescriptorSet) -> None:
    seen: set[str] = set()
    for file in extracted.file:
        assert set(file.dependency) <= seen
        seen.add(file.name)


def test_second_load_reads_the_cache(cache: Path, count_extractions: list[Path]) -> None:
    schema.load_pool()
    (file,) = cache.iterdir()
    assert schema.jaxlib_version() in file.name
    pool = schema.load_pool()
    assert len(count_extractions) == 1
    assert pool.FindMessageTypeByName("xla.ifrt.proxy.IfrtRequest")


@pytest.mark.parametrize("spoil", ["empty", "noise", "cut", "directory", "other files"])
def test_spoilt_cache_is_made_again(cache: Path, count_extractions: list[Path], spoil: str) -> None:
    schema.load_pool()
    (file,) = cache.iterdir()
    good = file.read_bytes()
    if spoil == "directory":
        file.unlink()
        file.mkdir()
    else:
        one = descriptor_pb2.FileDescriptorSet.FromString(good).file[:1]
        file.write_bytes(
            {
                "empty": b"",
                "noise": b"\xff" * 100,
                "cut": good[: len(good) // 2],
                "other files": descriptor_pb2.FileDescriptorSet(file=one).SerializeToString(),
            }[spoil]
        )
    assert schema.load_pool().FindMessageTypeByName("xla.OpSharding")
    assert len(count_extractions) == 2
    assert [entry.name for entry in cache.iterdir()] == [file.name]  # no temporary file is left
    if spoil != "directory":
        assert file.read_bytes() == good


def test_cache_of_jaxlibs_that_are_gone_is_removed(
    cache: Path, count_extractions: list[Path]
) -> None:
    cache.mkdir()
    old = [cache / f"descriptors-0.9.{number}-1-1.binpb" for number in range(20)]
    for age_s, file in enumerate([cache / "a file of another kind", *old]):
        file.touch()
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    schema.load_pool()
    kept = {file.name for file in cache.iterdir()}
    assert len(kept) == 9
    assert kept >= {"a file of another kind", old[0].name, old[6].name}
    schema.load_pool()
    assert len(count_extractions) == 1


def test_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count_extractions: list[Path]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert schema.load_pool().FindMessageTypeByName("xla.OpSharding")
    assert len(count_extractions) == 2


def _library(path: Path, files: list[descriptor_pb2.FileDescriptorProto]) -> Path:
    decoys = [
        b"\x0a\x09abc.proto\xff\xff",  # a name, then no field
        b"\x0a\x30short.proto\x12",  # a length that is wrong
        b"\x0a\x09abc.proto\x12\x7fx",  # runs over the end or into what follows
        b"#include xla/xla_data.proto\x00",
    ]
    data = b"\x7fELF\x00".join([*decoys, *(f.SerializeToString() + b"\x00" for f in files)])
    path.write_bytes(data + b"\x00" * 256 + decoys[2])
    return path


def test_extract_finds_each_descriptor_whole(
    tmp_path: Path, extracted: descriptor_pb2.FileDescriptorSet
) -> None:
    library = _library(tmp_path / "lib.so", list(reversed(extracted.file)))
    found = {file.name: file for file in schema.extract(library).file}
    assert found == {file.name: file for file in extracted.file}


def test_missing_description_is_named(
    tmp_path: Path, extracted: descriptor_pb2.FileDescriptorSet
) -> None:
    files = [file for file in extracted.file if file.name != "xla/xla_data.proto"]
    library = _library(tmp_path / "lib.so", files)
    with pytest.raises(UnsupportedError, match=r"no description of xla/xla_data\.proto"):
        schema.extract(library)


def test_descriptions_that_do_not_fit_together(
    extracted: descriptor_pb2.FileDescriptorSet,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
) -> None:
    backwards = descriptor_pb2.FileDescriptorSet(file=reversed(extracted.file))
    monkeypatch.setattr(schema, "extract", lambda library: backwards)
    with pytest.raises(UnsupportedError, match="do not fit together"):
        schema.load_pool()
    assert not cache.exists()


def test_no_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="jaxlib is not installed"):
        schema.library_path()
