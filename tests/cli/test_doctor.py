from __future__ import annotations

import dataclasses
import importlib.metadata
import socket

import pytest

from regrow.cli import checks, main
from regrow.cli.findings import (
    CREDENTIALS_MEND,
    REGISTER_MEND,
    TARGET_MEND,
    TOKEN_MEND,
    UNREACHABLE_MEND,
    VERSION_MEND,
    explain,
)
from regrow.home import Home

CLIENT = {
    "JAX_PLATFORMS": "proxy,cpu",
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
}


def bad(findings):
    return [(one.text, one.mend) for one in findings if one.level == "bad"]


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        (
            "RuntimeError: Unable to initialize backend 'proxy': Backend 'proxy' is not in the list "
            "of known backends: ['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose)",
            REGISTER_MEND,
        ),
        (
            "UNAVAILABLE: failed to connect: grpc::ChannelCredentials argument is null",
            CREDENTIALS_MEND,
        ),
        (
            "The 'proxy' backend requires the address of an IFRT Proxy server. Set it via the "
            "JAX_BACKEND_TARGET environment variable",
            TARGET_MEND,
        ),
        (
            "INVALID_ARGUMENT: IFRT proxy server address must be '<transport-type>://"
            "<backend-address>' (e.g., 'grpc://localhost'), but got 127.0.0.1:1",
            TARGET_MEND,
        ),
        ("UNAVAILABLE: connections to all backends failing; Connection refused", UNREACHABLE_MEND),
        (
            "RuntimeError: Unable to initialize backend 'proxy': no cluster answers at "
            "grpc://unix:/x/client.sock ([Errno 2] No such file or directory); is it running?",
            UNREACHABLE_MEND,
        ),
        (
            "FAILED_PRECONDITION: this client speaks IFRT proxy versions 3 to 7, Regrow 0.1 speaks "
            "16 to 25",
            VERSION_MEND,
        ),
        ("UNAUTHENTICATED: this cluster wants a token over TCP", TOKEN_MEND),
        ("Connection to IFRT proxy server was terminated: CANCELLED: CANCELLED", TOKEN_MEND),
    ],
)
def test_the_messages_of_stock_jax(text, mend):
    finding = explain(f"Traceback (most recent call last):\n  File x\n{text}\n")
    assert finding.level == "bad"
    assert finding.mend == mend


def test_a_message_that_is_not_known_is_shown():
    assert explain("a\n\nValueError: b\n").text.endswith("not known here: ValueError: b")
    assert explain("").text.endswith("nothing")


def test_a_shell_that_is_no_client_is_fine():
    assert bad(checks.environment({})) == []
    assert bad(checks.environment({"JAX_PLATFORMS": "cpu"})) == []


def test_a_target_without_the_platform():
    [(text, _)] = bad(checks.environment({"JAX_BACKEND_TARGET": "grpc://x:1"}))
    assert "JAX_PLATFORMS is not set" in text


@pytest.mark.parametrize("value", [None, "1", "True", "yes"])
def test_the_credentials_setting_is_exactly_one_word(value):
    variables = {"JAX_PLATFORMS": "proxy"}
    if value is not None:
        variables["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = value
    assert CREDENTIALS_MEND in [mend for _, mend in bad(checks.environment(variables))]


@pytest.mark.parametrize("target", ["", "localhost:1", "grpc://", "grpc://host"])
def test_a_target_that_is_none(target):
    [(text, mend)] = bad(checks.environment(CLIENT | {"JAX_BACKEND_TARGET": target}))
    assert "JAX_BACKEND_TARGET" in text
    assert mend == TARGET_MEND


def test_nobody_at_the_target(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        tcp = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
        for target in (tcp, f"grpc://unix:{tmp_path}/none.sock"):
            [(text, mend)] = bad(checks.environment(CLIENT | {"JAX_BACKEND_TARGET": target}))
            assert text.startswith(f"nobody answers at {target}: ")
            assert mend == UNREACHABLE_MEND


def test_somebody_at_the_target(tmp_path):
    path = str(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        for listener, address in ((unix, path), (tcp, ("127.0.0.1", 0))):
            listener.bind(address)
            listener.listen()
        target = f"grpc://unix:{path}"
        assert bad(checks.environment(CLIENT | {"JAX_BACKEND_TARGET": target})) == []
        target = f"grpc://127.0.0.1:{tcp.getsockname()[1]}"
        findings = checks.environment(CLIENT | {"JAX_BACKEND_TARGET": target})
        assert [one.level for one in findings] == ["ok", "note"]
        assert findings[1].mend == TOKEN_MEND


@pytest.mark.parametrize(("given", "told"), [(None, "not set"), ("b", "not its token"), ("a", "")])
def test_the_token_of_a_cluster_that_runs_here(tmp_path, given, told):
    home = Home(tmp_path)
    state = dataclasses.replace(home.claim("one"), tcp_target="grpc://h:1", token="a")
    home.update(state)
    variables = {"JAX_BACKEND_TARGET": "grpc://h:1"}
    if given is not None:
        variables["REGROW_TOKEN"] = given
    findings = bad(checks.token(home, variables))
    assert len(findings) == bool(told)
    if told:
        assert told in findings[0][0]


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"jax": "0.4.30", "jaxlib": "0.10.2"}, "jax 0.4.30 is not supported"),
        ({"jax": "0.10.2", "jaxlib": "0.13.0"}, "jaxlib 0.13.0 is not supported"),
        ({"jax": "0.10.2"}, "jaxlib is not installed"),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0", "pathwaysutils": "0.1.11"}, "deletes every live"),
    ],
)
def test_versions_that_are_not_supported(monkeypatch, versions, text):
    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    [(told, mend)] = bad(checks.libraries())
    assert text in told
    assert mend.startswith("pip install")


def test_what_is_installed_is_supported():
    assert bad(checks.libraries()) == []
    assert bad(checks.machine()) == []


def test_a_cluster_that_does_not_answer(tmp_path):
    home = Home(tmp_path)
    home.claim("one")
    [(text, mend)] = bad(checks.clusters(home, None))
    assert text.startswith("cluster one: no head answers")
    assert mend == "regrow down --cluster one"


def test_slices_that_are_down_are_told():
    texts = ("up after 1 s", "lost: SIGKILL", "fenced: its processes have ended")
    story = [{"text": text, "ago_s": 1.0, "incarnation": 1} for text in texts]
    lost = {"index": 1, "state": "lost", "story": story, "restore_in_s": None}
    up = {"index": 0, "state": "up", "story": [], "restore_in_s": None}
    [(text, mend)] = bad(checks._cluster("one", {"slices": [up, lost]}))
    assert text == "cluster one: slice 1 is lost: SIGKILL"
    assert mend == "regrow slice restore 1 --cluster one"
    [(_, mend)] = bad(checks._cluster("one", {"slices": [lost | {"restore_in_s": 0.5}]}))
    assert mend == "it returns by itself"
    [(text, _)] = bad(checks._cluster("one", {"slices": [lost], "ended": "no more"}))
    assert "the job has ended: no more" in text


def test_the_command_fails_when_something_is_wrong(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("REGROW_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setenv("JAX_BACKEND_TARGET", "localhost:1")
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert f"     -> {TARGET_MEND}" in output.splitlines()


def test_the_command_explains_a_message(tmp_path, capsys):
    (tmp_path / "error").write_text("Backend 'proxy' is not in the list of known backends: []")
    assert main(["doctor", "--explain", str(tmp_path / "error")]) == 1
    assert REGISTER_MEND in capsys.readouterr().out
