"""``rlzmq evaluate``: evaluate the policy of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from rlzmq.cli.joining import import_first
from rlzmq.cli.parsing import parse

__all__ = ["EvaluateOptions", "run"]


@dataclass
class EvaluateOptions:
    """Options of ``rlzmq evaluate``."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
    episodes: int = 10
    """Number of complete episodes (default: 10)."""
    seed: int | None = None
    """Seed of the envs (default: the run's seed)."""
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
    import_first(options.import_)
    returns = evaluate(options.checkpoint, options)
    mean, half = mean_and_half_width(returns)
    print(f"episodes {len(returns)}  return mean {mean:.2f} ± {half:.2f} (95 % CI)  IQM {iqm(returns):.2f}")
    print(f"min {min(returns):.2f}  max {max(returns):.2f}")
    return 0


def evaluate(path: Path, options: EvaluateOptions) -> list[float]:
    """Run complete episodes with the checkpoint's policy in this process; return their returns."""
    from rlzmq.algorithms.checkpoints import load_config, read_algorithm, resume_config

    if options.config is not None:
        config = type(load_config(path, trust_code=False)).from_toml(options.config)
    else:
        config = load_config(path, trust_code=options.trust_code)
    config.env_runners(num_env_runners=0).learners(num_learners=0).evaluation(
        evaluation_num_env_runners=0,
        evaluation_interval=None,
        evaluation_parallel_to_training=False,
        evaluation_duration=options.episodes,
        evaluation_duration_unit="episodes",
        evaluation_config={"explore": options.explore},
    )
    config.networking(listen=None, advertise=None, join_file=None, broker=None, num_remote_learners=0)
    if options.seed is not None:
        config.debugging(seed=options.seed)
    config.validate()
    config.offline_data(input_=None).experimental(
        _validate_config=False
    )  # the policy is needed, not its data
    state = read_algorithm(path)
    chosen = resume_config(path, state, config, trust_code=options.trust_code)
    # Evaluation starts new episodes and does not need those in progress in the run's env runners.
    state = {
        name: part for name, part in state.items() if not name.startswith(("env_runners", "eval_env_runners"))
    }
    # By name: a user's own algorithm class may be missing here, but evaluation does not use its training step.
    with config._algorithm_class()(chosen) as algorithm:
        algorithm.set_state(state)
        metrics = algorithm.evaluate()["env_runners"]
    return list(metrics["hist_stats"]["episode_return"])


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % confidence interval (normal approximation)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, 1.96 * math.sqrt(variance / len(values))


def iqm(values: Sequence[float]) -> float:
    """Return the interquartile mean: the mean of the middle half of the values."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
