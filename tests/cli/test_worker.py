"""`regrow worker`: hosts that join a head over TCP, and its bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from waiting import until

TOKEN = "let-me-in"
PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
sharding = NamedSharding(Mesh(np.array(devices), ("all",)), P("all"))
values = np.arange(len(devices) * 200_000, dtype=np.float32)
placed = jax.device_put(values, sharding)
turned = jax.jit(lambda x: x[::-1] * 2, out_shardings=sharding)(placed)
assert (np.asarray(turned) == values[::-1] * 2).all()
total = float(jax.jit(lambda x: x.sum())(jax.device_put(np.ones(64, np.float32), sharding)))
print(len(devices), total)
"""
AND_AGAIN = """
sys.stdout.flush()
sys.stdin.readline()
assert (np.asarray(jax.device_put(turned, sharding, may_alias=False)) == values[::-1] * 2).all()
print("as before")
"""


def free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture
def joined(regrow, request, tmp_path):
    """A head whose two slices are hosts that have joined it; a parameter is where state goes."""
    regrow.environ["REGROW_TOKEN"] = TOKEN
    clients, hosts = free_ports(2)
    address = f"localhost:{hosts}"
    head = regrow.start(
        *("head", "--name", "far", "--slices", "2", "--devices-per-slice", "2"),
        *(f"--server_port={clients}", f"--worker_port={hosts}"),
        f"--resource_manager_address={address}",
        *(
            f"--gcs_scratch_location={place}"
            for place in [getattr(request, "param", None)]
            if place
        ),
        cwd=tmp_path,
    )
    workers = [start_host(regrow, address, index) for index in range(2)]
    try:
        # A slow machine may need, and tell of, some patience before.
        assert any("2 slices of 2 devices up" in line for line in head.stderr)
        yield f"grpc://localhost:{clients}", address, workers
    finally:
        for process in (*workers, head):
            process.send_signal(signal.SIGTERM)
        for process in (*workers, head):
            process.communicate(timeout=30)
    assert {process.returncode for process in workers} == {128 + signal.SIGTERM}


def start_host(regrow, address: str, index: int, host: int = 0) -> subprocess.Popen:
    where = (f"--slice={index}", f"--host={host}")
    machine = regrow.home.parent / "machine"
    machine.mkdir(exist_ok=True)
    return regrow.start("worker", *where, f"--resource_manager_address={address}", cwd=machine)


def start_client(target: str, program: str = PROGRAM) -> subprocess.Popen:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("REGROW_")
    } | {"JAX_PLATFORMS": "proxy", "REGROW_TARGET": target, "REGROW_TOKEN": TOKEN}
    program = f"import sys, regrow; regrow.connect(); {program}"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environ,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def run_client(target: str) -> str:
    with start_client(target) as client:
        output, errors = client.communicate(timeout=90)
    return output.strip() or errors


@pytest.mark.slow
def test_hosts_that_join_from_elsewhere(regrow, joined, one_line):
    target, address, workers = joined
    assert run_client(target) == "4 64.0"
    # A worker that is killed is started again by its host, a host that is killed joins again.
    assert regrow("slice", "kill", "1").returncode == 0
    until(lambda: "2 of 2 slices up" in regrow("status").stdout)
    workers[0].kill()
    workers[0].communicate()
    until(lambda: "1 of 2 slices up" in regrow("status").stdout)
    workers[0] = start_host(regrow, address, 0)
    until(lambda: "2 of 2 slices up" in regrow("status").stdout)
    assert run_client(target) == "4 64.0"
    far = ("worker", f"--resource_manager_address={address}")
    assert "has no host 0 of slice 7" in one_line(regrow(*far, "--slice=7"), 3)
    assert "the secret is not that" in one_line(regrow(*far, "--token=guessed"), 3)


