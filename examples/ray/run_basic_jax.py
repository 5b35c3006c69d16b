"""The least that can be done with a TPU on a Ray cluster: `jax.device_count()` on every host.

    regrow ray head up
    python examples/ray/run_basic_jax.py

The TPU (USER-ray-test, V4 2x2x2) is made if there is none. Its hosts join the Ray cluster, this
directory is uploaded, and each host runs `device_count.py`: 8 on the two hosts of a v4-16.
"""

from __future__ import annotations

from pathlib import Path

from tpu_flags import controller_of, exit_with, parser_of, show

from regrow.ray import RankJob


def main() -> None:
    """Makes the TPU and runs the job."""
    given = parser_of(__doc__, "ray-test").parse_args()
    controller = controller_of(given)
    job = RankJob(
        name=given.tpu,
        command=["python3", "device_count.py"],
        working_dir=str(Path(__file__).parent),
        # Hosts of the local Cloud TPU have what this machine has.
        pip=[] if controller.tpu.is_local else ["jax[tpu]"],
    )
    try:
        controller.run(job, tell=show)
    finally:
        if given.delete:
            controller.delete()


if __name__ == "__main__":
    exit_with(main)
