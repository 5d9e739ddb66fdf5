"""``rlzmq evaluate``: evaluate the policy of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from rlzmq.cli.joining import import_first
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

__all__ = ["EvaluateOptions", "run"]


@dataclass
class EvaluateOptions:
    """Options of ``rlzmq evaluate``."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
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
    config: Path | None = None
    """TOML file of settings, for a checkpoint whose config contains code (default: the checkpoint's config)."""
    trust_code: bool = False
    """Import functions and classes that the checkpoint's config names (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """The command: `arguments` without ``rlzmq evaluate``; the exit code."""
    options = parse(
        EvaluateOptions,
        arguments,
        usage="rlzmq evaluate RUN_OR_CHECKPOINT [options]",
        description="Evaluate a checkpoint's policy on complete episodes, in one process.",
    )
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigurationError(f"--json {options.json}: there is no directory {options.json.parent}.")
    import_first(options.import_)
    from rlzmq.algorithms.checkpoint_evaluation import evaluate_checkpoint
    from rlzmq.algorithms.checkpoints import load_config_class

    config = None
    if options.config is not None:
        config = load_config_class(options.checkpoint, trust_code=options.trust_code).from_toml(
            options.config
        )
    scores = evaluate_checkpoint(
        options.checkpoint,
        num_episodes=options.episodes,
        seed=options.seed,
        explore=options.explore,
        video=options.video,
        num_video_episodes=options.video_episodes,
        config=config,
        trust_code=options.trust_code,
    )
    print(scores)
    if options.json is not None:
        scores.save(options.json)
        print(f"json        {options.json}")
    if scores.video is not None:
        print(f"video       {scores.video}")
    return 0
