"""A host's part of a job: runs the command, keeps its log and its fate in the bucket.

The text of this module is what the startup script of a job runs, at every start of the host, with
whatever Python is there: it needs nothing of Regrow, and nothing but the standard library if the bucket
is a directory. Below BUCKET/RUN it knows these files, in which HOST is slice-S-worker-W:

    code.tar.gz                 the folder
    job.json                    what the job is
    hosts/HOST.json             what the host does
    done/HOST.json              how the command has ended there, unless it has been begun again
    logs/HOST/AAAA-PPPPPP.log   what attempt A has printed, part by part
    restarts.json               how often it has been begun again because the command had failed
    outcome.json                how the job has ended

Slice 0 worker 0 decides: the job has succeeded when all hosts have, and failed when one has, unless the
slices are being repaired, which has everything begun again, or it may be tried again, which takes a
reset of all slices. In the end it deletes the queued resource.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LEADER = "slice-0-worker-0"
PART_BYTES = 1 << 20
HEARD_EVERY_S = 15.0
_METADATA = "/computeMetadata/v1/instance/"
_TIMEOUT_S = 30.0
_GRACE_S = 5.0
_PAUSE_S = 5.0
_DELETE_TRIES = 60


class Store:
    """Files below a URL: a directory of this machine, or whatever fsspec knows."""

    def __init__(self, url: str) -> None:
        """Connects; raises ImportError or ValueError if fsspec lacks what the URL needs."""
        scheme, separator, path = url.partition("://")
        self._fs: Any = None
        if not separator or scheme == "file":
            self._root = (path if separator else url).rstrip("/")
        else:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        """A file; None if it is not there."""
        try:
            if self._fs is None:
                return Path(self._path(name)).read_bytes()
            self._fs.invalidate_cache()
            content: bytes = self._fs.cat_file(self._path(name))
            return content
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file as a whole."""
        if self._fs is not None:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path(name), data)
            return
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(data)
        draft.replace(path)

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, in order."""
        try:
            if self._fs is None:
                found = os.listdir(self._path(folder))
            else:
                self._fs.invalidate_cache()
                paths = self._fs.ls(self._path(folder), detail=False)
                found = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if name and not name.startswith("."))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            if self._fs is None:
                Path(self._path(name)).unlink()
            elif self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(name))

    def read_json(self, name: str) -> Any:
        """What a file holds; None if it is not there."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    def write_json(self, name: str, value: Any) -> None:
        """Writes JSON."""
        self.write(name, json.dumps(value, indent=1).encode())


# --- where this is ---


def metadata(key: str) -> str:
    """What the metadata server of this host tells; empty if it does not."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    request = urllib.request.Request(
        f"http://{host}{_METADATA}{key}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def tpu_env() -> dict[str, str]:
    """The settings of the TPU runtime on this host."""
    lines = (line.partition(":") for line in metadata("attributes/tpu-env").splitlines())
    return {key.strip(): value.strip().strip("'\"") for key, _, value in lines if key.strip()}


class Control:
    """The Cloud TPU API, as far as a job needs it."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Knows whom to ask."""
        self._place = f"{job['endpoint']}/v2/projects/{job['project']}/locations/{job['zone']}"
        self._run = job["run"]

    def _call(self, http: str, path: str) -> Any:
        request = urllib.request.Request(f"{self._place}/{path}", method=http)  # noqa: S310
        with contextlib.suppress(ValueError):
            told = json.loads(metadata("service-accounts/default/token"))
            request.add_header("Authorization", f"Bearer {told['access_token']}")
        # The proxies of the environment have nothing to do with a server on this machine.
        is_local = self._place.startswith("http:")
        opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if is_local else [])
        )
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)

    def is_whole(self) -> bool:
        """Whether all slices are there and well; True if nobody can tell."""
        name, token = f"/queuedResources/{self._run}", ""
        try:
            while True:
                part = self._call("GET", f"nodes?pageToken={token}")
                for node in part.get("nodes", []):
                    if str(node.get("queuedResource", "")).endswith(name) and (
                        node.get("state") != "READY" or node.get("health", "HEALTHY") != "HEALTHY"
                    ):
                        return False
                token = part.get("nextPageToken", "")
                if not token:
                    return True
        except (OSError, ValueError):
            return True

    def reset(self) -> bool:
        """Restarts all hosts, this one among them; whether the API has taken that."""
        try:
            self._call("POST", f"queuedResources/{self._run}:reset")
        except OSError as error:
            say(f"the slices are not reset: {error}")
            return False
        return True

    def delete(self) -> bool:
        """Deletes the queued resource, and with it this host; whether the API has taken that."""
        try:
            self._call("DELETE", f"queuedResources/{self._run}?force=true")
        except urllib.error.HTTPError as error:
            say(f"the queued resource is not deleted yet: {error}")
            return error.code == 404
        except OSError as error:
            say(f"the queued resource is not deleted yet: {error}")
            return False
        return True


