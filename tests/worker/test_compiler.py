"""The compiler answers, and refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from worker_rig import (
    ADD_ONE,
    DONATING,
    F32,
    SHARDED,
    Reports,
    artifact,
    ask_compiler,
    compile_program,
    compiler_rig,
    options_of,
)

from regrow.channel import commands as c
from regrow.errors import SLICE_DOWN_WORDS, Code
from regrow.wire import schema
from regrow.worker.compiler import Compiler


def compile_text(compiler: Compiler, program: bytes, options: bytes, **how: Any) -> Any:
    spans, callbacks = how.get("spans", False), how.get("callbacks", 0)
    return ask_compiler(
        compiler, lambda rid: c.Compile(rid, b"key", program, options, spans, callbacks)
    )


def test_what_is_told_of_a_program(compiler: Compiler) -> None:
    told = compile_program(compiler, DONATING)
    assert told["name"] == "donating"
    assert told["inputs"] == told["outputs"] == ((F32, (4,)),)
    assert told["donated"] == (0,)
    assert told["memory_kinds"] == (("device",),)
    assert told["parameter_layouts"] == told["output_layouts"] == ((0,),)
    assert told["fingerprint"]
    assert told["blob"]
    assert isinstance(told["code_bytes"], int)
    assert told["memory"]["output_size_in_bytes"] == 16


def test_shardings_are_told_for_many_devices(compiler: Compiler) -> None:
    told = compile_program(compiler, SHARDED, 2)
    parse = schema.xla.OpSharding.FromString
    (given,) = [parse(sharding) for sharding in told["parameter_shardings"]]
    split, total = [parse(sharding) for sharding in told["output_shardings"]]
    assert list(given.tile_assignment_dimensions) == [2]
    assert list(split.tile_assignment_dimensions) == [2]
    assert total.type == schema.xla.OpSharding.Type.Value("REPLICATED")


def test_a_program_across_hosts_is_compiled_without_combined_reductions(
    compiler: Compiler,
) -> None:
    assert compile_program(compiler, SHARDED, 2, spans=True)["blob"]


def test_a_program_is_the_same_wherever_it_was_traced(compiler: Compiler) -> None:
    def told(text: str) -> Any:
        return ask_compiler(compiler, lambda rid: c.Identify(rid, artifact(text))).value

    here = ADD_ONE.replace("tensor<4xf32>\n    return", 'tensor<4xf32> loc("a.py":1:2)\n    return')
    there = here.replace('"a.py":1:2', '"b.py":3:4')
    assert artifact(here) != artifact(there)
    assert told(here) == told(there) == told(ADD_ONE)
    assert told(ADD_ONE) != told(ADD_ONE.replace("1.0", "2.0"))
    unread = ask_compiler(compiler, lambda rid: c.Identify(rid, b"no program"))
    assert "cannot read this program" in unread.message


@pytest.mark.parametrize("callbacks", [0, 1])
def test_a_program_that_hosts_compile_themselves_has_no_blob(
    compiler: Compiler, callbacks: int
) -> None:
    answer = compile_text(compiler, artifact(ADD_ONE), options_of(), callbacks=callbacks)
    assert bool(answer.value["blob"]) is not bool(callbacks)


def test_refusals(compiler: Compiler) -> None:
    unknown = """
    module @m {
      func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
        %b = stablehlo.custom_call @no_such_target(%a) : (tensor<4xf32>) -> tensor<4xf32>
        return %b : tensor<4xf32>
      }
    }
    """
    good = artifact(ADD_ONE)
    for program, options, text in (
        (b"ML\xefRStableHLO_v99.0.0\x00", options_of(), "99.0.0"),
        (good, b"\xff\xff", ""),
        (good, options_of(64), "64 devices"),
        (good, options_of(1, 1 << 30), "1073741824 devices"),
        (good, options_of(0), "0 devices"),
        (artifact(unknown), options_of(), "no_such_target"),
    ):
        answer = compile_text(compiler, program, options)
        assert isinstance(answer, c.Failed), (text, answer)
        assert text in answer.message
        assert answer.message
        assert Code(answer.code) is not Code.UNAVAILABLE
        words = f"{Code(answer.code).name} {answer.message}"
        assert not any(word in words for word in SLICE_DOWN_WORDS)
    assert isinstance(compile_text(compiler, good, options_of()), c.Reply)


def test_descriptions_of_what_is_kept_and_of_a_blob(compiler: Compiler) -> None:
    told = compile_program(compiler, SHARDED, 2)
    for key in (repr((SHARDED, 2, False)).encode(), b"of another life"):
        for what in ("cost", "text"):
            answer = ask_compiler(
                compiler,
                lambda rid, what=what, key=key: c.Describe(
                    rid, what, key, told["blob"], options_of(2), 2
                ),
            )
            assert isinstance(answer, c.Reply), answer
            if what == "cost":
                assert answer.value["flops"] > 0
            else:
                assert answer.value.startswith("HloModule")
    answer = ask_compiler(
        compiler, lambda rid: c.Describe(rid, "cost", b"x", b"no blob", options_of(), 1)
    )
    assert isinstance(answer, c.Failed)


def test_signs_of_life_while_it_compiles(compiler: Compiler) -> None:
    reports: Reports = compiler._sender
    program = artifact(ADD_ONE.replace("1.0", "3.25"))
    compiler.on_payload(
        c.pack_all([c.Compile(9001, b"k", program, options_of(), False, 0), c.Ping(77)])
    )
    assert c.Pong(77, 0) in reports.of(c.Pong)
    assert isinstance(reports.answer(9001), c.Reply)


def test_the_end() -> None:
    compiler = compiler_rig(1)
    thread = threading.Thread(target=compiler.run)
    thread.start()
    compiler.on_payload(c.pack_all([c.Exit()]))
    thread.join(10)
    assert not thread.is_alive()