@pytest.mark.slow
def test_slices_come_back_with_hosts_that_join_meanwhile(regrow, joined):
    target, address, workers = joined
    with start_client(target, PROGRAM + AND_AGAIN) as client:
        assert client.stdout.readline() == "4 64.0\n"
        for hosts in (2, 1):
            assert regrow("suspend", "--all").returncode == 0
            resuming = regrow.start("resume", f"--hosts-per-slice={hosts}")
            if hosts == 2:
                # The first of each slice is there already, and the others are waited for.
                until(lambda: "1/2" in regrow("status").stdout)
                assert resuming.poll() is None
                workers += [start_host(regrow, address, index, host=1) for index in range(2)]
            _, errors = resuming.communicate(timeout=90)
            assert "2 slices of far resumed in " in errors
            told = json.loads(regrow("status", "--json").stdout)["slices"]
            assert [len(one["hosts"]) for one in told] == [hosts, hosts]
            assert run_client(target) == "4 64.0"
        output, errors = client.communicate("go on\n", timeout=90)
    assert output == "as before\n", errors


@pytest.mark.slow
def test_hosts_that_never_join_are_given_up(regrow, joined, one_line):
    target, _, _ = joined
    with start_client(target, PROGRAM + AND_AGAIN) as client:
        assert client.stdout.readline() == "4 64.0\n"
        assert regrow("suspend", "--all").returncode == 0
        resuming = regrow.start("resume", "--hosts-per-slice=2")
        until(lambda: regrow("status").stdout.count("1/2") == 2)
        told = one_line(regrow("resume", "--hosts-per-slice=1"), 3)
        assert told.startswith("slice 0 is being resumed already (regrow suspend takes that back)")
        assert "2 slices of far suspended in " in one_line(regrow("suspend", "--all"), 0)
        _, errors = resuming.communicate(timeout=60)
        assert resuming.returncode == 3
        assert "slice 0 stays suspended, nothing is lost: its resumption was taken back" in errors
        # The hosts that there are do, and are not started twice.
        assert "2 slices of far resumed in " in one_line(regrow("resume"), 0)
        slices = json.loads(regrow("status", "--json").stdout)["slices"]
        assert [(len(one["hosts"]), one["incarnation"]) for one in slices] == [(1, 3), (1, 3)]
        output, errors = client.communicate("go on\n", timeout=90)
    assert output == "as before\n", errors


@pytest.mark.slow
def test_a_notice_to_a_host_that_has_joined_loses_nothing(regrow, joined):
    """As Kubernetes gives it: to the first process of a container, and to no other."""
    target, address, workers = joined
    with start_client(target, PROGRAM + AND_AGAIN) as client:
        assert client.stdout.readline() == "4 64.0\n"
        former = workers.pop()
        former.send_signal(signal.SIGTERM)
        _, told = former.communicate(timeout=60)
        assert former.returncode == 128 + signal.SIGTERM, told
        assert "slice1-host0 was given notice: it ends when its worker has left" in told
        workers.append(start_host(regrow, address, 1))
        output, errors = client.communicate("go on\n", timeout=90)
    assert output == "as before\n", errors
    (one,) = (
        one for one in json.loads(regrow("status", "--json").stdout)["slices"] if one["index"]
    )
    assert any("suspended: a notice: SIGTERM" in line["text"] for line in one["story"])


@pytest.mark.slow
@pytest.mark.parametrize("joined", ["local://of-each-its-own"], indirect=True)
def test_a_place_that_machines_do_not_have_in_common_is_refused(regrow, joined, one_line):
    """Told by paths that begin where each process was started: the head's in another folder."""
    target, _, _ = joined
    with start_client(target, PROGRAM + AND_AGAIN) as client:
        assert client.stdout.readline() == "4 64.0\n"
        text = one_line(regrow("suspend", "--slice", "1"), 3)
        assert text.startswith("slice 1 not suspended, everything is as it was: what host 1 has ")
        assert "name a place that all machines reach, by --gcs_scratch_location" in text
        output, errors = client.communicate("go on\n", timeout=90)
    assert output == "as before\n", errors


def test_what_no_host_can_be(regrow, one_line):
    assert "is no HOST:PORT" in one_line(regrow("worker", "--resource_manager_address=x"), 2)
    (port,) = free_ports(1)
    far = ("worker", f"--resource_manager_address=localhost:{port}", "--join-timeout=0.2")
    assert f"for a head at localhost:{port}" in one_line(regrow(*far), 3)
    no_clients = regrow("head", f"--worker_port={port}")
    assert "clients must come over TCP, too" in one_line(no_clients, 2)
