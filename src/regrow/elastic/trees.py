"""Training states as lists of leaves with paths, and the check of a state against its target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from regrow.errors import UsageError

_FROZEN = (bool, int, float, complex, str, bytes, type(None))


@final
@dataclass(frozen=True, slots=True)
class Tree:
    """A flattened tree.

    Attributes:
        paths: Where each leaf is, as "state/params/w".
        leaves: The leaves.
        structure: What makes a tree of leaves again.
    """

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """Flattens a tree."""
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs)
        return cls(paths, tuple(leaf for _, leaf in pairs), structure)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The tree with other leaves."""
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def own_copy(path: str, leaf: Any) -> Any:
    """A leaf that is no array of JAX, such that nobody else can change it.

    Raises:
        UsageError: It cannot be copied.
    """
    if isinstance(leaf, _FROZEN):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise UsageError(
            f"{path}: a {type(leaf).__name__} cannot be part of a snapshot, because it cannot be "
            f"copied ({error}); of an iterator save what its get_state() returns"
        ) from error


def check_target(saved: Tree, target: Tree) -> None:
    """Checks that a saved state fits what it is to be loaded into.

    Raises:
        UsageError: Structure, kind, shape or dtype of a leaf differs; names the first by its path.
    """
    if saved.paths != target.paths or not _alike(saved.structure, target.structure):
        raise UsageError(f"the snapshot does not fit the target: {_difference(saved, target)}")
    for path, leaf, wanted in zip(saved.paths, saved.leaves, target.leaves, strict=True):
        _check_leaf(path, leaf, wanted)


def _alike(one: Any, other: Any) -> bool:
    """Whether two structures have the same containers.

    What a container of the user's own holds besides its children may differ: it belongs to the target. A
    `TrainState` of flax has its optimizer there, whose functions are other ones each time it is made.
    """
    if one == other:
        return True
    ours, others = one.node_data(), other.node_data()
    if ours is None or others is None or ours[0] is not others[0]:
        return False
    if issubclass(ours[0], dict) and ours != others:
        return False
    children = one.children(), other.children()
    return len(children[0]) == len(children[1]) and all(map(_alike, *children))


def _some(paths: list[str]) -> str:
    first, *others = paths
    return f"{first!r} and {len(others)} more are" if others else f"{first!r} is"


def _difference(saved: Tree, target: Tree) -> str:
    only_saved = [path for path in saved.paths if path not in set(target.paths)]
    only_target = [path for path in target.paths if path not in set(saved.paths)]
    parts = []
    if only_saved:
        parts.append(f"{_some(only_saved)} in the snapshot only")
    if only_target:
        parts.append(f"{_some(only_target)} in the target only")
    return "; ".join(parts) or "the same leaves are in other containers: " + (
        f"{saved.structure} was saved, the target is {target.structure}"
    )


def _check_leaf(path: str, leaf: Any, wanted: Any) -> None:
    if not _is_array(leaf):
        # Whatever the target holds in its place is only a sign that a leaf is there.
        if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct):
            raise UsageError(
                f"{path}: the snapshot holds a {type(leaf).__name__}, the target is an array "
                f"{_told(wanted)}"
            )
        return
    if not _is_array(wanted):
        if isinstance(leaf, np.ndarray | np.generic):
            return
        raise UsageError(
            f"{path}: the snapshot holds an array {_told(leaf)}, the target is a "
            f"{type(wanted).__name__}; give a jax.ShapeDtypeStruct with a sharding"
        )
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        raise UsageError(f"{path}: the snapshot holds {_told(leaf)}, the target is {_told(wanted)}")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _told(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
