"""`regrow tpu-vm` and `regrow config` against a local server whose slices have no processes."""

from __future__ import annotations

import json

import pytest

MADE = ("--accelerator-type", "v4-8", "--version", "tpu-ubuntu2204-base")


def test_life(simulated_tpu):
    tpu = simulated_tpu
    assert "created tpu [n]" in tpu("tpu-vm", "create", "n", *MADE, "--spot").stderr
    told = json.loads(tpu.good("tpu-vm", "describe", "n", "--format", "json"))
    assert told["schedulingConfig"]["spot"] is True
    assert tpu.good("tpu-vm", "list").splitlines() == [
        "NAME  ZONE           ACCELERATOR_TYPE  NETWORK  RANGE  STATUS",
        "n     us-central2-b  v4-8              default         READY",
    ]
    assert "stopped tpu [n]" in tpu("tpu-vm", "stop", "n").stderr
    assert tpu.good("tpu-vm", "list", "--format", "value(name,state)").split()[1] == "STOPPED"
    assert "started tpu [n]" in tpu("tpu-vm", "start", "n").stderr
    assert "deleted tpu [n]" in tpu("tpu-vm", "delete", "n", "--quiet").stderr
    assert tpu("tpu-vm", "list").stderr == "Listed 0 items.\n"


def test_refusals(simulated_tpu, one_line):
    tpu = simulated_tpu
    tpu.admin("capacity", "us-central2-b", "v2", "0")
    flags = ("--accelerator-type", "v2-8", "--version", "tpu-ubuntu2204-base")
    made = tpu("tpu-vm", "create", "n", *flags)
    assert made.returncode == 1
    assert "RESOURCE_EXHAUSTED: There is no more capacity" in made.stderr
    assert "NOT_FOUND" in one_line(tpu("tpu-vm", "delete", "nobody"), 1)
    assert "exclude" in one_line(tpu("tpu-vm", "create", "n", *MADE, "--spot", "--reserved"), 2)
    assert "nobody" in one_line(tpu("tpu-vm", "ssh", "nobody", "--command", "true"), 1)


def test_simulated_hosts_take_no_commands(simulated_tpu):
    tpu = simulated_tpu
    tpu.good("tpu-vm", "create", "n", *MADE)
    answer = tpu("tpu-vm", "ssh", "n", "--command", "true")
    assert answer.returncode == 3
    assert "are its slices simulated" in answer.stderr
    tpu.good("tpu-vm", "delete", "n", "--quiet")


def test_config(simulated_tpu, one_line):
    tpu = simulated_tpu
    assert tpu.good("config", "list") == "project = p\nzone = us-central2-b\n"
    tpu.good("config", "unset", "zone")
    assert "no zone: give --zone" in one_line(tpu("tpu-vm", "describe", "n"), 2)
    assert "zone is not set" in one_line(tpu("config", "get", "zone"), 1)
    # A list is of all zones then.
    tpu.good("tpu-vm", "list")
    tpu.good("config", "set", "compute/zone", "us-central2-b")
    assert tpu.good("config", "get", "zone") == "us-central2-b\n"
    assert "there is no property 'colour'" in one_line(tpu("config", "set", "colour", "red"), 2)


def test_the_real_one_needs_credentials(simulated_tpu, one_line, monkeypatch, tmp_path):
    pytest.importorskip("google.auth")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    listed = simulated_tpu("tpu-vm", "list", "--endpoint", "https://tpu.googleapis.com")
    assert "no credentials for Google Cloud" in one_line(listed, 1)
