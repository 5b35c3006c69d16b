"""States as trees: copies of leaves, and what fits what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

from regrow.elastic.trees import Tree, check_target, own_copy
from regrow.errors import UsageError


@jax.tree_util.register_dataclass
@dataclass
class Model:
    """As a `TrainState` of flax: its function is no leaf."""

    params: Any
    apply: Any = field(metadata={"static": True})


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_paths_and_back() -> None:
    state = {"a": [1, {"b": 2}], "c": (None, 3), "d": ()}
    tree = Tree.of(state)
    assert tree.paths == ("a/0", "a/1/b", "c/1")
    assert tree.tree(tree.leaves) == state


@pytest.mark.parametrize("leaf", [1, 2.5, "x", b"y", True, [1, [2]], {"a": {3}}])
def test_copies(leaf: Any) -> None:
    copied = own_copy("p", leaf)
    assert copied == leaf
    assert (copied is leaf) == isinstance(leaf, int | float | str | bytes)


def test_an_array_is_copied() -> None:
    array = np.arange(3)
    copied = own_copy("p", array)
    array[0] = 9
    assert copied.tolist() == [0, 1, 2]


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(UsageError, match=r"data/it: a generator cannot be part .* get_state\(\)"):
        own_copy("data/it", (n for n in ()))


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        ({"a": struct(2)}, {"a": struct(3)}, r"^a: the snapshot holds float32\[2\], the target is"),
        (
            {"a": struct(2)},
            {"a": struct(2, dtype=np.int32)},
            r"^a: the snapshot holds float32\[2\], the target is int32\[2\]",
        ),
        ({"a": struct(2)}, {"a": 0}, r"^a: the snapshot holds an array .* a int; give a jax.Shape"),
        ({"a": 0}, {"a": struct()}, r"^a: the snapshot holds a int, the target is an array"),
        (
            {"a": {"b": 1}},
            {"a": {"c": 1}},
            "'a/b' is in the snapshot only; 'a/c' is in the target only",
        ),
        ({"a": 1, "b": 2}, {"a": 1}, r"'b' is in the snapshot only"),
        ({"a": 1}, {"a": 1, "b": [2, 3]}, "'b/0' and 1 more are in the target only"),
        ({"a": (1, 2)}, {"a": [1, 2]}, r"in other containers"),
        ({"a": (), "b": 1}, {"c": (), "b": 1}, r"in other containers"),
        (Model((1, 2), 1), Model([1, 2], 2), r"in other containers"),
        (Model((1, None), 1), Model((1, 2), 2), r"'params/1' is in the target only"),
        (Model((1, ()), 1), Model((1, ((),)), 2), r"in other containers"),
    ],
)
def test_what_does_not_fit_is_told_by_its_path(saved: Any, target: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_target(Tree.of(saved), Tree.of(target))


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({"a": struct(2), "n": 3}, {"a": struct(2), "n": "anything"}),
        ({"a": np.zeros(2)}, {"a": 0}),
        ({"a": np.zeros(2, np.float32)}, {"a": struct(2)}),
        ({}, {}),
        (Model({"w": struct(2)}, lambda x: x), Model({"w": struct(2)}, lambda x: x)),
        ([Model({"w": 1}, 1), None], [Model({"w": 1}, 2), None]),
    ],
)
def test_what_fits(saved: Any, target: Any) -> None:
    check_target(Tree.of(saved), Tree.of(target))
