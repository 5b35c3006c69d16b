"""A VM that is the head of a Ray cluster with TPUs: the commands of gcloud that make it.

They are words only: whoever runs them needs gcloud, and pays.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

ACCOUNT: Final = "tpu-admin"
ROLES: Final = ("roles/tpu.admin", "roles/iam.serviceAccountUser", "roles/logging.logWriter")
DISK_GB: Final = 200
MACHINE_TYPE: Final = "n1-standard-4"
_SCRIPT_STATUS: Final = "startup-script exit status"

Command = Sequence[str]


def startup_script(ray_version: str) -> str:
    """What the VM installs when it starts."""
    return "\n".join(
        [
            "#!/bin/bash",
            "set -e",
            "apt-get update",
            "apt-get install -y python3-pip python3-venv rsync",
            "python3 -m venv /opt/regrow",
            f"/opt/regrow/bin/pip install --quiet 'ray[default,tune]=={ray_version}'",
            "echo 'PATH=/opt/regrow/bin:$PATH' > /etc/profile.d/regrow.sh",
            "",
        ]
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """The VM.

    Attributes:
        name: Its name, $USER-admin by default.
        project: Its project; empty: gcloud's own.
        zone: Its zone; empty: gcloud's own.
        account: E-mail of its service account; empty: that of the project.
    """

    name: str
    project: str = ""
    zone: str = ""
    account: str = ""

    def _place(self) -> list[str]:
        words = [f"--project={self.project}"] if self.project else []
        return words + ([f"--zone={self.zone}"] if self.zone else [])

    def make_account(self, account: str, project: str) -> list[Command]:
        """Makes a service account that may manage TPUs; needed once for a project."""
        email = f"{account}@{project}.iam.gserviceaccount.com"
        make = ["gcloud", "iam", "service-accounts", "create", account, f"--project={project}"]
        grants = [
            [
                *("gcloud", "projects", "add-iam-policy-binding", project),
                f"--member=serviceAccount:{email}",
                f"--role={role}",
                "--condition=None",
            ]
            for role in ROLES
        ]
        return [make, *grants]

    def create(self, ray_version: str) -> Command:
        """Makes the VM."""
        return [
            *("gcloud", "compute", "instances", "create", self.name),
            *self._place(),
            f"--machine-type={MACHINE_TYPE}",
            f"--boot-disk-size={DISK_GB}GB",
            "--image-family=debian-12",
            "--image-project=debian-cloud",
            *([f"--service-account={self.account}"] if self.account else []),
            "--scopes=https://www.googleapis.com/auth/cloud-platform",
            f"--metadata=startup-script={startup_script(ray_version)}",
        ]

    def script_status(self) -> Command:
        """Prints how its startup script has ended; nothing while it runs."""
        look = (
            "sudo journalctl -u google-startup-scripts --no-pager "
            f"| grep -o '{_SCRIPT_STATUS} [0-9]*' | tail -n 1"
        )
        return [*self._ssh(), f"--command={look}"]

    def deploy(self, sources: Sequence[str]) -> Command:
        """Copies files of this machine to its home directory."""
        return [
            *("gcloud", "compute", "scp", "--recurse"),
            *self._place(),
            *sources,
            f"{self.name}:~/",
        ]

    def connect(self) -> Command:
        """Opens a shell there, with the dashboard of Ray at http://127.0.0.1:8265 here."""
        return [*self._ssh(), "--", "-L8265:localhost:8265"]

    def _ssh(self) -> list[str]:
        return ["gcloud", "compute", "ssh", self.name, *self._place()]


def ended_with(told: str) -> int | None:
    """The exit status in what `script_status` has printed; None while the script runs."""
    _, found, status = told.strip().rpartition(_SCRIPT_STATUS)
    return int(status) if found and status.strip().isdigit() else None


def shown(command: Command) -> str:
    """A command line as a shell takes it."""
    return shlex.join(command)
