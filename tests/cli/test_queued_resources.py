"""`regrow queued-resources` against a local server whose slices have no processes."""

from __future__ import annotations

import json
import signal

import pytest

from waiting import until

REQUEST = "projects/p/locations/us-central2-b/queuedResources"


def test_life(simulated_tpu):
    tpu = simulated_tpu
    created = tpu.create("q", "--node-count", "4", "--wait")
    assert created.returncode == 0, created.stderr
    lines = created.stderr.splitlines()
    assert lines[0].startswith("regrow: create request issued for [q] (operation operation-")
    assert lines[1] == "regrow: created queued resource [q]"
    assert lines[-1] == "regrow: [q] is ACTIVE: 4 of 4 slices ready"
    listed = tpu("queued-resources", "list")
    assert listed.stdout.splitlines() == [
        "NAME  ZONE           NODE_COUNT  ACCELERATOR_TYPE  STATE",
        "q     us-central2-b  4           v4-16             ACTIVE",
    ]
    assert "simulated, without processes" in listed.stderr
    assert "\n  state: ACTIVE\n" in tpu.good("queued-resources", "describe", "q")
    told = json.loads(tpu.good("queued-resources", "describe", "q", "--format", "json"))
    assert [spec["nodeId"] for spec in told["tpu"]["nodeSpec"]] == ["q-0", "q-1", "q-2", "q-3"]
    assert "reset queued resource [q]" in tpu("queued-resources", "reset", "q").stderr
    refused = tpu("queued-resources", "delete", "q")
    assert refused.returncode == 1
    assert "FAILED_PRECONDITION" in refused.stderr
    assert "use force" in refused.stderr
    deleted = tpu("queued-resources", "delete", "q", "--force", "--quiet")
    assert "deleted queued resource [q]" in deleted.stderr
    assert tpu("queued-resources", "list").stderr == "Listed 0 items.\n"


def test_filters_and_forms(simulated_tpu):
    tpu = simulated_tpu
    for name in ("train-1", "train-2", "serve"):
        assert tpu.create(name, "--async", shape="v4-8").returncode == 0

    def names(text: str) -> list[str]:
        form = "value(NAME)"
        return tpu.good("queued-resources", "list", "--filter", text, "--format", form).split()

    assert names("serve") == ["serve"]
    assert names("name~train-[0-9]+$") == ["train-1", "train-2"]
    assert names("NAME=train-1 AND accelerator_type:v4") == ["train-1"]
    assert names("NAME!=serve AND ZONE=mars") == []
    wrong = tpu("queued-resources", "list", "--filter", "name~(")
    assert wrong.returncode == 2
    listed = json.loads(tpu.good("queued-resources", "list", "--format", "json", "--zone", "-"))
    assert [one["name"] for one in listed] == [
        f"{REQUEST}/{name}" for name in ("train-1", "train-2", "serve")
    ]


def test_who_gives_up_deletes(simulated_tpu, one_line):
    tpu = simulated_tpu
    later = ("--valid-after-duration", "1h", "--wait", "--assign-timeout", "0.1s")
    late = tpu.create("q", *later)
    assert late.returncode == 3
    assert "waited 0.1 s for capacity for q" in late.stderr
    assert "nobody waits for [q] any more" in late.stderr
    until(lambda: "NOT_FOUND" in tpu("queued-resources", "describe", "q").stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_deletes(simulated_tpu, number):
    tpu = simulated_tpu
    argv = ("create", "q", "--node-id", "n", "--runtime-version", "tpu-ubuntu2204-base")
    more = ("--accelerator-type", "v4-8", "--valid-after-duration", "1h", "--wait")
    with tpu.commands.start("queued-resources", *argv, *more) as process:
        for line in process.stderr:
            if "created" in line:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "nobody waits for [q] any more" in errors
    until(lambda: "NOT_FOUND" in tpu("queued-resources", "describe", "q").stderr)


def test_hosts_that_are_not_there_yet(simulated_tpu, one_line):
    tpu = simulated_tpu
    assert tpu.create("q", "--valid-after-duration", "1h").returncode == 0
    told = one_line(tpu("queued-resources", "ssh", "q", "--command", "true"), 1)
    assert "q is WAITING_FOR_RESOURCES and has no node q-node" in told


def test_the_dead_are_named_and_reaped(simulated_tpu):
    tpu = simulated_tpu
    assert tpu.create("q", "--spot", "--wait").returncode == 0
    tpu.admin("preempt", f"{REQUEST}/q")
    until(lambda: tpu.state("q") == "SUSPENDED")
    assert "hold quota until they are deleted: see reap" in tpu("queued-resources", "list").stderr
    again = tpu.create("q", "--spot")
    assert again.returncode == 1
    assert "ALREADY_EXISTS" in again.stderr
    assert (
        "until they are deleted: q; delete them with: regrow queued-resources reap" in again.stderr
    )
    assert tpu.state("q") == "SUSPENDED"
    assert tpu.good("queued-resources", "reap", "--dry-run") == "q\n"
    assert "deleted queued resource [q]" in tpu("queued-resources", "reap").stderr
    assert "no dead" in tpu("queued-resources", "reap").stderr


def test_a_startup_script_from_a_file(simulated_tpu, tmp_path):
    tpu = simulated_tpu
    script = tmp_path / "s.sh"
    script.write_text("echo a, b=c\n")
    made = tpu.create(
        "q", "--metadata-from-file", f"startup-script={script}", "--metadata", "a=1,b=2"
    )
    assert made.returncode == 0
    told = json.loads(tpu.good("queued-resources", "describe", "q", "--format", "json"))
    metadata = told["tpu"]["nodeSpec"][0]["node"]["metadata"]
    assert metadata == {"startup-script": "echo a, b=c\n", "a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--node-count", "257"), 1, "INVALID_ARGUMENT"),
        (("--node-count", "1"), 2, "give at least 2, or --node-id"),
        (("--node-id", "a", "--node-count", "2"), 2, "--node-id for one slice, or --node-count"),
        (("--node-prefix", "a"), 2, "--node-prefix needs --node-count"),
        (("--accelerator-type", "v9-8"), 1, "v9-8"),
        (("--accelerator-type", "v3-8", "--node-count", "2"), 1, "INVALID_ARGUMENT"),
        (("--reserved", "--spot"), 2, "exclude each other"),
        (("--type", "v4"), 2, "--accelerator-type, or --type and --topology"),
        (("--metadata", "x"), 2, "not of the form KEY=VALUE"),
        (("--metadata-from-file", "x=/nowhere"), 2, "cannot read /nowhere"),
        (("--valid-until-duration", "soon"), 2, "give a duration like"),
        (("--wait", "--async"), 2, "exclude each other"),
        (("--timeout", "x"), 2, "no duration like"),
        (("--runtime-version", "x"), 1, "runtime version 'x'"),
        (("--zone", "mars"), 1, "mars"),
        (("--zone", "a/b"), 2, "give the zone's id alone"),
        (("--endpoint", "here"), 2, "is no endpoint"),
        (("--endpoint", "http://127.0.0.1:1"), 3, "does not answer"),
    ],
)
def test_bad_input(simulated_tpu, one_line, arguments, status, text):
    assert text in one_line(simulated_tpu.create("q", *arguments), status)