def say(text: str) -> None:
    """A line for the log of the startup script."""
    print(f"regrow job: {text}", flush=True)  # noqa: T201


# --- the host's part ---


class Log:
    """What the command prints: a file here, in parts in the bucket."""

    def __init__(self, store: Store, host: str, attempt: int, path: Path) -> None:
        """Has uploaded nothing yet."""
        self._store = store
        self._prefix = f"logs/{host}/{attempt:04d}"
        self._path = path
        self._part = 0
        # Also a command that prints nothing has an attempt.
        self._seen = -1

    def upload(self) -> None:
        """Writes the parts that have grown."""
        with self._path.open("rb") as file:
            while True:
                file.seek(self._part * PART_BYTES)
                data = file.read(PART_BYTES)
                if self._part * PART_BYTES + len(data) == self._seen:
                    return
                self._store.write(f"{self._prefix}-{self._part:06d}.log", data)
                self._seen = self._part * PART_BYTES + len(data)
                if len(data) < PART_BYTES:
                    return
                self._part += 1


class Host:
    """This host of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Finds out which one it is."""
        env = tpu_env()
        self._job = job
        self._store = Store(f"{job['bucket'].rstrip('/')}/{job['run']}")
        self._control = Control(job)
        self.slice = int(env.get("MEGASCALE_SLICE_ID") or 0)
        self.worker = int(env.get("WORKER_ID") or 0)
        self.name = f"slice-{self.slice}-worker-{self.worker}"
        self._node = env.get("NODE_ID", "")
        self._hosts = int(env.get("MEGASCALE_NUM_SLICES") or 1)
        for bound in (env.get("HOST_BOUNDS") or "1").split(","):
            self._hosts *= int(bound)
        logs = self._store.names(f"logs/{self.name}")
        self._attempt = 1 + max([int(name[:4]) for name in logs if name[:4].isdigit()], default=0)
        self._began_at = time.time()
        self._heard_at = 0.0
        self._failed_since: float | None = None
        self._decided = False
        self._command: subprocess.Popen[bytes] | None = None
        self._log: Log | None = None

    def run(self) -> int:
        """Runs the command to its end; the exit status of the startup script."""
        if self._insist(partial(self._store.read, "outcome.json")) is not None:
            say("the job has ended already")
            self._clean_up()
            return 0
        self._insist(partial(self._store.remove, f"done/{self.name}.json"))
        self._insist(partial(self._record, "starting"))
        folder = Path.home() / self._job["run"]
        command = self._command_in(folder)
        signal.signal(signal.SIGTERM, self._interrupted)
        log = Path.home() / ".regrow-job" / f"attempt-{self._attempt}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            self._command = subprocess.Popen(
                [
                    "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh",
                    "-c",
                    command,
                ],
                cwd=folder,
                env=os.environ | self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._log = Log(self._store, self.name, self._attempt, log)
        say(f"{self.name}: attempt {self._attempt}")
        status = self._follow(self._command)
        say(f"{self.name}: the command has ended with status {status}")
        return 0

    def _variables(self) -> dict[str, str]:
        return {
            "PYTHONUNBUFFERED": "1",
            "REGROW_RUN_NAME": self._job["run"],
            "REGROW_ATTEMPT": str(self._attempt),
            "REGROW_BUCKET": f"{self._job['bucket'].rstrip('/')}/{self._job['run']}",
        }

    def _insist(self, act: Callable[[], Any]) -> Any:
        """What an action on the bucket gives, which may be out of reach for a while."""
        while True:
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - of whatever library the bucket needs
                say(f"the bucket is out of reach: {error}")
            time.sleep(self._job["report_s"])

    def _command_in(self, folder: Path) -> str:
        """The command, once its code is there; if that cannot be unpacked, one that says so and fails.

        What earlier attempts have left beside the code stays.
        """
        folder.mkdir(parents=True, exist_ok=True)
        while (data := self._insist(partial(self._store.read, "code.tar.gz"))) is None:
            say("the code is not in the bucket yet")
            time.sleep(_PAUSE_S)
        # As `multihost run` does: links may lead anywhere, and whatever is there is replaced.
        argv = ["tar", "-xzf", "-", "--no-same-owner", "-C", str(folder)]
        done = subprocess.run(argv, input=data, capture_output=True, check=False)
        if done.returncode == 0:
            return str(self._job["command"])
        told = f"the code cannot be unpacked: {done.stderr.decode(errors='replace').strip()}"
        say(told)
        return f"echo {shlex.quote(f'regrow job: {told}')}; exit 1"

    def _follow(self, command: subprocess.Popen[bytes]) -> int:
        """Keeps the bucket true until the command, or for the leader the job, has ended."""
        ended = False
        while True:
            status = command.poll()
            self._report("running" if status is None else "ended", status)
            if status is not None and not ended:
                done = {"status": status, "at": time.time(), "attempt": self._attempt}
                self._insist(partial(self._store.write_json, f"done/{self.name}.json", done))
                ended = True
            if self.name == LEADER and self._decide():
                self._end(command)
                self._clean_up()
                return command.wait()
            if status is not None and self.name != LEADER:
                return status
            with contextlib.suppress(subprocess.TimeoutExpired):
                if ended:
                    time.sleep(self._job["report_s"])
                else:
                    command.wait(self._job["report_s"])

    def _report(self, state: str, status: int | None) -> None:
        """Uploads what is new; the bucket may be out of reach for a while."""
        try:
            if self._log is not None:
                self._log.upload()
            if status is not None or time.time() - self._heard_at > HEARD_EVERY_S:
                self._record(state, status)
        except Exception as error:  # noqa: BLE001 - of whatever library the bucket needs
            say(f"the bucket cannot be written: {error}")

    def _record(self, state: str, status: int | None = None) -> None:
        self._heard_at = time.time()
        record = {
            "slice": self.slice,
            "worker": self.worker,
            "node": self._node,
            "state": state,
            "status": status,
            "attempt": self._attempt,
            "began_at": self._began_at,
            "heard_at": self._heard_at,
            "hosts": self._hosts,
        }
        self._store.write_json(f"hosts/{self.name}.json", record)

    # --- the leader's part ---

    def _decide(self) -> bool:
        """Whether the job has ended; writes down how."""
        try:
            done = {
                name.removesuffix(".json"): self._store.read_json(f"done/{name}")
                for name in self._store.names("done")
            }
        except Exception as error:  # noqa: BLE001 - of whatever library the bucket needs
            say(f"the bucket cannot be read: {error}")
            return False
        ends = {name: one for name, one in done.items() if one}
        failed = min(
            ((one["at"], name) for name, one in ends.items() if one["status"] != 0), default=None
        )
        if failed is None:
            self._failed_since = None
            return len(ends) == self._hosts and self._conclude("succeeded", 0, "")
        if not self._is_final() or self._tries_again(list(ends)):
            return False
        return self._conclude("failed", ends[failed[1]]["status"], failed[1])

    def _tries_again(self, ended: list[str]) -> bool:
        """Has everything begun again, if that may be; this host ends with it."""
        told = self._insist(partial(self._store.read_json, "restarts.json"))
        count = (told or {"count": 0})["count"]
        if count >= self._job["max_restarts"]:
            return False
        for name in ended:
            self._insist(partial(self._store.remove, f"done/{name}.json"))
        self._insist(partial(self._store.write_json, "restarts.json", {"count": count + 1}))
        say(f"the command has failed: restart {count + 1} of {self._job['max_restarts']}")
        return self._control.reset()

    def _is_final(self) -> bool:
        """Whether a failure is the command's own.

        A slice that dies takes the others along, and then all are begun again.
        """
        now = time.monotonic()
        if self._failed_since is None or not self._control.is_whole():
            self._failed_since = now
        return now - self._failed_since >= float(self._job["grace_s"])

    def _conclude(self, state: str, status: int, host: str) -> bool:
        say(f"the job has {state}{f' on {host} with status {status}' if host else ''}")
        outcome = {"state": state, "status": status, "host": host, "at": time.time()}
        self._insist(partial(self._store.write_json, "outcome.json", outcome))
        self._decided = True
        return True

    def _clean_up(self) -> None:
        """Deletes the queued resource; this host ends with it."""
        if self._job["keep"] or self.name != LEADER:
            return
        for _ in range(_DELETE_TRIES):
            if self._control.delete():
                return
            time.sleep(_PAUSE_S)

    # --- the end ---

    def _end(self, command: subprocess.Popen[bytes]) -> None:
        """Ends the command and its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(_GRACE_S)
                break
        self._report("ended", command.poll())

    def _interrupted(self, *_: object) -> None:
        """The host is to end: the command gets the signal, and what it says is kept."""
        if self._command is not None and not self._decided:
            self._end(self._command)
            with contextlib.suppress(Exception):
                self._record("interrupted", self._command.poll())
        sys.exit(128 + signal.SIGTERM)


def main(path: str) -> int:
    """Is a host of the job that a file tells of."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    return Host(job).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
