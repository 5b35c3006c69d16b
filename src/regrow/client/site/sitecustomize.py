"""Python runs this at its start when this directory is on PYTHONPATH (see `regrow.client.environ`).

It makes JAX a client of the cluster that REGROW_TARGET names, or one of the processes of a local
Multislice (REGROW_HOSTS_PER_SLICE), once JAX is imported. A script that does not use JAX sees nothing
of it: so no imports here before that, and whatever goes wrong must not stop the script.
"""

import os
import sys


class _Finder:
    """Sees JAX being imported, and lets a module of ours take over."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        try:
            return _activated().find_spec(fullname, path, target)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 (told, and the script goes on)
            what = "client of the cluster" if _is_client() else "host of a Multislice"
            sys.stderr.write(f"regrow: this process is no {what}: {error}\n")
            return None


def _is_client() -> bool:
    return bool(os.environ.get("REGROW_TARGET"))


def _activated():  # type: ignore[no-untyped-def]
    _provide_package()
    if _is_client():
        from regrow.client.jaxhook import activate_from_environ
    else:
        from regrow.multihost.jaxhook import activate_from_environ

    return activate_from_environ()


def _provide_package() -> None:
    """Makes `regrow` importable where this Python's environment does not have it."""
    from importlib.util import find_spec, module_from_spec, spec_from_file_location
    from pathlib import Path

    if find_spec("regrow") is not None:
        return
    # Not by sys.path: the directory may be the site-packages of another environment.
    package = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location(
        "regrow", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is not None and spec.loader is not None:
        sys.modules["regrow"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _run_next() -> None:
    """Runs the sitecustomize that this one stands in front of, if there is one."""
    from importlib.machinery import PathFinder

    here = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if _is_client() or os.environ.get("REGROW_HOSTS_PER_SLICE"):
    sys.meta_path.insert(0, _Finder())
_run_next()
