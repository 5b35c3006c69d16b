from __future__ import annotations

import subprocess

import pytest

from regrow.cloud.remote.commands import in_background, may_wait_for_others


@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'import jax; print(jax.devices())'",
        "cd x && JAX_TRACE=1 sudo python train.py",
        "pip install jax; python3 -m train",
        "/opt/venv/bin/python3.11 train.py > log 2>&1",
        "./train.sh",
        "bash run.sh --now",
        "torchrun x",
        "sleep 1 & python train.py",
        "git pull\npython train.py",
    ],
)
def test_programs_may_wait(command):
    assert may_wait_for_others(command)


@pytest.mark.parametrize(
    "command",
    [
        "pip install -U 'jax[tpu]'",
        "python3 -m pip install x",
        "python3 --version",
        "sudo apt-get install -y python3",
        "echo python train.py",
        "python train.py > log 2>&1 &",
        "FOO=1",
        "",
        "echo 'open",
        "bash",
    ],
)
def test_others_do_not(command):
    assert not may_wait_for_others(command)


def test_left_behind(tmp_path):
    command = in_background('echo it\\\'s "$((1 + 1))"; sleep 0.2; echo end')
    done = subprocess.run(
        ["sh", "-c", command],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.startswith("process ")
    log = tmp_path / "regrow-background.log"
    while "end" not in log.read_text():
        pass
    assert log.read_text() == "it's 2\nend\n"
