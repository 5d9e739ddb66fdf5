"""``rlzmq inspect``: show the data flow between env, module and learner before a training, or check files.

With an algorithm and an env it shows names, shapes and dtypes. With a path it checks checkpoints or shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzmq.cli.joining import import_first
from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.cli.parsing import parse
from rlzmq.connectors.pipelines import describe_batch
from rlzmq.core.checkpoint import read_checkpoint, read_manifest
from rlzmq.core.checkpoint_series import CheckpointSeries, find_checkpoint
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.printable import printable
from rlzmq.replay.shards import find_shards, open_shards

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig

__all__ = ["InspectOptions", "run", "show_checkpoints", "show_shards"]


@dataclass
class InspectOptions:
    """Options of ``rlzmq inspect``."""

    algorithm: str = "ppo"
    """Algorithm whose defaults and connectors are used (default: ppo)."""
    env: str | None = None
    """Gymnasium id, or 'package.module:Class' (default: that of --config)."""
    config: Path | None = None
    """TOML file of settings (default: the algorithm's defaults)."""
    steps: int = 8
    """Number of env steps to sample, at least 1 (default: 8)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq inspect``; return the exit code."""
    from rlzmq.algorithms.registry import get_config_class
    from rlzmq.roles.runner_role import make_env_runner

    given = list(arguments)
    if given and Path(given[0]).is_dir():
        place = Path(given[0])
        is_run = (place / "checkpoints").is_dir()
        return show_checkpoints(place) if is_run or not find_shards(place) else show_shards(place)
    if given and "/" in given[0]:
        raise ConfigurationError(
            f"{given[0]}: there is no such directory. Name a run directory, a checkpoint, or a directory of shards."
        )
    if given and not given[0].startswith("-"):
        given.insert(0, "--algorithm")
    options = parse(
        InspectOptions,
        given,
        usage="rlzmq inspect ALGORITHM --env ENV [options], or rlzmq inspect RUN_OR_CHECKPOINT_OR_SHARDS",
        description="Show the data that flows through a run, or check every byte of a run's checkpoints or of shards.",
    )
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps}: expected 1 or more")
    import_first(options.import_)
    config_class = get_config_class(options.algorithm)
    config = config_class() if options.config is None else config_class.from_toml(options.config)
    if options.env is not None:
        config.environment(options.env)
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    config.networking(listen=None, advertise=None, join_file=None, num_remote_learners=0)
    config.validate()
    runner = make_env_runner(config, 0)
    try:
        _show(config, runner, options.steps)
    finally:
        runner.stop()
    return 0


def _show(config: AlgorithmConfig, runner: Any, num_steps: int) -> None:
    single = config.single_spaces()
    spaces = {"__env_single__": single, "__env__": single}
    print(f"observations  {single[0]}\nactions       {single[1]}")
    for what, pipeline in (
        ("env to module", runner.env_to_module),
        ("module to env", runner.module_to_env),
        ("learner", config.build_learner_connector(*single)),
    ):
        names = ", ".join(type(piece).__name__ for piece in pipeline.connectors)
        print(f"\n{what}: {names}")
    batch = runner.sample(num_timesteps=num_steps)
    print(f"\nsampled: {len(batch)} chunks, {batch.num_env_steps} env steps")
    print("\n".join(describe_batch(dict(getattr(batch, "columns", {})))))
    learner = config.build_learner(spaces=spaces)
    for module_id, module in learner.module.items():
        num = sum(parameter.numel() for parameter in module.parameters())
        print(f"\nmodule {module_id}: {type(module).__name__}, {num} parameters\n{module}")


def show_checkpoints(place: Path) -> int:
    """Check and print the checkpoints, and the one to resume from; return 0, or 78 if none is usable.

    Args:
        place: A checkpoint, a directory of them, or a run directory.
    """
    found = find_checkpoint(place)
    paths = [*CheckpointSeries(place / "checkpoints").paths(), *CheckpointSeries(place).paths()]
    for path in paths or [path for path in (place / "checkpoint", place) if path.is_dir()][:1]:
        try:
            read_checkpoint(path)
            manifest = read_manifest(path)
        except CheckpointError as error:
            print(f"{path.name:<12} NOT USABLE  {printable(str(error))}")
            continue
        about, files = manifest["about"], manifest["files"]
        facts = [f"{sum(file['bytes'] for file in files.values())} bytes in {len(files)} files"]
        names = {"score": "return", "num_env_steps_trained_lifetime": "steps", "written": "written"}
        facts += [f"{label} {about[name]}" for name, label in names.items() if about.get(name) is not None]
        print(printable(f"{path.name:<12} whole       {about.get('algorithm', '?')}  {'  '.join(facts)}"))
        if len(paths) < 2:
            for name in sorted({str(Path(name).parent) for name in files}):
                print(f"             {printable(name)}")
    if found.path is None:
        print("nothing here to resume")
        return EXIT_CONFIG
    print(f"resume from  {found.path}")
    return 0


def show_shards(place: Path) -> int:
    """Check and print the shards of a directory; return 0. Raises ConfigurationError if none is usable."""
    import numpy as np

    opened = open_shards(place)
    returns, lengths, is_done = [], [], []
    for shard, path in zip(opened.shards, opened.paths, strict=True):
        returns.append(shard.get_returns())
        lengths.append(shard.length)
        is_done.append(shard.terminated | shard.truncated)
        print(
            f"{path.name:<40} whole       {len(shard)} episodes  {shard.num_env_steps} steps  "
            f"return {returns[-1].mean():.2f}"
        )
    for skipped in opened.skipped:
        print(f"{skipped.path.name:<40} NOT USABLE  {printable(skipped.reason)}")
    all_returns, all_lengths = np.concatenate(returns), np.concatenate(lengths)
    first = opened.shards[0]
    print(f"\nobservations  {first.observation_space}\nactions       {first.action_space}")
    print("\n".join(describe_batch(dict(first.columns))))
    num_ended, num_steps = int(np.concatenate(is_done).sum()), int(all_lengths.sum())
    print(f"\n{len(all_returns)} episodes ({num_ended} ended), {num_steps} env steps in", end=" ")
    print(f"{len(opened.shards)} shards; {len(opened.skipped)} files skipped")
    for name, values in (("return", all_returns), ("length", all_lengths)):
        print(f"{name}  mean {values.mean():.2f}  min {values.min():.2f}  max {values.max():.2f}")
    return 0
