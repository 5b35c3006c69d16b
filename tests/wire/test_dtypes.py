"""Element types, against the enum of the protocol and against JAX."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from regrow.errors import Code, StatusError
from regrow.wire import dtypes, schema

_WITHOUT_DTYPE = {"KIND_UNSPECIFIED", "KIND_TOKEN", "KIND_OPAQUE", "KIND_STRING"}
_KINDS = {
    name: number
    for name, number in schema.ifrt.DTypeProto.Kind.items()
    if name not in _WITHOUT_DTYPE
}
_LETTERS = {"b": "PRED", "i": "S", "u": "U", "f": "F", "c": "C"}


def _name(dtype: np.dtype) -> str:
    """The name of the protocol for a numpy dtype, worked out from the dtype's own name."""
    if dtype.name == "bool":
        return "KIND_PRED"
    if dtype.name == "bfloat16":
        return "KIND_BF16"
    text = dtype.name.replace("uint", "u").replace("int", "s")
    text = text.replace("complex", "c").replace("float", "f").replace("_", "")
    return f"KIND_{text.upper()}"


@pytest.mark.parametrize("name", _KINDS)
def test_every_kind_of_the_protocol_has_its_dtype(name: str) -> None:
    dtype = dtypes.numpy_dtype(_KINDS[name])
    assert _name(dtype) == name
    assert dtypes.kind_of(dtype) == _KINDS[name]


def test_token_and_string_are_the_protocols() -> None:
    kinds = schema.ifrt.DTypeProto.Kind
    assert kinds.Value("KIND_TOKEN") == dtypes.TOKEN
    assert kinds.Value("KIND_STRING") == dtypes.STRING


@pytest.mark.parametrize("kind", [0, 13, 14, dtypes.TOKEN, dtypes.STRING, -1, 1000])
def test_kinds_without_dtype(kind: int) -> None:
    with pytest.raises(StatusError, match=str(kind)) as caught:
        dtypes.numpy_dtype(kind)
    assert caught.value.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "V4", "i4,f4", ">f4"])
def test_dtypes_without_kind(dtype: str) -> None:
    with pytest.raises(StatusError) as caught:
        dtypes.kind_of(np.dtype(dtype))
    assert caught.value.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("f32", "KIND_F32"),
        ("i1", "KIND_PRED"),
        ("ui8", "KIND_U8"),
        ("complex<f32>", "KIND_C64"),
        ("complex<f64>", "KIND_C128"),
        ("bf16", "KIND_BF16"),
        ("f8E4M3FN", "KIND_F8E4M3FN"),
        ("i4", "KIND_S4"),
        ("!stablehlo.token", "KIND_TOKEN"),
    ],
)
def test_mlir_text(text: str, name: str) -> None:
    assert dtypes.kind_of_mlir(text) == schema.ifrt.DTypeProto.Kind.Value(name)


@pytest.mark.parametrize("text", ["", "index", "f32 ", "tensor<f32>", "!quant.uniform<i8:f32>"])
def test_mlir_text_that_is_not_known(text: str) -> None:
    with pytest.raises(StatusError) as caught:
        dtypes.kind_of_mlir(text)
    assert caught.value.code is Code.UNIMPLEMENTED


# JAX is asked in a process of its own, for it would start a backend in this one.
_ASK_JAX = """
import json, sys
import jax, numpy as np, ml_dtypes
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

jax.config.update("jax_enable_x64", True)
answer = {}
with mlir.make_ir_context(), ir.Location.unknown():
    for name in json.load(sys.stdin):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        try:
            text = str(mlir.dtype_to_ir_type(dtype))
            run = jax.jit(lambda: jax.numpy.zeros((2, 3), dtype)).lower().compile()
            layout = str(run.runtime_executable().get_output_layouts()[0])
        except Exception as error:
            text, layout = None, str(error)
        answer[name] = text, layout
json.dump(answer, sys.stdout)
"""


def test_mlir_text_and_layouts_are_those_of_jax() -> None:
    # XLA takes `i1` for the boolean, and its CPU compiler aborts on floats of six bits.
    names = {dtypes.numpy_dtype(kind).name: kind for kind in _KINDS.values()}
    names = {n: kind for n, kind in names.items() if n != "int1" and not n.startswith("float6")}
    result = subprocess.run(
        [sys.executable, "-c", _ASK_JAX],
        input=json.dumps(list(names)),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    answer = json.loads(result.stdout)
    known = {name: pair for name, pair in answer.items() if pair[0] is not None}
    assert len(known) >= 25, answer
    for name, (text, layout) in known.items():
        kind = names[name]
        assert dtypes.kind_of_mlir(text) == kind, name
        bits = dtypes.layout_bits(kind)
        assert layout == ("{1,0}" if bits is None else f"{{1,0:E({bits})}}"), name
