"""How fast state goes to storage and comes back, beside what the same place takes and gives by itself.

    python benchmarks/suspend.py [--mb N] [--rounds N] [--at DIR ...]

The disk's own rate is that of one file, written in pieces of 16 MiB and synced, and read again after the
kernel was asked to forget it. Both take turns. The data is random, so no chunk is there twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np

from regrow import LocalCluster
from regrow.suspend import open_storage
from regrow.suspend.shards import CHUNK_BYTES, read_shards, write_shards

CLIENT = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("all",))
each = 32
draw = np.random.default_rng(0)
arrays = [
    jax.device_put(draw.random((each << 18,), dtype=np.float32), NamedSharding(mesh, P("all")))
    for _ in range(int(sys.argv[1]) // each)
]
jax.block_until_ready(arrays)
print("ready", flush=True)
for line in sys.stdin:
    print(float(arrays[0][0]), flush=True)
"""


def forget(path: Path) -> None:
    """Has the kernel drop what it holds of a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_write(path: Path, data: memoryview) -> None:
    with path.open("wb", 0) as file:
        for start in range(0, len(data), CHUNK_BYTES):
            file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())


def plain_read(path: Path, target: memoryview) -> None:
    with path.open("rb", 0) as file:
        done = 0
        while count := file.readinto(target[done : done + CHUNK_BYTES]):
            done += count


def store(at: Path, megabytes: int, rounds: int) -> list[list[str]]:
    """The rates of one place, in MB/s."""
    found: dict[str, list[float]] = {"disk writes": [], "writes": [], "disk reads": [], "reads": []}
    target = memoryview(bytearray(megabytes << 20))
    for number in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="regrow-bench-", dir=at))
        data = np.random.default_rng(number).bytes(megabytes << 20)
        view, storage, single = memoryview(data), open_storage(str(folder)), folder / "single"
        hashes: list[list[str]] = []
        found["disk writes"].append(timed(lambda v=view, s=single: plain_write(s, v)))
        found["writes"].append(
            timed(lambda v=view, s=storage, h=hashes: h.extend(write_shards(s, [v])[0]))
        )
        for path in (single, *(folder / "chunks").iterdir()):
            forget(path)
        found["disk reads"].append(timed(lambda s=single: plain_read(s, target)))
        found["reads"].append(timed(lambda s=storage, h=hashes: read_shards(s, [(target, h[0])])))
        assert target == view
        shutil.rmtree(folder)
    rate = {name: (megabytes << 20) / 1e6 / statistics.median(s) for name, s in found.items()}
    return [
        [str(at), what, f"{rate[f'disk {what}']:,.0f}", f"{rate[what]:,.0f}",
         f"{rate[what] / rate[f'disk {what}']:.0%}"]
        for what in ("writes", "reads")
    ]  # fmt: skip


def cluster(at: Path, megabytes: int, rounds: int) -> list[list[str]]:
    """Suspension and resumption of a job that holds so much."""
    figures: dict[str, list[float]] = {
        "suspend": [],
        "once more": [],
        "resume": [],
        "first answer": [],
    }
    for _ in range(rounds):
        place = tempfile.mkdtemp(prefix="regrow-bench-", dir=at)
        with LocalCluster(2, 2, gcs_scratch_location=place) as made:
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(megabytes)],
                env=harness.cluster_environ(made.env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdout.readline()
            figures["suspend"].append(made.suspend()["took_s"])
            client.stdin.write("\n")
            client.stdin.flush()
            began = time.perf_counter()
            figures["resume"].append(made.resume()["took_s"])
            client.stdout.readline()
            figures["first answer"].append(time.perf_counter() - began)
            figures["once more"].append(made.suspend()["took_s"])
            made.resume()
            client.stdin.close()
            client.wait()
        shutil.rmtree(place, ignore_errors=True)
    return [[str(at), name, f"{statistics.median(s):.2f} s"] for name, s in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", type=Path, action="append")
    options = parser.parse_args()
    places = options.at or [Path(tempfile.gettempdir()), Path("/dev/shm")]
    rates = [row for at in places for row in store(at, options.mb, options.rounds)]
    print(f"\n### State to and from storage, {options.mb} MB, in MB/s\n")
    print(harness.table(["at", "what", "one file", "store", "share"], rates))
    times = [row for at in places for row in cluster(at, options.mb, options.rounds)]
    print(f"\n### Suspension of a job with {options.mb} MB on two slices\n")
    print(harness.table(["at", "what", "takes"], times))


if __name__ == "__main__":
    main()
