"""The Containerfile, as far as it can be tried without a container runtime."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, list[str]]]:
    """Each instruction and its words."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], shlex.split(line)[1:]) for line in lines]


def test_everything_it_copies_is_there() -> None:
    copied = [word for kind, words in steps() if kind == "COPY" for word in words[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name


def test_everything_that_the_build_reads_is_copied() -> None:
    copied = {word for kind, words in steps() if kind == "COPY" for word in words[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= copied


def test_its_pins_are_those_of_its_python_and_have_what_builds_it() -> None:
    (image,) = [words[0] for kind, words in steps() if kind == "FROM"]
    version = re.fullmatch(r"python:3\.(\d+)-slim", image)
    assert version is not None
    (pins,) = [word for kind, words in steps() if kind == "RUN" for word in words if ".txt" in word]
    assert pins == f"requirements/py3{version[1]}.txt"
    assert re.search(r"^hatchling==", (ROOT / pins).read_text(), re.MULTILINE)


def test_what_it_copies_is_enough_to_build_and_to_run(tmp_path: Path) -> None:
    here, there = tmp_path / "opt", tmp_path / "site"
    for kind, words in steps():
        if kind == "COPY":
            for name in words[:-1]:
                copy(ROOT / name, here / name)
    (build,) = [words for kind, words in steps() if kind == "RUN" and words[-1] == "."]
    assert build[0] == "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run([sys.executable, *build[1:], "--target", str(there)], here, environ)
    command = (ROOT / "Containerfile").read_text().rpartition("CMD ")[2]
    name, *arguments = json.loads(command)
    environ |= {"PYTHONPATH": str(there)}
    told = run([sys.executable, str(there / "bin" / name), *arguments], tmp_path, environ)
    assert {"head", "worker", "run"} <= set(told.split())
    where = run([sys.executable, "-c", "import regrow; print(regrow.__file__)"], tmp_path, environ)
    assert where.startswith(str(there))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def run(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_does_not_run_as_root() -> None:
    users = [words[0] for kind, words in steps() if kind == "USER"]
    assert users == ["regrow"]
