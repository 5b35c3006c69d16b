"""`regrow ray` and `--launcher ray` as far as they need no Ray cluster: flags, dry runs, refusals."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import threading

import pytest

from regrow.cli import main

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    output, errors = capsys.readouterr()
    return status, output, errors


def test_the_coordinators_commands(capsys):
    words = ["--name", "me-admin", "--project", "p", "--zone", "z", "--dry-run"]
    vm = ("ray", "coordinator")
    status, output, _ = told(capsys, *vm, "create", "--ray-version", "2.60.0", *words)
    assert status == 0
    make = shlex.split(output)
    assert make[:5] == ["gcloud", "compute", "instances", "create", "me-admin"]
    assert "--boot-disk-size=200GB" in make
    assert "--project=p" in make
    assert any("ray[default,tune]==2.60.0" in word for word in make)
    assert "-L8265:localhost:8265" in make
    status, output, _ = told(capsys, *vm, "deploy", "src", *words)
    assert shlex.split(output) == (
        ["gcloud", "compute", "scp", "--recurse", "--project=p", "--zone=z", "src", "me-admin:~/"]
    )
    status, output, _ = told(capsys, *vm, "service-account", *words)
    lines = output.splitlines()
    assert len(lines) == 4
    assert "roles/tpu.admin" in lines[1]


def test_without_gcloud(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, errors = told(capsys, "ray", "coordinator", "deploy", "src")
    assert status == 1
    assert errors == ("regrow: gcloud is not installed; --dry-run prints what would be run\n")


def test_what_is_not_there_is_not_deployed(capsys):
    status, _, errors = told(capsys, "ray", "coordinator", "deploy", "--dry-run", "/no/such")
    assert (status, errors) == (2, "regrow: there is no /no/such to copy\n")


def test_no_head(capsys):
    for command in ("status", "down"):
        status, _, errors = told(capsys, "ray", "head", command)
        assert (status, errors) == (
            3,
            "regrow: no Ray head was started here: regrow ray head up\n",
        )


@needs_ray
def test_no_head_that_answers(capsys):
    where = ["--launcher", "ray", "--address", "127.0.0.1:1"]
    status, _, errors = told(capsys, "up", *where)
    assert status == 3
    assert errors.startswith("regrow: no Ray head answers at 127.0.0.1:1 (Connection refused)")
    assert len(errors.splitlines()) == 1


@needs_ray
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--address", "127.0.0.1:6379"], "--address need --launcher ray"),
        (["--launcher", "ray", "--ray-spares", "-1"], "--ray-spares"),
        (["--launcher", "ray"], "no Ray cluster: give --address HOST:PORT"),
        (["--launcher", "ray", "--address", "x"], "'x' is no address of a Ray head"),
        (
            ["--launcher", "ray", "--address", "x:1", "--resources", "TPU=4"],
            "--resources TPU=4: give JSON such as",
        ),
        (
            ["--launcher", "ray", "--address", "x:1", "--resources", '{"TPU": 0}'],
            "are no resources of Ray",
        ),
    ],
)
def test_wrong_flags(capsys, words, text):
    status, _, errors = told(capsys, "up", *words)
    assert status == 2
    assert text in errors
    assert len(errors.splitlines()) == 1


@needs_ray
def test_a_head_whose_port_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for flags in (["--port", str(port)], ["--port", "0", "--dashboard-port", str(port)]):
            status, _, errors = told(capsys, "ray", "head", "up", *flags)
            assert (status, errors) == (
                3,
                f"regrow: port {port} is taken: another Ray head may have it; take another port, or 0 "
                "for any\n",
            )


@needs_ray
@pytest.mark.parametrize("host", ["203.0.113.77", "a b"])
def test_a_head_at_an_address_of_another_machine(capsys, host):
    status, _, errors = told(capsys, "ray", "head", "up", "--port", "0", "--host", host)
    assert status == 2
    assert f"{host!r} is no address of this machine" in errors


@pytest.mark.parametrize("hang_after", ["1", "-3", "inf", "1e9"])
def test_a_head_that_would_find_busy_nodes_dead(capsys, hang_after):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    status, _, errors = told(capsys, "ray", "head", "up", f"--hang-after={hang_after}")
    assert status == 2
    assert "it must be 1.5 s or more" in errors


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ("tpu_host", "give JSON such as"),
        (
            '{"tpu_host": "one"}',
            '{"tpu_host": "one"} is no resource of a node: give a whole number',
        ),
        ('{"tpu_host": true}', "is no resource of a node"),
        ('{"tpu_host": 1.5}', "is no resource of a node"),
        ('{"tpu_host": -1}', "is no resource of a node"),
        ('{"tpu_host": NaN}', "is no resource of a node"),
        ('{"tpu_host": 1e20}', "is no resource of a node"),
        ('{"": 1}', "'' cannot name a resource of Ray"),
        ('{"CPU": 2}', "CPUs are given by --node-cpus"),
    ],
)
def test_what_no_node_can_have(capsys, resources, text):
    for command in (["add-node"], ["up", "--nodes", "1"]):
        status, _, errors = told(capsys, "ray", "head", *command, "--resources", resources)
        assert status == 2
        assert text in errors
        assert len(errors.splitlines()) == 1


JOB = ["ray", "job", "--project", "p", "--zone", "z", "--endpoint", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tpu", "a b"], "'a b' cannot name a TPU on a Ray cluster: use letters, digits"),
        (["--tpu", ""], "'' cannot name a TPU on a Ray cluster"),
        (["--name", ""], "'' cannot name a job"),
        (["--accelerator-type", "v4-7"], "there is no accelerator 'v4-7'"),
        (["--startup-script", "BYTES"], "BYTES is no text"),
        (["--deadline", "0"], "the deadline more than 0 s"),
        (["--checkpoint-dir", ""], "the directory for checkpoints has an empty name"),
        (["--checkpoint-dir", "gs://b/x"], "gs://b/x cannot be guarded"),
        (["--checkpoint-dir", "FILE/x"], "for checkpoints cannot be written: Not a directory"),
        (["--checkpoint-dir", "/proc/x"], "/proc/x for checkpoints cannot be written"),
        (["--log-dir", "FILE/x"], "for logs cannot be written: Not a directory"),
    ],
)
def test_jobs_that_cannot_be_are_refused_before_anything_is_asked(
    capsys, tmp_path, monkeypatch, words, text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (tmp_path / "BYTES").write_bytes(b"\xff")
    status, _, errors = told(capsys, *JOB, *words, "--", "true")
    assert status == 2
    assert text in errors
    assert len(errors.splitlines()) == 1


@needs_ray
def test_slices_of_a_ray_cluster_are_not_shared_among_jobs(capsys):
    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = threading.Thread(target=greet)
        head.start()
        where = ["--launcher", "ray", "--address", f"127.0.0.1:{listener.getsockname()[1]}"]
        status, _, errors = told(capsys, "up", *where, "--spares", "1")
        head.join()
    assert status == 2
    assert "go neither with --launcher ray nor" in errors
