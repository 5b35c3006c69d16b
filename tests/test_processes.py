from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regrow import processes
from regrow.processes import RUN_MARK, Child, ProcessId, ProcessStat, tail, telling_line
from waiting import until


@pytest.fixture
def run_id():
    run_id = secrets.token_hex(8)
    yield run_id
    processes.end_run(run_id)


def start(*argv: str, run_id: str | None = None, **environ: str) -> subprocess.Popen:
    mark = {} if run_id is None else {RUN_MARK: run_id}
    return subprocess.Popen(argv, env={"PATH": os.environ["PATH"]} | mark | environ)


def spawn(code: str, output: int, keep=()) -> Child:
    argv = [sys.executable, "-c", code]
    return Child(processes.spawn(argv, os.environ, output=output, keep=keep))


@pytest.fixture
def output(tmp_path):
    with (tmp_path / "output").open("wb") as file:
        yield file.fileno()


def test_a_process_is_told_from_a_later_one_of_the_same_number():
    own = ProcessId.own()
    assert own.alive()
    assert own == ProcessId.of(os.getpid())
    assert not ProcessId(own.pid, own.start_ticks - 1, own.boot).alive()
    assert not ProcessId(own.pid, own.start_ticks, "another boot").alive()


def test_a_zombie_is_not_alive():
    process = start("true")
    identity = ProcessId.of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessStat.of(process.pid).state == "Z"
    assert not identity.alive()
    process.wait()
    assert ProcessStat.of(process.pid) is None
    assert ProcessId.of(process.pid) is None


@pytest.mark.parametrize(
    ("code", "cause", "status"),
    [
        ("import sys; sys.exit(3)", "exit status 3", 3),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL (signal 9)", 137),
        ("import os; os.kill(os.getpid(), 50)", "a signal (signal 50)", 178),
    ],
)
def test_how_a_child_ended(code, cause, status, output):
    child = spawn(code, output)
    assert child.wait(10) == cause
    assert child.poll() == cause
    assert child.status == status
    child.send(signal.SIGKILL)


def test_a_wait_for_a_child_has_a_deadline(output):
    child = spawn("import time; time.sleep(60)", output)
    assert child.wait(0.05) is None
    child.send(signal.SIGKILL)
    assert child.wait(10) == "SIGKILL (signal 9)"


def test_a_child_that_somebody_else_reaped_has_ended(output):
    child = spawn("pass", output)
    os.waitpid(child.pid, 0)
    assert child.wait(10) == "an exit status that was lost"


def test_spawn_gives_a_clean_start(output, tmp_path):
    kept, other = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = spawn(
            f"""if True:
            import os, signal
            assert os.getsid(0) == os.getpid()
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
            assert os.readlink("/proc/self/fd/0") == os.devnull
            os.fstat({kept})
            try:
                os.fstat({other})
            except OSError:
                print("fine")
            """,
            output,
            keep=[kept],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert child.wait(10) == "exit status 0", (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text() == "fine\n"
    assert not os.get_inheritable(kept)
    os.close(kept)
    os.close(other)


def test_the_processes_of_a_run_are_found_and_ended(run_id):
    shell = start(
        "sh",
        "-c",
        # A child, one with an emptied environment, and an orphan in a session of its own.
        "sleep 60 & env -i sleep 60 & (setsid sleep 60 &) ; wait",
        run_id=run_id,
    )
    other = start("sleep", "60", run_id=run_id + "0")
    until(lambda: len(processes.marked(run_id)) >= 4)
    found = processes.marked(run_id)
    assert len(found) == 4
    assert shell.pid in found
    assert processes.end_run(run_id) == set()
    shell.wait(5)
    assert other.poll() is None
    other.kill()
    other.wait(5)


def test_a_run_never_ends_the_process_that_ends_it(run_id):
    code = (
        "import os; from regrow import processes;"
        "print(os.getpid() in processes.marked(os.environ['REGROW_RUN']),"
        "processes.end_run(os.environ['REGROW_RUN']))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {RUN_MARK: run_id},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "True set()\n"


def test_descendants():
    shell = start("sh", "-c", "sleep 60 & wait")
    until(lambda: processes.descendants_of({shell.pid}))
    below = processes.descendants_of({shell.pid})
    assert len(below) == 1
    assert below == processes.children_of(shell.pid)
    assert below < processes.descendants_of({os.getpid()})
    processes.end_all(below)
    shell.wait(5)


def test_an_ancestor_is_found_by_its_name():
    script = "import time; time.sleep(1000)"
    with subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} -c '{script}' & wait"], start_new_session=True
    ) as shell:
        try:
            until(lambda: processes.children_of(shell.pid))
            (child,) = processes.children_of(shell.pid)
            assert processes.ancestor(child, processes.name_of(shell.pid)) == shell.pid
            assert processes.ancestor(child, "no such name") is None
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert processes.name_of(2**30) == ""
    assert processes.ancestor(2**30, "sh") is None


def test_a_child_is_ended_and_reaped(output):
    child = spawn("import time; time.sleep(60)", output)
    processes.end_child(child.pid)
    assert ProcessStat.of(child.pid) is None
    processes.end_child(child.pid)
    os.close(child.fd)


def test_inherited_files_are_closed_but_for_some(output):
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.set_inheritable(writer, True)
    code = (
        "import os; from regrow import processes;"
        f"processes.close_inherited([{writer}, 1]); os.fstat({writer}); os.fstat(1);"
        f"print(os.path.exists('/proc/self/fd/{reader}'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False
    )
    os.close(reader)
    os.close(writer)
    assert told.stdout == "False\n"


def test_a_server_is_no_client():
    site = str(Path(processes.__file__).parent / "client" / "site")
    base = {
        "PATH": "/bin",
        "REGROW_TARGET": "x",
        "REGROW_TOKEN": "y",
        "REGROW_TOKEN_FILE": "z",
        "REGROW_CLUSTER": "c",
        "REGROW_HOME": "/h",
        "PYTHONPATH": f"{site}:/mine",
    }
    assert processes.server_environ(base, "run") == {
        "PATH": "/bin",
        "REGROW_HOME": "/h",
        "PYTHONPATH": "/mine",
        RUN_MARK: "run",
    }
    assert "PYTHONPATH" not in processes.server_environ({"PYTHONPATH": site}, "run")


def test_a_log_that_is_not_there_says_nothing(tmp_path):
    assert tail(tmp_path / "log") == []
    assert telling_line(tmp_path / "log") == ""


def test_the_tail_is_the_last_lines_that_hold_something(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100000 + b"\none\n\n  \ntwo \xff\nthree\n\n")
    assert tail(path, lines=2) == ["two \N{REPLACEMENT CHARACTER}", "three"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("2026-11-29 15:14:34,012 INFO regrow.head.fleet: slice 0 is up\n", ""),
        ("one\n2026-11-29 15:14:34,012 INFO regrow.head.fleet: slice 0 is up\n", "one"),
        ("one\n2026-11-29 15:14:34,012 INFO regrow.head.main: event 1\n  load  0.1 s\n", "one"),
        ("Traceback:\n  File x\nValueError: no\n", "ValueError: no"),
        (
            "F1129 15:14:34 1 x.cc:2] Unknown flag\nFatal Python error: Aborted\n  File x\n",
            "F1129 15:14:34 1 x.cc:2] Unknown flag",
        ),
        ("regrow.errors.LaunchError: a\nregrow: b\nregrow.head  INFO  ends\n", "regrow: b"),
    ],
)
def test_the_line_that_tells_why(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert telling_line(tmp_path / "log") == line
