"""JAX is changed on hosts of local slices, and only there."""

from __future__ import annotations

import os
import subprocess
import sys

from regrow.processes import HOSTS_VARIABLE, with_site

TOLD = """
import os, jax
from jax._src.clusters import ClusterEnv
print([one.name for one in ClusterEnv._cluster_types if one.is_env_present()])
print(jax.distributed.initialize.__module__, "NPROC" in os.environ)
print(getattr(jax.devices()[0], "slice_index", None))
"""


def told(**variables: str) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": with_site(environ.get("PYTHONPATH", ""))}
    done = subprocess.run(
        [sys.executable, "-c", TOLD],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_elsewhere_it_is_stock() -> None:
    assert told() == ["[]", "jax._src.distributed False", "None"]


def test_on_a_host() -> None:
    variables = {HOSTS_VARIABLE: "2", "GCE_METADATA_IP": "127.0.0.1:1", "JAX_NUM_CPU_DEVICES": "2"}
    assert told(**variables) == ["['regrow']", "jax._src.distributed True", "None"]


def test_a_server_that_a_host_starts_is_no_host() -> None:
    from regrow.processes import RUN_MARK, server_environ

    assert server_environ({HOSTS_VARIABLE: "2", "PYTHONPATH": with_site("/x")}, "id") == {
        "PYTHONPATH": "/x",
        RUN_MARK: "id",
    }
