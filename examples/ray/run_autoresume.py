"""Fault-tolerant training: a TPU that is lost is made again, and training goes on from its checkpoints.

    regrow ray head up
    python examples/ray/run_autoresume.py --checkpoint-dir checkpoints

While it trains, delete the TPU (USER-tpu-ray): `regrow tpu-vm delete USER-tpu-ray`. Without a command it
runs `resumed_training.py`, with checkpoints every 100 of its 1000 steps; any other command is given after
`--`, and is to go on from its own checkpoints (`regrow ray job --autoresume` has more flags).
"""

from __future__ import annotations

from tpu_flags import EXAMPLES, controller_of, exit_with, parser_of, show

from regrow.ray import RankJob, RestartPolicy

TWO_DAYS_S = 2 * 86_400
REQUIREMENTS = ["jax[tpu]", "grain", "optax", "orbax-checkpoint"]


def main() -> None:
    """Makes the TPU and runs the job to its end, however often hosts are lost."""
    parser = parser_of(__doc__, "tpu-ray")
    parser.add_argument("--checkpoint-dir", required=True, help="a directory that all hosts share")
    parser.add_argument("--preemptions", type=int, default=100, help="hosts may be lost so often")
    parser.add_argument(
        "--failures", type=int, default=0, help="the command itself may fail so often"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--working-dir", default=str(EXAMPLES), help="uploaded, and where it is run"
    )
    parser.add_argument("command", nargs="*", metavar="-- COMMAND")
    given = parser.parse_args()
    controller = controller_of(given)
    training = ["python3", "ray/resumed_training.py", f"--steps={given.steps}"]
    job = RankJob(
        name=given.tpu,
        command=given.command or [*training, f"--checkpoint-every={given.checkpoint_every}"],
        working_dir=given.working_dir,
        pip=[] if controller.tpu.is_local else REQUIREMENTS,
        directory=given.checkpoint_dir,
    )
    job.prepare()
    restarts = RestartPolicy(
        preemptions=given.preemptions, failures=given.failures, deadline_s=TWO_DAYS_S
    )
    try:
        controller.run(job, restarts=restarts, tell=show)
    finally:
        if given.delete:
            controller.delete()


if __name__ == "__main__":
    exit_with(main)
