"""Programs of clients that mean harm: no address or number that they hold is followed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from worker_rig import artifact, ask_compiler, options_of

from regrow.channel import commands as c
from regrow.channel import partitioning, rgcb, values
from regrow.errors import SLICE_DOWN_WORDS, Code
from regrow.worker.compiler import Compiler

OWNER = rgcb.ProgramCallbacks("0123456789abcdef", 7, 0)
ADDRESS = "\\\\10\\\\00\\\\00\\\\00\\\\00\\\\00\\\\00\\\\00"


def program(
    target: str, *, dialect: str = "stablehlo", more: str = "", marked: bool = False
) -> str:
    """A program for two devices that calls a function."""
    mark = ""
    if marked:
        text = rgcb.partitioning_attribute(OWNER)
        mark = f', mhlo.frontend_attributes = {{{rgcb.PARTITIONING} = "{text}"}}'
    config = f'backend_config = "{ADDRESS}", api_version = 1 : i32'.replace("\\\\", "\\")
    return f"""
    module @calls attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32{mark}}} {{
      func.func public @main(%a: tensor<4xf32> {{mhlo.sharding = "{{devices=[2]<=[2]}}"}})
          -> tensor<4xf32> {{
        %b = {dialect}.custom_call @{target}(%a) {{{more or config}}}
          : (tensor<4xf32>) -> tensor<4xf32>
        return %b : tensor<4xf32>
      }}
    }}
    """


def bytecode(text: str) -> bytes:
    """The bytecode of a program, not as an artifact."""
    with mlir.make_ir_context():
        data = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(data)
        return data.getvalue()


def compiled(compiler: Compiler, code: bytes, callbacks: int = 0) -> Any:
    return ask_compiler(
        compiler, lambda rid: c.Compile(rid, code, code, options_of(2), False, callbacks)
    )


def assert_refused(answer: Any, code: Code, text: str) -> None:
    assert isinstance(answer, c.Failed), answer
    assert Code(answer.code) is code, answer
    assert text in answer.message
    assert not any(word in f"{code.name} {answer.message}" for word in SLICE_DOWN_WORDS)


@pytest.mark.parametrize("target", ["InspectSharding", "CustomSPMDPartitioning"])
def test_a_client_that_takes_no_part_is_told_how_it_can(compiler: Compiler, target: str) -> None:
    plain, other = program(target), program(target, dialect="mhlo")
    # A name in the text of a program can be written in many ways.
    spelt = plain.replace(f"@{target}", f'@"\\{ord(target[0]):02x}{target[1:]}"')
    for code in (artifact(plain), plain.encode(), spelt.encode(), other.encode(), bytecode(other)):
        assert_refused(compiled(compiler, code), Code.UNIMPLEMENTED, "`regrow run`")


@pytest.mark.parametrize("dialect", ["stablehlo", "mhlo"])
def test_what_the_client_is_asked_is_a_name_and_no_address(
    compiler: Compiler, dialect: str
) -> None:
    asked: list[c.Callback] = []

    def answer(command: Any) -> None:
        if isinstance(command, c.Callback):
            asked.append(command)
            failure = rgcb.failure(Code.ABORTED, "not today")
            compiler.on_payload(c.pack_all([c.CallbackResult(command.call, failure)]))

    listeners: list[Any] = compiler._sender.listeners
    listeners.append(answer)
    for target, function in (
        ("InspectSharding", rgcb.INSPECT),
        ("CustomSPMDPartitioning", rgcb.PARTITION),
    ):
        code = program(target, dialect=dialect, marked=True).encode()
        assert_refused(compiled(compiler, code), Code.ABORTED, "not today")
        last = asked[-1]
        assert (last.nonce, last.token, last.function) == (OWNER.nonce, OWNER.token, function)
        assert values.decode(memoryview(last.payload))[0].tobytes() == b"\x10" + bytes(7)
    listeners.remove(answer)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("InspectSharding", "of its own"),
        ("CustomSPMDPartitioning", "of its own"),
        ("RegrowSPMDPartitioning", "of its own"),
        ("xla_buffer_python_cpu_callback", "memory of the client's process"),
        ("xla_ffi_python_cpu_callback", "host callback"),
    ],
)
def test_a_shard_program_is_searched_as_well(compiler: Compiler, target: str, text: str) -> None:
    shard = artifact(program(target).replace("devices=[2]<=[2]", "replicated"))

    def answer(command: Any) -> None:
        if isinstance(command, c.Callback):
            question = partitioning.from_arrays(values.decode(memoryview(command.payload)))
            told = [shard, *question.shardings, question.result_sharding]
            parts = [
                rgcb.values_answer(),
                *values.encode([*map(partitioning.of_bytes, told)]),
            ]
            compiler.on_payload(c.pack_all([c.CallbackResult(command.call, b"".join(parts))]))

    compiler._sender.listeners.append(answer)
    try:
        told = compiled(compiler, artifact(program("CustomSPMDPartitioning", marked=True)))
    finally:
        compiler._sender.listeners.remove(answer)
    assert isinstance(told, c.Failed)
    assert text in told.message
    assert not any(word in f"{Code(told.code).name} {told.message}" for word in SLICE_DOWN_WORDS)


def test_nobody_calls_the_functions_of_another(compiler: Compiler) -> None:
    code = program("RegrowSPMDPartitioning", marked=True).encode()
    assert_refused(compiled(compiler, code), Code.UNIMPLEMENTED, "`regrow run`")


def test_custom_partitioning_beside_host_callbacks_is_refused(compiler: Compiler) -> None:
    code = artifact(program("CustomSPMDPartitioning", marked=True))
    assert_refused(compiled(compiler, code, 1), Code.UNIMPLEMENTED, "host callbacks")


@pytest.mark.parametrize("name", ["xla_ffi_python_cpu", "xla_ffi_partitioned_python_cpu"])
def test_host_callbacks_that_a_program_does_not_have(compiler: Compiler, name: str) -> None:
    for config, text in (
        ("mhlo.backend_config = {index = 1 : ui64}", "host callback 1, and it has 1"),
        ("backend_config = {index = 1 : ui64}, api_version = 4 : i32", "host callback 1,"),
        ("backend_config = {index = -1 : i64}, api_version = 4 : i32", "host callback -1,"),
        ('mhlo.backend_config = {index = "1"}', "no number"),
        ('mhlo.backend_config = {index = 0 : i64}, backend_config = "0"', "no number"),
        ("has_side_effect = true", "no number"),
    ):
        code = artifact(program(f"{name}_callback", more=config))
        assert_refused(compiled(compiler, code, 1), Code.INVALID_ARGUMENT, text)


def test_buffer_callbacks(compiler: Compiler) -> None:
    code = artifact(program("xla_buffer_python_cpu_callback"))
    assert_refused(compiled(compiler, code), Code.UNIMPLEMENTED, "memory of the client's process")
