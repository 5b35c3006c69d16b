"""Long waits are told: for what, or where the client is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regrow.channel import rgcb, values
from regrow.errors import Code
from regrow.head import attention
from regrow.head.attention import Attention
from regrow.observe import Run


class Client:
    """Answers where it is; stands for the callback connections."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer

    def call(self, nonce: str, token: int, index: int, payload: Any, done: Callable) -> None:
        assert (nonce, token, index) == ("n", rgcb.WHERE, 0)
        assert values.decode(payload) == []
        if self.answer is not None:
            done(self.answer)


def told(loads: bool, text: str) -> bytes:
    place = np.frombuffer(text.encode(), np.uint8)
    return rgcb.values_answer() + b"".join(values.encode([np.array(loads), place]))


def quiet_run(monkeypatch: pytest.MonkeyPatch, waited_s: float) -> Run:
    run = Run(0.0)
    run.slices_up(1.0)
    run.clients(1, 1.0)
    program = run.steps.program("jit_step", 1000, False)
    for now in (2.0, 3.0):
        run.launched(program, now)
        run.waited(run.begin("wait", now), now + 0.5, failed=False, for_all=True)
    monkeypatch.setattr(attention, "monotonic", lambda: 3.5 + waited_s)
    return run


def lines(
    run: Run, client: Any, nonces: tuple[str, ...] = ("n",), after_s: float = 0.0
) -> list[str]:
    said: list[str] = []

    async def main() -> None:
        watcher = Attention(
            run, client, lambda: nonces, lambda slices: "heard", lambda text, s: said.append(text)
        )
        watcher.begin()
        await asyncio.sleep(after_s)
        watcher.close()

    asyncio.run(main())
    return said


def test_a_data_loader_is_named(monkeypatch) -> None:
    run = quiet_run(monkeypatch, 4.0)
    [line] = lines(run, Client(told(True, "train.py:7 (next_batch)")))
    assert line.startswith("the client has asked for nothing for 4.0 s (usual: ")
    assert line.endswith("): it is in its data loader, at train.py:7 (next_batch)")
    assert run.in_loader
    assert run.ledger.bucket == "DATA_LOADING_SYNC"


def test_a_client_that_cannot_be_asked(monkeypatch) -> None:
    [line] = lines(quiet_run(monkeypatch, 4.0), Client(None), nonces=())
    assert line.endswith("it cannot be asked where it is")


@pytest.mark.parametrize(
    "answer", [None, b"", rgcb.failure(Code.CANCELLED, "gone"), told(True, "x")[:-8]]
)
def test_a_client_that_does_not_answer(monkeypatch, answer) -> None:
    monkeypatch.setattr(attention, "_ANSWER_S", 0.01)
    [line] = lines(quiet_run(monkeypatch, 20.0), Client(answer), after_s=0.1)
    assert line.endswith("it does not answer; maybe a call holds its interpreter")
    # One that is silent for a moment may be about to end.
    assert lines(quiet_run(monkeypatch, 4.0), Client(answer), after_s=0.1) == []


def test_a_wait_for_slices(monkeypatch) -> None:
    run = quiet_run(monkeypatch, 4.0)
    run.launched(run.steps.main, 3.5)
    run.begin("wait", 3.5, slices=(0, 2))
    [line] = lines(run, Client(None))
    assert line == (
        "the client has waited 4.0 s (usual: 0.095 s) for what jit_step computes on slices 0, 2 (heard)"
    )
