"""What a process needs before JAX: settings, `connect`, the start of Python, the bootstrap."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regrow
from regrow.client import Settings, environ
from regrow.errors import UsageError
from regrow.processes import SITE_DIRECTORY

SOURCES = str(Path(regrow.__file__).parents[1])
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("text", "target", "address"),
    [
        ("127.0.0.1:29000", "grpc://127.0.0.1:29000", ("127.0.0.1", 29000)),
        ("grpc://localhost:1", "grpc://localhost:1", ("localhost", 1)),
        ("[::1]:29000", "grpc://[::1]:29000", ("::1", 29000)),
        ("/run/x/Client.sock", "grpc://unix:/run/x/Client.sock", "/run/x/Client.sock"),
        ("unix:/run/x.sock", "grpc://unix:/run/x.sock", "/run/x.sock"),
        ("grpc://unix:///run/x.sock", "grpc://unix:/run/x.sock", "/run/x.sock"),
    ],
)
def test_addresses(text: str, target: str, address: object) -> None:
    settings = Settings.of(text)
    assert settings.target == target
    assert settings.address == address


@pytest.mark.parametrize(
    "text", ["", "localhost", "x:y", ":1", "host:0", "host:65536", "/" + "x" * 107, 5, b"host:1"]
)
def test_no_addresses(text: Any) -> None:
    with pytest.raises(UsageError):
        Settings.of(text)


def test_the_token_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    target = {"REGROW_TARGET": "host:1"}
    assert Settings.from_environ({}) is None
    assert Settings.from_environ(target) == Settings("grpc://host:1")
    from_file = Settings.from_environ({**target, "REGROW_TOKEN_FILE": str(file)})
    assert from_file == Settings("grpc://host:1", "sesame")
    both = {**target, "REGROW_TOKEN": "other", "REGROW_TOKEN_FILE": str(file)}
    assert Settings.from_environ(both) == Settings("grpc://host:1", "other")
    with pytest.raises(UsageError, match="REGROW_TOKEN_FILE"):
        Settings.from_environ({**target, "REGROW_TOKEN_FILE": str(tmp_path / "none")})


def test_the_token_is_not_shown() -> None:
    assert "sesame" not in repr(Settings("grpc://host:1", "sesame"))


def test_the_environment_of_a_client() -> None:
    found = environ(Settings("grpc://host:1", "t"), {"PYTHONPATH": f"/a:{SITE_DIRECTORY}"})
    assert found["JAX_PLATFORMS"] == "proxy,cpu"
    assert found["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] == "true"
    assert found["PYTHONPATH"] == f"{SITE_DIRECTORY}:/a"
    assert found["REGROW_TOKEN"] == "t"
    kept = environ(Settings("grpc://host:1"), {"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert kept["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert "REGROW_TOKEN" not in kept


def client(sources: str = "") -> dict[str, str]:
    """The environment of a client of a cluster that is not there."""
    return environ(Settings("grpc://127.0.0.1:9"), {"PYTHONPATH": sources})


def test_a_script_without_jax_sees_nothing(python: Run) -> None:
    code = "import sys; print(*[m for m in sys.modules if m.startswith(('regrow', 'jax'))])"
    done = python("-c", code, variables=client(SOURCES))
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)


def test_a_bad_target_does_not_stop_a_script(python: Run) -> None:
    variables = client(SOURCES) | {"REGROW_TARGET": "nonsense"}
    done = python("-c", "print(1)", variables=variables)
    assert (done.stdout, done.stderr) == ("1\n", "")
    done = python("-c", "import jax; print(jax.__name__)", variables=variables)
    assert done.stdout == "jax\n"
    assert done.stderr.count("regrow: this process is no client") == 1


def test_the_next_sitecustomize_runs_too(python: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.other = 1")
    variables = client(f"{other}:{SOURCES}")
    code = f"import sys; print(sys.other, {str(SITE_DIRECTORY)!r} in sys.path)"
    assert python("-c", code, variables=variables).stdout == "1 False\n"


def test_the_hooks_come_with_jax(python: Run) -> None:
    code = """
        import sys, jax
        from importlib import resources
        from jax._src import compiler
        from jaxlib import _ifrt_proxy
        from jax._src.interpreters import pxla
        for hooked in (compiler.backend_compile_and_load, _ifrt_proxy.get_client, pxla.batched_device_put):
            assert hooked.__module__.startswith("regrow.client"), hooked
        assert not any("regrow" in type(f).__module__ for f in sys.meta_path), sys.meta_path
        assert resources.files(jax).is_dir()
        print(jax.config.jax_platforms, jax.config.read("jax_backend_target"))
    """
    variables = client(SOURCES) | {"REGROW_TARGET": "grpc://unix:/Some/Path"}
    done = python("-c", textwrap.dedent(code), variables=variables)
    assert done.stdout == "proxy,cpu grpc://unix:/Some/Path\n", done.stderr


def test_a_package_of_another_environment_is_enough(python: Run) -> None:
    code = "import jax, regrow, sys; print(regrow.__file__, len(sys.path))"
    with_it = python("-c", code, variables=client())
    assert with_it.stdout.startswith(SOURCES), with_it.stderr


def test_connect_after_the_backends_are_in_use_is_refused(python: Run) -> None:
    code = """
        import jax, regrow
        jax.devices()
        try: regrow.connect("127.0.0.1:9")
        except regrow.errors.UsageError as error: print(error)
    """
    done = python("-c", "import regrow.errors\n" + textwrap.dedent(code))
    assert "before the first array" in done.stdout, done.stderr


def test_a_process_is_a_client_of_one_cluster(python: Run) -> None:
    code = """
        import regrow, regrow.errors
        regrow.connect("127.0.0.1:9")
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.devices()
        try: regrow.connect("127.0.0.1:10")
        except regrow.errors.UsageError as error: print(error)
    """
    done = python("-c", textwrap.dedent(code))
    assert "is a client of grpc://127.0.0.1:9 already" in done.stdout, done.stderr
    assert "grpc://127.0.0.1:10 needs a process of its own" in done.stdout


def test_connect_without_a_target_is_refused(python: Run) -> None:
    code = """
        import regrow, regrow.errors
        try: regrow.connect()
        except regrow.errors.UsageError as error: print(error)
    """
    assert "REGROW_TARGET" in python("-c", textwrap.dedent(code)).stdout


@pytest.mark.parametrize("first", ["import jax", "pass"])
def test_a_cluster_that_is_not_there_is_told_at_once(python: Run, first: str) -> None:
    code = f"{first}\nimport regrow; regrow.connect('127.0.0.1:9'); import jax; jax.devices()"
    done = python("-c", code, timeout_s=30)
    assert done.returncode == 1
    assert "no cluster answers at grpc://127.0.0.1:9" in done.stderr.splitlines()[-1]


def script(tmp_path: Path, code: str) -> str:
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    return "script.py"


BOOTSTRAP = ("-m", "regrow.client.bootstrap")
TARGET = {"REGROW_TARGET": "127.0.0.1:9"}


def test_bootstrap_runs_a_script_as_itself(python: Run, tmp_path: Path) -> None:
    code = """
        import pickle, sys
        class A: pass
        assert type(pickle.loads(pickle.dumps(A()))) is A
        print(__name__, __file__, sys.argv, sorted(n for n in globals() if not n.startswith("__")))
        sys.exit(7)
    """
    name = script(tmp_path, code)
    plain = python(name, "a", "-b")
    done = python(*BOOTSTRAP, name, "a", "-b", variables=TARGET)
    assert done.returncode == 7
    assert done.stdout == plain.stdout.replace(str(tmp_path / name), name)


def test_bootstrap_shows_the_scripts_own_traceback(python: Run, tmp_path: Path) -> None:
    name = script(tmp_path, "def f():\n    1 / 0\nf()\n")
    plain = python(name)
    done = python(*BOOTSTRAP, name, variables=TARGET)
    assert done.returncode == 1
    assert done.stderr == plain.stderr.replace(str(tmp_path / name), name)


def test_bootstrap_runs_a_module(python: Run, tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(__name__, __spec__.name, sys.argv[1:]); 1 / 0")
    done = python(*BOOTSTRAP, "-m", "script", "x", variables=TARGET)
    assert done.stdout == "__main__ script ['x']\n"
    assert "client/bootstrap" not in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_bootstrap_in_use_by_multiprocessing(python: Run, tmp_path: Path) -> None:
    code = """
        import multiprocessing
        def f(x): return x + 1
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(f, [1, 2]))
    """
    done = python(*BOOTSTRAP, script(tmp_path, code), variables=TARGET)
    assert done.stdout == "[2, 3]\n", done.stderr


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--help",), ("none.py",)])
def test_bootstrap_used_wrongly(python: Run, arguments: tuple[str, ...]) -> None:
    done = python(*BOOTSTRAP, *arguments, variables=TARGET)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_bootstrap_without_a_cluster(python: Run, tmp_path: Path) -> None:
    done = python(*BOOTSTRAP, script(tmp_path, "print(1)"))
    assert done.returncode == 2
    assert "REGROW_TARGET" in done.stderr
