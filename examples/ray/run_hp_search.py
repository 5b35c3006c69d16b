"""Hyperparameter search with Ray Tune: learning rate and momentum of a flax network that reads digits.

    regrow ray head up
    python examples/ray/run_hp_search.py --trials 8

Each trial has one TPU (`--resources '{"TPU": 1}'`), ends early if it does badly (ASHA), and has a
checkpoint after each epoch: when its node dies it goes on from there on another one, at the cost of one
epoch at most, while the lost host is brought back. The data is MNIST from OpenML, or where that cannot be
fetched the digits that scikit-learn ships (1797 images of 8 x 8).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The table of the trials is that of Tune's first years.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
# Each epoch has its checkpoint, which Tune takes for too many.
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")

import numpy as np
import ray
from digit_trial import Digits, hp_search
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from tpu_flags import controller_of, exit_with, parser_of, say

from regrow.errors import RayError, RegrowError
from regrow.ray import RayTpuController
from regrow.ray.directories import require_writable

METRIC = "mean_accuracy"
COLUMNS = {METRIC: "acc", "training_iteration": "iter", "time_total_s": "total time (s)"}
REQUIREMENTS = ["jax[tpu]", "flax", "optax"]
FETCH_S = 20.0
LOOK_EVERY_S = 1.0


def load(which: str) -> tuple[str, Digits]:
    """The data and its name.

    Raises:
        RayError: If MNIST is asked for and cannot be fetched.
    """
    if which != "digits":
        try:
            return "mnist", fetch_mnist()
        except (OSError, ValueError) as error:
            if which == "mnist":
                raise RayError(f"MNIST cannot be fetched from OpenML: {error}") from None
            say(f"MNIST cannot be fetched ({error})")
    from sklearn.datasets import load_digits

    found = load_digits()
    return "digits", split(found.images / 16, found.target, len(found.target) // 4)


def fetch_mnist() -> Digits:
    """MNIST as OpenML has it; scikit-learn keeps it for the next time."""
    from sklearn.datasets import fetch_openml

    socket.setdefaulttimeout(FETCH_S)
    try:
        found = fetch_openml("mnist_784", version=1, as_frame=False, parser="pandas", n_retries=0)
    finally:
        socket.setdefaulttimeout(None)
    return split(found.data.reshape(-1, 28, 28) / 255, found.target.astype(int), 10_000)


def split(images: np.ndarray, digits: np.ndarray, tests: int) -> Digits:
    """Keeps the last ones for tests."""
    images, digits = images[..., None].astype(np.float32), digits.astype(np.int32)
    return Digits(images[:-tests], digits[:-tests], images[-tests:], digits[-tests:])


@contextlib.contextmanager
def kept_ready(controller: RayTpuController, timeout_s: float) -> Iterator[None]:
    """Brings hosts back that are lost during the block."""
    controller.ensure_ready(timeout_s=timeout_s)
    over = threading.Event()
    hosts = controller.tpu.spec.hosts

    def keep() -> None:
        while not over.wait(LOOK_EVERY_S):
            try:
                if len(controller.joined()) < hosts:
                    controller.ensure_ready(timeout_s=timeout_s, patient=True)
            except RegrowError as error:
                say(f"{error}: tried again")

    require_tpus(controller)
    thread = threading.Thread(target=keep, name="keeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout_s)


def require_tpus(controller: RayTpuController) -> None:
    """Returns if there are TPUs; Tune would wait for them.

    Raises:
        RayError: If no node has any.
    """
    if not any(node.resources.get("TPU") for node in controller.cluster.nodes()):
        raise RayError(f"no node of the Ray cluster at {controller.cluster.address} has a TPU")


def search(given: argparse.Namespace, local: bool) -> Any:
    """Runs the trials; returns their results."""
    name, data = load(given.data)
    say(f"The data is {name}: {len(data.digits)} images to learn, {len(data.test_digits)} to test")

    def trial(config: dict[str, Any], data: Digits) -> None:
        hp_search(config, data, given.epochs)

    trial.__name__ = f"hp_search_{name}"
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(trial, data=data), {"TPU": 1}),
        param_space={
            "learning_rate": tune.loguniform(1e-4, 1.0),
            "momentum": tune.uniform(0.1, 0.9),
        },
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=given.trials,
            scheduler=ASHAScheduler(max_t=given.epochs, grace_period=2),
            max_concurrent_trials=given.concurrent or (os.cpu_count() if local else None),
            time_budget_s=given.deadline,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(Path(given.out).absolute()),
            failure_config=tune.FailureConfig(max_failures=given.max_failures),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            progress_reporter=tune.CLIReporter(metric_columns=COLUMNS, max_report_frequency=30),
            verbose=1,
        ),
    )
    return tuner.fit()


def history_of(result: Any) -> Any:
    """What a trial told of each epoch, one row for each.

    A node that dies when an epoch has been told and Tune does not yet know of its checkpoint costs that
    epoch: it is trained and told again, with the same numbers.
    """
    return result.metrics_dataframe.drop_duplicates("epoch", keep="last")


def plot(results: Any, path: Path) -> None:
    """The accuracy of each trial over its epochs, and what it makes of the two hyperparameters."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for result in results:
        history = history_of(result)
        label = "lr {learning_rate:.2g}, momentum {momentum:.2f}".format(**result.config)
        left.plot(history["epoch"], history[METRIC], marker="o", markersize=3, label=label)
    left.set(xlabel="epoch", ylabel="accuracy", title="trials")
    left.legend(fontsize="x-small")
    points = right.scatter(
        [result.config["learning_rate"] for result in results],
        [result.config["momentum"] for result in results],
        c=[result.metrics[METRIC] for result in results],
        cmap="viridis",
    )
    right.set(xscale="log", xlabel="learning rate", ylabel="momentum", title="accuracy at the end")
    figure.colorbar(points)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Makes the TPU, searches, and shows what was found."""
    parser = parser_of(__doc__, "tpu-ray")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8, help="at most, for each trial")
    parser.add_argument(
        "--concurrent", type=int, help="default: a trial for each TPU, or for each core"
    )
    parser.add_argument("--max-failures", type=int, default=10, help="of a trial: nodes may die")
    parser.add_argument("--deadline", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto")
    parser.add_argument("--out", default="ray-results", help="a directory that all hosts share")
    given = parser.parse_args()
    require_writable(Path(given.out), "results")
    controller = controller_of(given)
    local = controller.tpu.is_local
    environment: dict[str, Any] = {"working_dir": str(Path(__file__).parent)}
    if not local:
        environment["pip"] = REQUIREMENTS
    try:
        with kept_ready(controller, given.deadline):
            ray.init(
                controller.cluster.address,
                runtime_env=environment,
                logging_level=logging.WARNING,
                log_to_driver=False,
            )
            results = search(given, local)
        report(results, Path(given.out))
    finally:
        ray.shutdown()
        if given.delete:
            controller.delete()


def report(results: Any, out: Path) -> None:
    """The best trial and the plot.

    Raises:
        RayError: If a trial has failed.
    """
    if results.errors:
        raise RayError(f"{len(results.errors)} trials failed, the first with: {results.errors[0]}")
    best = results.get_best_result()
    print(f"Best trial: {best.config} with accuracy {best.metrics[METRIC]:.4f}")
    plot(results, out / "search.png")
    print(f"Plot: {out / 'search.png'}")


if __name__ == "__main__":
    exit_with(main)
