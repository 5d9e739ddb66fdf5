"""Trainables of the searches in these tests. Their metrics are made, so that every right result is known."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import psutil

from rlzmq import tune


def score(config: dict[str, Any]) -> None:
    """Reports x · iteration, and stops after `iterations`."""
    for iteration in range(1, config.get("iterations", 3) + 1):
        tune.report({"score": config["x"] * iteration, "nested": {"half": config["x"] / 2}})


def _do_once(marker: Path) -> bool:
    """Return whether this is the first call with this marker."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Counter(tune.Trainable):
    """Sums x; the sum is its state. It may kill its own process, or the driver, at a chosen iteration, once."""

    def setup(self, config: dict[str, Any]) -> None:
        self.total = 0

    def step(self) -> dict[str, Any]:
        config = self.config
        for what in ("kill", "kill_driver", "raise"):
            is_here = self.trial_id in config.get(what, ()) and self.iteration == 2
            if is_here and _do_once(Path(self.logdir) / what):
                if what == "raise":
                    raise ValueError("as asked")
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                psutil.Process(config["driver_pid"]).kill()
        self.total += config["x"]
        return {"total": self.total, "done": self.iteration + 1 >= config.get("iterations", 5)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "total.json").write_text(json.dumps(self.total))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.total = json.loads((Path(checkpoint_dir) / "total.json").read_text())


def with_checkpoints(config: dict[str, Any]) -> None:
    """Sums x with a checkpoint at each iteration; kills its process at the third, once."""
    checkpoint = tune.get_checkpoint()
    done, total = 0, 0
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            done, total = json.loads((Path(path) / "state.json").read_text())
    folder = Path(tune.get_context().get_trial_dir()) / "mine"
    folder.mkdir(exist_ok=True)
    for iteration in range(done + 1, 5):
        if iteration == 3 and _do_once(folder / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        total += config["x"]
        (folder / "state.json").write_text(json.dumps([iteration, total]))
        tune.report({"total": total}, checkpoint=tune.Checkpoint.from_directory(folder))


def _digest_weights(algorithm: Any) -> int:
    digest = 0
    for weights in algorithm.get_module().parameters():
        digest = zlib.crc32(weights.detach().numpy().tobytes(), digest)
    return digest


def note_loaded_weights(*, algorithm: Any, **kwargs: Any) -> None:
    """Called when a checkpoint was loaded: remembers its weights."""
    algorithm.loaded_weights = _digest_weights(algorithm)


def report_weights(*, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
    """Adds digests of the weights, and of those that were loaded from a checkpoint (0: none)."""
    result["weights"] = _digest_weights(algorithm)
    result["loaded_weights"] = getattr(algorithm, "loaded_weights", 0)


def meet_other_trial(*, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
    """Waits in the first iteration until another trial is as far, and counts the trial's processes."""
    result["num_processes"] = len(psutil.Process().children(recursive=True))
    place = Path(algorithm.config.learner_config_dict["place"])
    (place / str(os.getpid())).touch()
    deadline = time.monotonic() + 90
    while len(list(place.iterdir())) < 2:
        assert time.monotonic() < deadline, "no other trial runs"
        time.sleep(0.01)
