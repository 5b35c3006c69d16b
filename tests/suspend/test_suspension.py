"""Slices leave and come back under a client that notices nothing but a pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suspend_rig import STEPS, Client, Rig, outcome

from regrow.cli import main
from regrow.errors import ClusterError, UsageError
from regrow.processes import is_running
from regrow.suspend import Snapshots, open_storage
from regrow.suspend.export import export, find, held, verify
from regrow.suspend.points import WAIT_S
from waiting import until


@pytest.fixture
def begun(rig: Rig, expected: list[dict[str, str]]) -> Rig:
    """After STEPS."""
    rig.client.do("begin")
    rig.client.do("steps", count=STEPS)
    return rig


def check(rig: Rig, expected: list[dict[str, str]]) -> None:
    """Everything is there, and the job goes on to the same end."""
    assert rig.client.do("digest") == expected[0]
    rig.client.do("steps", count=STEPS)
    assert rig.client.do("digest") == expected[1]


def waits_when_it_asks(rig: Rig) -> bool:
    """Asks for the state, if that is not under way, and tells whether the answer has to wait."""
    if not rig.client.asking:
        rig.client.post("digest")
    elif not rig.client.silent:
        rig.client.answer()
    return bool(rig.cluster.status()["suspended"]["waiting_clients"] == 1)


@pytest.mark.parametrize("slices", [None, [1], pytest.param([0], marks=pytest.mark.slow)])
def test_what_lives_comes_back_bit_by_bit(
    begun: Rig, expected: list[dict[str, str]], slices: list[int] | None
) -> None:
    wanted = [0, 1] if slices is None else slices
    pids = {index: begun.cluster.slices[index].pids for index in (0, 1)}
    saved = begun.cluster.suspend(slices)
    assert saved["slices"] == wanted
    assert saved["bytes"] > 0
    for index in (0, 1):
        assert begun.states()[index] == ("suspended" if index in wanted else "up")
        assert [Path(f"/proc/{pid}").exists() for pid in pids[index]] == [index not in wanted]
    asked = begun.cluster.status()["sessions"][0]["requests"]
    begun.client.post("digest")
    time.sleep(0.2)
    assert begun.client.silent
    assert begun.cluster.status()["suspended"]["waiting_clients"] == 1
    assert begun.cluster.resume(slices)["slices"] == wanted
    assert begun.client.answer()["value"] == expected[0]
    assert begun.states() == ["up", "up"]
    # JAX keeps values that it has fetched once: nothing of this may have come from there.
    assert begun.cluster.status()["sessions"][0]["requests"] >= asked + 50
    check(begun, expected)


def test_it_may_happen_in_the_midst_of_work(rig: Rig, expected: list[dict[str, str]]) -> None:
    rig.client.do("begin")
    rig.client.do("background")
    for slices in (None, [1], [0]):
        rig.cluster.suspend(slices)
        rig.cluster.resume()
    done = rig.client.do("foreground")
    found = rig.client.do("digest")
    rig.client.do("begin")
    rig.client.do("steps", count=done)
    assert rig.client.do("digest") == found


def test_one_after_the_other(begun: Rig, expected: list[dict[str, str]]) -> None:
    begun.cluster.suspend([0])
    begun.cluster.suspend([1])
    begun.cluster.resume([0])
    begun.client.post("digest")
    time.sleep(0.2)
    assert begun.client.silent
    with pytest.raises(ClusterError, match="slice 1 is suspended already"):
        begun.cluster.suspend([1])
    begun.cluster.suspend([0])
    begun.cluster.resume()
    assert begun.client.answer()["value"] == expected[0]
    check(begun, expected)


def test_slices_come_back_with_another_number_of_hosts(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    begun.cluster.suspend([1])
    with pytest.raises(ClusterError, match="slice 0 is up: all slices come back with another"):
        begun.cluster.resume(hosts_per_slice=2)
    begun.cluster.suspend([0])
    with pytest.raises(ClusterError, match="slice 1 is not to be resumed: all slices"):
        begun.cluster.resume([0], hosts_per_slice=2)
    with pytest.raises(UsageError, match=r"of a slice \(2\) cannot be divided among 3 hosts"):
        begun.cluster.resume(hosts_per_slice=3)
    assert begun.states() == ["suspended", "suspended"]
    begun.cluster.resume()
    for hosts in (2, 1):
        assert "of my own" in begun.client.do("own_error")
        begun.cluster.suspend()
        # One of the new hosts dies while it reads: its slice is started again, with as many.
        begun.trap(1, "worker-load-begins=kill=1")
        incarnation = begun.cluster.slices[1].incarnation
        begun.client.post("digest")
        begun.cluster.resume(hosts_per_slice=hosts)
        assert begun.cluster.slices[1].incarnation == incarnation + 2
        assert begun.client.answer()["value"] == expected[0]
        assert [len(one.pids) for one in begun.cluster.slices] == [hosts, hosts]
        assert "of my own" in begun.client.do("error")
        assert begun.client.do("callback") == 12.0
        # Sums over other hosts may be taken in another order: that they are taken is enough.
        begun.client.do("steps", count=STEPS)
        begun.client.do("begin")
        begun.client.do("steps", count=STEPS)
    check(begun, expected)


def loads(rig: Rig, index: int) -> bool:
    """Whether the hosts of a slice are up, and read its state."""
    return rig.states()[index] == "up" and index in rig.suspended()


@contextmanager
def resuming(
    rig: Rig, slices: Sequence[int] = (1,), hosts_per_slice: int | None = None
) -> Iterator[Future[str | None]]:
    """All are suspended and are asked to come back; the block begins while some read their state.

    Its value is what the resumption fails with, if it does.
    """
    rig.cluster.suspend()
    for index in slices:
        rig.trap(index, "worker-load-begins=wait")
    resume = partial(rig.cluster.resume, hosts_per_slice=hosts_per_slice)
    with ThreadPoolExecutor(1) as pool:
        resumed = pool.submit(outcome, resume)
        until(lambda: rig.suspended() == list(slices) and all(loads(rig, one) for one in slices))
        yield resumed


def test_a_suspension_takes_a_resumption_back(
    begun: Rig, expected: list[dict[str, str]], tmp_path: Path
) -> None:
    with resuming(begun) as resumed:
        begun.client.post("digest")
        with pytest.raises(ClusterError, match="everything is as it was: other slices are"):
            begun.cluster.suspend(url=str(tmp_path))
        again = begun.cluster.suspend()
        assert resumed.result() == (
            "slice 1 stays suspended, nothing is lost: its resumption was taken back: "
            "LocalCluster.suspend"
        )
    assert again["slices"] == [0, 1]
    assert again["written"] == 0
    assert begun.states() == ["suspended", "suspended"]
    with pytest.raises(ClusterError, match="slice 1 is suspended already"):
        begun.cluster.suspend([1])
    begun.cluster.resume()
    assert begun.client.answer()["value"] == expected[0]
    check(begun, expected)


def test_hosts_that_do_not_come_are_given_up_for_the_former_ones(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    with resuming(begun, [0, 1], hosts_per_slice=2) as resumed:
        begun.cluster.suspend([0])
        with pytest.raises(ClusterError, match="slice 1 is being resumed already"):
            begun.cluster.resume(hosts_per_slice=1)
        begun.cluster.suspend([1])
        assert "slice 0 stays suspended, nothing is lost" in str(resumed.result())
    begun.cluster.resume()
    assert [len(one.pids) for one in begun.cluster.slices] == [1, 1]
    check(begun, expected)


@pytest.mark.slow
def test_clients_wait_while_one_slice_comes_back_and_another_is_suspended(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    with resuming(begun) as resumed:
        begun.client.post("digest")
        begun.trap(0, "worker-saved=wait")
        begun.cluster.suspend([0])
        assert resumed.result() is None
    assert begun.suspended() == [0]
    assert begun.client.silent
    begun.cluster.resume()
    assert begun.client.answer()["value"] == expected[0]
    check(begun, expected)


@pytest.mark.slow
def test_a_slice_that_is_lost_as_its_state_comes_in_is_started_again(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    """The head hears that the state is back and that its hosts are gone at the same time."""
    with resuming(begun) as resumed:
        incarnation, (pid,) = begun.cluster.slices[1].incarnation, begun.cluster.slices[1].pids
        head = begun.cluster.status()["pid"]
        os.kill(head, signal.SIGSTOP)
        time.sleep(WAIT_S + 2)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid))
        os.kill(head, signal.SIGCONT)
        assert resumed.result() is None
    assert begun.cluster.slices[1].incarnation == incarnation + 1
    check(begun, expected)


def test_what_did_not_change_is_not_written_again(begun: Rig) -> None:
    begun.cluster.suspend()
    begun.cluster.resume()
    assert begun.cluster.suspend()["written"] == 0
    begun.cluster.resume()


def test_a_notice_suspends_the_slices_that_got_it(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    for one in begun.cluster.slices:
        os.kill(one.pids[0], signal.SIGTERM)
    until(lambda: begun.states() == ["suspended", "suspended"])
    assert all("suspended: a notice: SIGTERM" in "".join(s.story) for s in begun.cluster.slices)
    begun.cluster.resume()
    check(begun, expected)


def test_a_notice_to_a_slice_on_its_way_back_is_heeded(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    with resuming(begun) as resumed:
        os.kill(begun.cluster.slices[1].pids[0], signal.SIGTERM)
        told = "slice 1 stays suspended, nothing is lost: its resumption was taken back: a notice"
        assert str(resumed.result()).startswith(told)
    assert begun.states() == ["up", "suspended"]
    begun.cluster.resume()
    check(begun, expected)


@pytest.mark.slow
def test_a_notice_to_one_that_leaves_already_costs_no_other(
    begun: Rig, expected: list[dict[str, str]]
) -> None:
    begun.trap(0, "worker-saved=wait")
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(begun.cluster.suspend, [0])
        until(lambda: waits_when_it_asks(begun), "a request of the client to be held back")
        for one in begun.cluster.slices:
            os.kill(one.pids[0], signal.SIGTERM)
        assert saved.result()["slices"] == [0]
    until(lambda: begun.suspended() == [0, 1])
    begun.cluster.resume()
    assert begun.client.answer()["value"] == expected[0]
    check(begun, expected)


def test_a_snapshot_can_be_read_by_itself(
    begun: Rig,
    expected: list[dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun.cluster.suspend()
    store = find(f"{begun.home}/suspended")
    manifest = store.read()
    assert verify(store, manifest) > 0
    written, left = export(store, manifest, tmp_path)
    assert (written, left) == (len(manifest.arrays), 0)
    found = {tuple(np.load(path).shape) for path in tmp_path.glob("*.npy")}
    assert {(64, 96), (0, 4), (5,), (8, 8), ()} <= found | {(8, 8)}
    shapes = {one.array.shape: one for one in held(manifest)}
    assert shapes[64, 96].whole
    for command in (["show", "--verify"], ["show", "--json"], ["load", str(tmp_path / "out")]):
        assert main(["snapshot", command[0], store.url, *command[1:]]) == 0
        told = capsys.readouterr()
        assert "array" in told.out + told.err
    begun.cluster.resume()
    check(begun, expected)


def test_errors_and_callbacks_live_on(begun: Rig, expected: list[dict[str, str]]) -> None:
    assert begun.client.do("callback") == 12.0
    assert "of my own" in begun.client.do("own_error")
    begun.cluster.suspend()
    begun.cluster.resume()
    assert "of my own" in begun.client.do("error")
    assert begun.client.do("callback") == 12.0
    check(begun, expected)


def test_a_damaged_chunk_leaves_it_suspended(begun: Rig, expected: list[dict[str, str]]) -> None:
    saved = begun.cluster.suspend()
    chunks = Path(saved["url"], "chunks")
    needed = sorted(set(Snapshots(open_storage(saved["url"])).read().chunks()))
    path = chunks / needed[0]
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ClusterError, match=r"stays suspended, nothing is lost: .* is damaged"):
        begun.cluster.resume()
    assert "suspended" in begun.states()
    path.write_bytes(good)
    until(lambda: not {"starting", "up"} & {begun.states()[i] for i in begun.suspended()})
    begun.cluster.resume()
    check(begun, expected)


@pytest.mark.parametrize(
    ("slices", "url", "error", "why"),
    [
        ([7], None, UsageError, "there is no slice 7"),
        ([0], "memory://x", UsageError, "does not outlive"),
        ([0], "/proc/x", ClusterError, "slice 0 not suspended, everything is as it was: /proc/x"),
    ],
)
def test_bad_input_changes_nothing(
    begun: Rig, expected: list[dict[str, str]], slices: Any, url: Any, error: Any, why: str
) -> None:
    with pytest.raises(error, match=why):
        begun.cluster.suspend(slices, url=url)
    with pytest.raises(ClusterError, match="no slice is suspended"):
        begun.cluster.resume()
    check(begun, expected)


@pytest.mark.slow
def test_it_goes_on_after_a_ctrl_c(begun: Rig, expected: list[dict[str, str]]) -> None:
    begun.trap(1, "worker-saved=wait")
    environ = os.environ | {"REGROW_HOME": str(begun.home)}
    with subprocess.Popen(
        [sys.executable, "-m", "regrow", "suspend", "--all"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        until(lambda: waits_when_it_asks(begun), "a request of the client to be held back")
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=30)
    name = begun.cluster.name
    assert (
        errors == f"regrow: the suspension of {name} goes on; see: regrow status --cluster {name}\n"
    )
    assert command.returncode == 130
    assert begun.states() == ["up", "up"]
    until(lambda: begun.suspended() == [0, 1])
    begun.cluster.resume()
    assert begun.client.answer()["value"] == expected[0]
    check(begun, expected)


@pytest.mark.slow
def test_a_client_that_goes_meanwhile_leaves_nothing(begun: Rig) -> None:
    other = Client(begun.cluster.env)
    begun.cluster.suspend()
    other.close()
    begun.cluster.resume()
    begun.client.do("digest")


@pytest.mark.slow
def test_a_job_with_colocated_python_is_not_suspended(
    tmp_path: Path, expected: list[dict[str, str]]
) -> None:
    with Rig(tmp_path, grace_s=20) as rig:
        rig.client.do("steps", count=STEPS)
        assert rig.client.do("colocated") == 6
        with pytest.raises(ClusterError, match="uses colocated Python"):
            rig.cluster.suspend()
        assert rig.client.do("digest") == expected[0]
        os.kill(rig.cluster.slices[1].pids[0], signal.SIGTERM)
        until(lambda: rig.states()[1] == "lost")
        assert "slice 1 was lost: host 0" in rig.client.failure("digest")


@pytest.mark.slow
def test_a_slice_of_several_hosts_comes_back_as_a_whole(
    tmp_path: Path, expected: list[dict[str, str]]
) -> None:
    with Rig(
        tmp_path, hosts=2, resume_after_s=0.2, gcs_scratch_location=f"local://{tmp_path}/s"
    ) as rig:
        rig.client.do("steps", count=STEPS)
        rig.cluster.suspend([1])
        rig.cluster.resume([1])
        check(rig, expected)
        rig.client.do("begin")
        rig.client.do("steps", count=STEPS)
        os.kill(rig.cluster.slices[0].pids[1], signal.SIGTERM)
        until(lambda: rig.cluster.slices[0].incarnation == 2 and not rig.suspended())
        check(rig, expected)
