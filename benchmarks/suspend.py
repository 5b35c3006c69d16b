"""How fast state goes to storage and comes back, beside what the same place takes and gives by itself.

    python benchmarks/suspend.py [--mb N] [--rounds N] [--at DIR ...] [--store-only]

The disk's own rate is that of one file, written in pieces of 16 MiB and synced, and read again after the
kernel was asked to forget it. Both take turns, and the share is the median of those of the rounds. The
data is random, so no chunk is there twice.
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
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np

from regrow import LocalCluster
from regrow.suspend import open_storage
from regrow.suspend.shards import CHUNK_BYTES, read_shards, room_for, write_shards

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


@dataclass(frozen=True)
class Spent:
    """What something took: time, and that of the processor in all threads."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Spent:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - began, time.process_time() - cpu)


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


Works = dict[str, Callable[[], object]]


def take_turns(number: int, works: Works, found: dict[str, list[Spent]]) -> None:
    """Each once; who is first changes from round to round."""
    for name in sorted(works, reverse=bool(number % 2)):
        found.setdefault(name, []).append(timed(works[name]))


def store(at: Path, megabytes: int, rounds: int) -> list[list[str]]:
    """The rates of one place, in MB/s."""
    found: dict[str, list[Spent]] = {}
    target = room_for(megabytes << 20).data
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=at) as name:
            data = memoryview(np.random.default_rng(number).bytes(megabytes << 20))
            one_round(number, Path(name), data, target, found)
    return [row(str(at), what, megabytes, found) for what in ("writes", "reads")]


def one_round(
    number: int, folder: Path, data: memoryview, target: memoryview, found: dict[str, list[Spent]]
) -> None:
    storage, single = open_storage(str(folder)), folder / "single"
    hashes: list[list[str]] = []
    works: Works = {
        "file writes": lambda: plain_write(single, data),
        "store writes": lambda: hashes.extend(write_shards(storage, [data])[0]),
    }
    take_turns(number, works, found)
    for path in (single, *(folder / "chunks").iterdir()):
        forget(path)
    works = {
        "file reads": lambda: plain_read(single, target),
        "store reads": lambda: read_shards(storage, [(target, hashes[0])]),
    }
    take_turns(number, works, found)
    assert target == data


def row(at: str, what: str, megabytes: int, found: dict[str, list[Spent]]) -> list[str]:
    files, stores = found[f"file {what}"], found[f"store {what}"]
    shares = [file.wall_s / store.wall_s for file, store in zip(files, stores, strict=True)]
    rates = [
        f"{(megabytes << 20) / 1e6 / statistics.median(one.wall_s for one in spent):,.0f}"
        for spent in (files, stores)
    ]
    cpu = [f"{statistics.median(one.cpu_s for one in spent):.2f} s" for spent in (files, stores)]
    return [at, what, *rates, f"{statistics.median(shares):.0%}", *cpu]


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
    parser.add_argument("--store-only", action="store_true", help="No cluster.")
    options = parser.parse_args()
    places = options.at or [Path(tempfile.gettempdir()), Path("/dev/shm")]
    rates = [one for at in places for one in store(at, options.mb, options.rounds)]
    print(f"\n### State to and from storage, {options.mb} MB, in MB/s\n")
    titles = ["at", "what", "one file", "store", "share", "processor: one file", "store"]
    print(harness.table(titles, rates))
    if options.store_only:
        return
    times = [one for at in places for one in cluster(at, options.mb, options.rounds)]
    print(f"\n### Suspension of a job with {options.mb} MB on two slices\n")
    print(harness.table(["at", "what", "takes"], times))


if __name__ == "__main__":
    main()
