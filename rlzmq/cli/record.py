"""``rlzmq record``: write episodes of a checkpoint's policy as shards, for offline algorithms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rlzmq.cli.checkpoint_options import CheckpointOptions, code_arguments
from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import Progress

if TYPE_CHECKING:
    from rlzmq.core.files import FileLock

__all__ = ["RecordOptions", "run"]

# Number of episodes per round of each runner: what an interrupt loses, and the driver receives a copy of them.
_MAX_PER_ROUND, _ROUND_S = 20, 1.0


@dataclass(kw_only=True)
class RecordOptions(CheckpointOptions):
    """Options of ``rlzmq record``."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Directory for the shards. One that holds shards needs --overwrite."""
    overwrite: bool = False
    """Move shards that are in --output aside, with their directory (default: False)."""
    episodes: int = 100
    """Number of complete episodes (default: 100)."""
    env_runners: int = 0
    """Number of processes that sample; 0: this one (default: 0)."""
    envs_per_env_runner: int = 1
    """Number of envs in each runner; of several, short episodes end first and are recorded more often (default: 1)."""
    seed: int | None = None
    """Seed of the envs (default: the run's seed)."""
    explore: bool = False
    """Sample actions from the distribution instead of taking its mode (default: False)."""
    random: bool = False
    """Take random actions instead of the policy's (default: False)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq record``; return the exit code."""
    options = parse(
        RecordOptions,
        arguments,
        usage="rlzmq record RUN_OR_CHECKPOINT --output DIRECTORY [options]",
        description="Record complete episodes of a checkpoint's policy as shards, for offline algorithms.",
    )
    for name in ("episodes", "envs_per_env_runner"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigurationError(f"--{flag} {getattr(options, name)}: expected 1 or more")
    returns = record(options)
    if not returns:
        print(f"recorded  no episode has ended: nothing is in {options.output}")
        return EXIT_INTERRUPTED
    print(
        f"recorded  {len(returns)} episodes, return mean {sum(returns) / len(returns):.2f}, in {options.output}"
    )
    return 0 if len(returns) >= options.episodes else EXIT_INTERRUPTED


def record(options: RecordOptions) -> list[float]:
    """Write the episodes and return their returns: fewer than asked for after Ctrl-C.

    Raises:
        ConfigurationError: The directory holds shards or is in use, or in the end it does not hold all episodes.
    """
    lock = _take(options)
    try:
        return _record(options)
    finally:
        if lock is not None:
            lock.release(remove=True)


def _take(options: RecordOptions) -> FileLock | None:
    """Take the directory for the shards, before anything is written into it."""
    from rlzmq.core.checkpoint_series import lock_run, move_aside
    from rlzmq.replay.shards import find_shards

    lock = lock_run(options.output)
    if num := len(find_shards(options.output)):
        aside = move_aside(options.output) if options.overwrite else None
        if lock is not None:
            lock.release(remove=aside is None)
        if aside is None:
            raise ConfigurationError(
                f"--output {options.output} holds {num} shard{'s' * (num > 1)}. Name another directory (offline "
                "algorithms read several), or --overwrite to move it aside."
            )
        print(f"moved     the shards in {options.output} to {aside}", flush=True)
        lock = lock_run(options.output)
    return lock


def _record(options: RecordOptions) -> list[float]:
    from rlzmq.algorithms.checkpoints import load_policy, read_algorithm
    from rlzmq.algorithms.stored_config import Given
    from rlzmq.driver.sync_groups import EnvRunnerGroup
    from rlzmq.replay.shards import find_shards, open_shards

    stored = read_algorithm(options.checkpoint)
    config = stored.config_to("evaluate", Given(**code_arguments(options))).copy(copy_frozen=False)
    config.env_runners(num_env_runners=options.env_runners).learners(num_learners=0)
    config.networking(listen=None, advertise=None, join_file=None, num_remote_learners=0)
    config.env_runners(num_envs_per_env_runner=options.envs_per_env_runner)
    if options.seed is not None:
        config.debugging(seed=options.seed)
    config.offline_data(output=str(options.output.absolute()))
    config.validate()
    returns: list[float] = []
    group = EnvRunnerGroup(config=config)
    try:
        group.foreach_env_runner(partial(load_policy, state=stored.acting_state))
        progress = Progress("recorded  %d of %d episodes", options.episodes, partial(print, flush=True))
        several = options.envs_per_env_runner > 1  # what they record must not depend on time
        per_round, begun_at = _MAX_PER_ROUND if several else 1, time.monotonic()
        while len(returns) < options.episodes:
            wanted = min(options.episodes - len(returns), per_round * max(options.env_runners, 1))
            sampled = group.sample(
                num_episodes=wanted, explore=options.explore, random_actions=options.random
            )
            returns += [episode.get_return() for episode in sampled]
            progress.add(len(sampled))
            took_s, begun_at = time.monotonic() - begun_at, time.monotonic()
            if not several:
                per_round = max(1, min(_MAX_PER_ROUND, 2 * per_round, int(per_round * _ROUND_S / took_s)))
    except KeyboardInterrupt:
        print("interrupted: keeping the episodes so far", flush=True)
    finally:
        group.stop()
    shards = find_shards(options.output)
    written = sum(map(len, open_shards(shards).shards)) if shards else 0
    if written < len(returns):
        raise ConfigurationError(
            f"--output {options.output}: expected {len(returns)} episodes, got {written}. The "
            "reason is in the error above."
        )
    return returns
