"""The walk of docs/ray.md: every command of it, in order, and what they print."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from walks import DOCS, steps_of, walk, walk_environ

WALK_S = 1700.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("ray", "flax", "sklearn", "matplotlib")),
    reason="the extras ray, search and plots are not installed",
)
def test_the_ray_walk(tmp_path: Path) -> None:
    text = (DOCS / "ray.md").read_text()
    # Somebody else may have the usual ports.
    for command, ports in (
        ("regrow cloud up --detach", "--port 0"),
        ("regrow ray head up", "--port 0 --dashboard-port 0"),
    ):
        assert command in text
        text = text.replace(command, f"{command} {ports}")
    assert len(steps_of(text)) > 10
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    environ = walk_environ(tmp_path / "home")
    try:
        walk(text, tmp_path, environ, WALK_S)
    finally:
        for words in (["down"], ["cloud", "down"], ["ray", "head", "down"]):
            argv = [sys.executable, "-m", "regrow", *words]
            subprocess.run(argv, env=environ, capture_output=True, timeout=120, check=False)