def test_topology_and_interval(simulated_tpu):
    tpu = simulated_tpu
    flags = ("--type", "v4", "--topology", "2x2x2", "--runtime-version", "tpu-ubuntu2204-base")
    valid = ("--valid-after-duration", "1h", "--valid-until-time", "2100-01-01T00:00:00Z")
    tpu.good("queued-resources", "create", "q", *flags, "--node-id", "n", *valid)
    told = json.loads(tpu.good("queued-resources", "describe", "q", "--format", "json"))
    assert set(told["queueingPolicy"]["validInterval"]) == {"startTime", "endTime"}
    assert tpu("queued-resources", "list").stdout.splitlines()[1].split()[3] in ("v4-16", "V4")


def test_what_only_the_alpha_version_has(simulated_tpu):
    tpu = simulated_tpu
    made = tpu.create(
        "q",
        *("--node-count", "2", "--best-effort", "--workload-type", "throughput-optimized"),
        *("--max-run-duration", "1h", "--autocheckpoint-enabled", "--boot-disk", "size-gb=200"),
        *(
            "--network-config",
            "network=a",
            "--network-config",
            "network=b,enable-external-ips=true",
        ),
        "--wait",
    )
    assert made.returncode == 0, made.stderr
    raw = tpu.good("cloud", "status", "--json")
    assert "q" in raw
    told = json.loads(tpu.good("queued-resources", "describe", "q", "--format", "json"))
    node = told["tpu"]["nodeSpec"][1]["node"]
    assert node["networkConfigs"] == [
        {"network": "a"},
        {"network": "b", "enableExternalIps": True},
    ]
    assert "ACTIVE" in tpu("queued-resources", "list").stdout
    event = tpu("tpu-vm", "simulate-maintenance-event", "q-0")
    assert event.returncode == 0, event.stderr
    maintenance = tpu("queued-resources", "perform-maintenance", "q", "--node-names", "q-1")
    assert maintenance.returncode == 0, maintenance.stderr
    assert "maintenance of [q] done" in maintenance.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--best-effort", "--spot"), 2, "exclude each other"),
        (("--provisioning-model", "free"), 2, "is not one of"),
        (("--workload-type", "throughput-optimized"), 2, "needs --node-count"),
        (("--boot-disk", "colour=red"), 2, "--boot-disk: colour is none of"),
        (("--network-config", "network=a", "--network", "b"), 2, "excludes --network"),
        (("--max-run-duration", "soon"), 2, "give a duration like"),
        (
            ("--reservation-host-folder", "1", "--reservation-host-project", "p"),
            2,
            "give one --reservation-host-",
        ),
    ],
)
def test_more_bad_input(simulated_tpu, one_line, arguments, status, text):
    assert text in one_line(simulated_tpu.create("q", *arguments), status)


def test_bad_names_and_duplicates(simulated_tpu, one_line):
    tpu = simulated_tpu
    assert "INVALID_ARGUMENT" in one_line(tpu.create("a name"), 1)
    assert tpu.create("q").returncode == 0
    assert "ALREADY_EXISTS" in one_line(tpu.create("q"), 1)
