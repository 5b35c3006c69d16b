"""An exception that nobody expected ends the head, and every wait with it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regrow.head.guard import Guard, unexpected

# Breaks the head, and no other process: what Python imports before all else may change anything.
FAULT = """
import os, sys
from pathlib import Path

if "regrow.head" in sys.orig_argv:
    from regrow.head.links import Link

    flush = Link._flush

    def broken(self):
        if Path(os.environ["TEST_FAULT"]).exists():
            raise KeyError("INTERNAL fault of a test")
        flush(self)

    Link._flush = broken
"""
CLIENT = """
import os, threading
from pathlib import Path

import regrow

with regrow.LocalCluster(slices=1, devices_per_slice=1) as cluster:
    regrow.connect(cluster.target)
    import jax
    import jax.numpy as jnp

    endless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y[0] > 0, lambda y: y + 1e-9, x))
    waited_for = endless(jnp.ones(1))
    threading.Timer(0.3, Path(os.environ["TEST_FAULT"]).touch).start()
    try:
        waited_for.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        print(error)
    cluster._supervisor.head.wait(20)
    print(cluster._supervisor.last_words())
"""


def guarded(test: Callable[[asyncio.AbstractEventLoop], None]) -> list[str]:
    """What a guard made of what `test` did to its loop."""
    failures: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(Guard(failures.append))
        test(loop)
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    return failures


def fail() -> None:
    raise LookupError("a fault")


def test_a_callback_that_fails_ends_the_head(caplog: pytest.LogCaptureFixture) -> None:
    def test(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(fail)
        loop.call_later(0.001, fail)

    text = "the head failed: LookupError: a fault; its log tells where"
    assert guarded(test) == [text]
    assert "in fail" in caplog.text


def test_a_task_that_fails_ends_the_head() -> None:
    async def work() -> None:
        fail()

    def test(loop: asyncio.AbstractEventLoop) -> None:
        loop.create_task(work())

    assert len(guarded(test)) == 1


def test_what_is_reported_ends_the_head(caplog: pytest.LogCaptureFixture) -> None:
    def test(_: asyncio.AbstractEventLoop) -> None:
        unexpected("Up of slice 0 host 0", ValueError("no"))

    assert len(guarded(test)) == 1
    assert "Up of slice 0 host 0" in caplog.text


def test_what_ends_nobodys_wait_does_not_end_the_head(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    def test(loop: asyncio.AbstractEventLoop) -> None:
        loop.create_future().set_exception(LookupError("the answer came too late"))
        loop.call_exception_handler(
            {"message": "no more files", "socket": 1, "exception": OSError()}
        )
        loop.call_exception_handler({"message": "something is strange"})

    assert guarded(test) == []
    assert "the answer came too late" in caplog.text


def test_a_client_that_waits_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    told = subprocess.run(
        [sys.executable, "-c", CLIENT],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "TEST_FAULT": str(tmp_path / "now")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    cause = "the head failed: KeyError: '{} fault of a test'; its log tells where"
    error, last_words = told.stdout.splitlines()
    assert error == f"UNAVAILABLE: {cause.format('internal')}", told.stderr
    assert last_words == f": {cause.format('INTERNAL')}"
