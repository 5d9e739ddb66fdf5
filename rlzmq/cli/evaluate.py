"""``rlzmq evaluate``: evaluate the policy of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlzmq.cli.checkpoint_options import CheckpointOptions, load_arguments
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

__all__ = ["EvaluateOptions", "run"]


@dataclass
class EvaluateOptions(CheckpointOptions):
    """Options of ``rlzmq evaluate``."""

    episodes: int = 10
    """Number of complete episodes (default: 10)."""
    json: Path | None = None
    """File for the statistics and each episode's return and length (default: none)."""
    video: Path | None = None
    """File for a video of the first episodes, .mp4 or .gif; needs rlzmq[video] (default: none)."""
    video_episodes: int = 1
    """Number of episodes in the video (default: 1)."""
    seed: int | None = None
    """Seed of the env (default: the run's seed)."""
    explore: bool = False
    """Sample actions from the distribution instead of taking its mode (default: False)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq evaluate``; return the exit code."""
    options = parse(
        EvaluateOptions,
        arguments,
        usage="rlzmq evaluate RUN_OR_CHECKPOINT [options]",
        description="Evaluate a checkpoint's policy on complete episodes, in one process.",
    )
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigurationError(f"--json {options.json}: there is no directory {options.json.parent}.")
    from rlzmq.algorithms.checkpoint_evaluation import evaluate_checkpoint

    scores = evaluate_checkpoint(
        options.checkpoint,
        num_episodes=options.episodes,
        seed=options.seed,
        explore=options.explore,
        video=options.video,
        num_video_episodes=options.video_episodes,
        **load_arguments(options),
    )
    print(scores)
    if options.json is not None:
        scores.save(options.json)
        print(f"json        {options.json}")
    if scores.video is not None:
        print(f"video       {scores.video}")
    return 0
