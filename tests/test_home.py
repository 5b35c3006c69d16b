from __future__ import annotations

import dataclasses
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from regrow.errors import ClusterStartError, NoClusterError, UsageError
from regrow.home import CLUSTER_VARIABLE, ClusterState, Home
from regrow.processes import RUN_MARK, ProcessId


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv(CLUSTER_VARIABLE, raising=False)


@pytest.fixture
def home():
    # Not in pytest's directory, whose name may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="regrow-home-", dir="/tmp") as directory:
        yield Home(Path(directory) / "home")


@pytest.fixture
def dead():
    """The identity of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(process.pid)
    process.communicate()
    return identity


def entered(home: Home) -> list[str]:
    return sorted(path.name for path in (home.path / "clusters").iterdir())


def test_a_cluster_is_entered_for_its_owner_only(home):
    state = home.claim("one", purpose="a test")
    assert Path(state.dir) == home.path / "clusters" / "one"
    assert stat.S_IMODE(Path(state.dir).stat().st_mode) == 0o700
    assert stat.S_IMODE((Path(state.dir) / "state.json").stat().st_mode) == 0o600
    assert state.supervisor == ProcessId.own()
    assert state.socket_dir == state.dir
    assert state.control_socket == f"{state.dir}/control.sock"
    assert home.clusters() == [state]
    assert home.find() == home.find("one") == state
    assert Home(home.path).find("one") == state
    home.release(state)
    assert entered(home) == []
    home.release(state)


def test_json_and_back(home):
    state = home.claim("one")
    full = dataclasses.replace(state, head=ProcessId.own(), tcp_target="grpc://h:1", token="t")
    for one in (state, full):
        assert ClusterState.from_json(one.to_json()) == one
    home.update(full)
    assert home.find() == full


def test_a_name_is_free_once_its_cluster_is_gone(home):
    state = home.claim("one")
    with pytest.raises(ClusterStartError, match=r"'one' runs already .*regrow down --cluster one"):
        home.claim("one")
    home.release(state)
    home.claim("one")


def test_names_are_numbered(home):
    first = home.claim(None, stem="run")
    assert first.name == "run-1"
    assert home.claim(None, stem="run").name == "run-2"
    assert home.claim(None, stem="up").name == "up-1"
    home.release(first)
    assert home.claim(None, stem="run").name == "run-1"


@pytest.mark.parametrize("where", ["h", "x" * 100])
def test_a_claim_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch, where):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = Home(tmp_path / where)

    def interrupted(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regrow.home._write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        home.claim(None)
    assert list((home.path / "clusters").iterdir()) == []
    assert list(tmp_path.glob("regrow-*")) == []


def test_a_home_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no directory"):
        Home(tmp_path / "file")


@pytest.mark.parametrize("path", ["/" + "long" * 100, "~no such user/x", "a\0b"])
def test_a_home_that_cannot_be_is_refused(path):
    with pytest.raises(UsageError, match="cannot be a home"):
        Home(path)


def test_a_wrong_name_is_refused(home):
    with pytest.raises(UsageError, match="cannot be the name"):
        home.claim("../out")
    assert not home.path.exists()


def test_none_one_or_several(home, monkeypatch):
    with pytest.raises(NoClusterError, match="start one with: regrow up"):
        home.find()
    assert home.clusters() == []
    home.claim("one")
    home.claim("two")
    with pytest.raises(NoClusterError, match=r"several clusters run \(one, two\): .*--cluster"):
        home.find()
    with pytest.raises(NoClusterError, match=r"no cluster named 'three' runs .*there is: one, two"):
        home.find("three")
    monkeypatch.setenv(CLUSTER_VARIABLE, "two")
    assert home.find().name == "two"
    assert home.find("one").name == "one"


def test_homes_never_meet(home, tmp_path):
    other = Home(tmp_path / "other")
    home.claim("one")
    assert other.clusters() == []
    other.claim("one")
    assert len(home.clusters()) == len(other.clusters()) == 1


def test_the_home_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("REGROW_HOME", str(tmp_path / "x"))
    assert Home().path == tmp_path / "x"
    monkeypatch.delenv("REGROW_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Home().path == tmp_path / ".regrow"


def test_the_next_command_cleans_up_after_the_dead(home, dead):
    state = dataclasses.replace(home.claim("one"), supervisor=dead, head=dead)
    home.update(state)
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {RUN_MARK: state.run_id})
    assert home.sweep() == ["one"]
    assert left.wait(5) == -9
    assert entered(home) == []


def test_a_cluster_that_died_before_its_head_was_known_is_cleaned_up(home, dead):
    home.update(dataclasses.replace(home.claim("one"), supervisor=dead))
    assert home.clusters() == []
    assert entered(home) == []


@pytest.mark.parametrize("alive", ["supervisor", "head"])
def test_who_outlives_the_other_is_given_time_to_clean_up(home, dead, alive):
    state = home.claim("one")
    roles = {"supervisor": dead, "head": dead} | {alive: ProcessId.own()}
    home.update(dataclasses.replace(state, **roles))
    timer = threading.Timer(0.3, home.release, [state])
    timer.start()
    assert home.sweep() == []
    timer.join()
    assert entered(home) == []


def test_who_does_not_clean_up_in_time_is_cleaned_up_after(home, dead, monkeypatch):
    monkeypatch.setattr("regrow.home._ENDING_DEADLINE_S", 0.1)
    home.update(dataclasses.replace(home.claim("one"), head=dead))
    assert home.sweep() == ["one"]
    assert entered(home) == []


def test_clusters_of_another_machine_are_left_alone(home, dead):
    state = dataclasses.replace(home.claim("one"), machine="another", supervisor=dead, head=dead)
    home.update(state)
    assert home.sweep() == []
    assert home.clusters() == []
    assert home.entries() == [state]
    with pytest.raises(ClusterStartError, match="on another"):
        home.claim("one")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"head": 3, "supervisor": {}}'])
def test_an_entry_that_cannot_be_read_is_removed(home, text):
    state = home.claim("one")
    path = Path(state.dir) / "state.json"
    path.unlink() if text is None else path.write_text(text)
    assert home.clusters() == []
    assert entered(home) == []


def test_a_release_leaves_a_later_cluster_of_that_name_alone(home):
    first = home.claim("one")
    home.release(first)
    second = home.claim("one")
    home.release(first)
    assert home.find() == second


@pytest.mark.parametrize("where", ["x" * 100, "with blank", "per%20cent"])
def test_sockets_have_a_short_plain_path(tmp_path, where, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    home = Home(tmp_path / where)
    state = home.claim("one")
    sockets = Path(state.socket_dir)
    assert sockets.parent == Path("/tmp")
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert state.target == f"grpc://unix:{sockets}/client.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{sockets}/workers.sock")
    home.release(state)
    assert not sockets.exists()


def test_short_paths_are_in_the_users_runtime_directory(tmp_path, monkeypatch):
    runtime = Path("/tmp") / f"rt-{os.getpid()}"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    home = Home(tmp_path / ("x" * 100))
    state = home.claim("one")
    assert Path(state.socket_dir).parent == runtime
    home.release(state)
    runtime.rmdir()


def test_a_home_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterStartError, match="cannot write to"):
        Home(tmp_path / "file" / "home").claim("one")


def test_names_are_given_once_only(home):
    names: list[str] = []

    def claim() -> None:
        names.extend(Home(home.path).claim(None, stem="x").name for _ in range(5))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == sorted(f"x-{number}" for number in range(1, 21))
