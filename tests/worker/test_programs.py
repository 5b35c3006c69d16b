"""Loading programs, and what can be known of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client as xc
from worker_rig import (
    ADD_ONE,
    DONATING,
    F32,
    SHARDED,
    TWO_RESULTS,
    artifact,
    compile_program,
    options_of,
)

from regrow.channel import commands as c
from regrow.errors import Code, StatusError
from regrow.worker.compiler import Compiler
from regrow.worker.modules import Signature, parse_module
from regrow.worker.platform import COPY_NOW, Domain
from regrow.worker.programs import Program, compile_options

RELAY: Any = None  # no program here calls back


def load(compiler: Compiler, domain: Domain, text: str, devices: tuple[int, ...] = (4,)) -> Program:
    told = compile_program(compiler, text, len(devices))
    outs = [(kind, tuple(dims)) for kind, dims in told["outputs"]]
    command = c.Load(
        1, told["name"], told["blob"], b"", options_of(len(devices)), devices, 1, outs, 0
    )
    return Program(command, domain, RELAY)


def put(domain: Domain, value: Any, device: int = 4) -> Any:
    return domain.put(np.asarray(value, np.float32), device, "device", COPY_NOW)


def test_options_get_the_devices_of_this_process() -> None:
    options = compile_options(options_of(2, 2), 2, [3, 1, 2, 0])
    assert options.device_assignment.replica_count() == 2
    assert options.device_assignment.computation_count() == 2
    again = xc.CompileOptions.ParseFromString(options.SerializeAsString())
    assert again.executable_build_options.num_partitions == 2


@pytest.mark.parametrize(
    ("program", "version"),
    [
        (b"ML\xefRStableHLO_v99.0.0\x00 of another time", "v?99.0.0"),
        (b"ML\xefRStableHLO_v1.2.3", "v?1.2.3"),
        (b"no such thing", "unknown"),
    ],
)
def test_a_program_that_cannot_be_read(program: bytes, version: str) -> None:
    from jaxlib.mlir.dialects import stablehlo

    with pytest.raises(StatusError, match=f"written as StableHLO {version}") as caught:
        parse_module(program)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert f"reads up to {stablehlo.get_current_version()}" in caught.value.message


def test_an_op_that_is_not_known_is_named() -> None:
    program = bytearray(artifact(ADD_ONE))
    place = program.find(b"add_v1")
    assert place > 0
    program[place : place + 6] = b"adz_v1"
    with pytest.raises(StatusError, match="it does not know adz_v1"):
        parse_module(bytes(program))


def test_a_program_without_a_function() -> None:
    with pytest.raises(StatusError, match="without a main function"):
        Signature(parse_module(artifact("module @empty {}")))


def test_what_the_text_tells() -> None:
    told = Signature(parse_module(artifact(TWO_RESULTS)))
    assert told.name == "two"
    assert told.inputs == [(F32, (4,)), (F32, (4,))]
    assert told.outputs == [(F32, (4,)), (F32, ())]
    assert told.donated == []
    assert Signature(parse_module(artifact(DONATING))).donated == [0]


def test_kinds_of_arguments_and_results() -> None:
    kinds = ("i1", "ui8", "bf16", "complex<f32>", "i4", "f8E4M3FN")
    arguments = ", ".join(f"%a{i}: tensor<2x{kind}>" for i, kind in enumerate(kinds))
    results = ", ".join(f"tensor<2x{kind}>" for kind in kinds)
    names = ", ".join(f"%a{i}" for i in range(len(kinds)))
    text = f"""
    module @kinds {{
      func.func public @main({arguments}) -> ({results}) {{
        return {names} : {results}
      }}
    }}
    """
    told = Signature(parse_module(artifact(text)))
    assert told.inputs == told.outputs == [(k, (2,)) for k in (1, 6, 16, 15, 21, 20)]


def test_running_on_one_device(home: Domain, compiler: Compiler) -> None:
    for device in (4, 5):
        program = load(compiler, home, ADD_ONE, (device,))
        assert program.name == "add_one"
        assert (program.devices, program.local) == ((device,), (device,))
        (out,), token = program.run([put(home, [1, 2, 3, 4], device)], 1, False)
        assert token is None
        assert np.asarray(out).tolist() == [2, 3, 4, 5]
        assert out.devices() == {home.devices[device]}
        program.close()


def test_a_token_is_ready_when_the_run_has_ended(home: Domain, compiler: Compiler) -> None:
    program = load(compiler, home, TWO_RESULTS)
    args = [put(home, [1, 2, 3, 4]), put(home, [1, 1, 1, 1])]
    (one, two), token = program.run(args, 1, True)
    token.block_until_ready()
    assert np.asarray(one).tolist() == [2, 3, 4, 5]
    assert np.asarray(two).tolist() == 14


@pytest.mark.parametrize("devices", [(4, 5), (5, 4)])
def test_running_on_two_devices(home: Domain, compiler: Compiler, devices: tuple[int, ...]) -> None:
    program = load(compiler, home, SHARDED, devices)
    shards = [
        put(home, half, device) for half, device in zip(([1, 2], [3, 4]), devices, strict=True)
    ]
    (split, total), _ = program.run([home.assemble(devices, shards)], 1, False)
    assert [np.asarray(shard).tolist() for shard in split._arrays] == [[2, 3], [4, 5]]
    assert [shard.devices() for shard in split._arrays] == [{home.devices[d]} for d in devices]
    assert [np.asarray(shard).tolist() for shard in total._arrays] == [14, 14]


def test_a_blob_that_is_none(home: Domain) -> None:
    command = c.Load(1, "x", b"no blob", b"", options_of(), (4,), 1, [], 0)
    with pytest.raises(Exception, match=r"\w"):
        Program(command, home, RELAY)


def test_arguments_that_do_not_fit(home: Domain, compiler: Compiler) -> None:
    program = load(compiler, home, ADD_ONE)
    for args in ([], [put(home, [1, 2, 3])], [put(home, [1, 2, 3, 4]), put(home, [1])]):
        with pytest.raises(Exception, match=r"rgument|arameter|buffer"):
            (out,), _ = program.run(args, 1, False)
            out.block_until_ready()
    (out,), _ = program.run([put(home, [1, 2, 3, 4])], 1, False)
    assert np.asarray(out).tolist() == [2, 3, 4, 5]
