"""``rlzmq evaluate``, ``record`` and ``export``: commands that use the policy of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import command, import_first
from rlzmq.core.errors import ConfigurationError, Progress
from rlzmq.telemetry.runs import check_no_search

__all__ = [
    "PolicyOptions",
    "evaluate",
    "export",
    "place_of",
    "policy_arguments",
    "record",
    "unknown_ids_explained",
]


@dataclass
class CheckpointOptions:
    """Which checkpoint to use."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
    env: str | None = None
    """Gymnasium id, or 'package.module:Class', in place of the checkpoint's (default: the checkpoint's)."""
    config: Path | None = None
    """TOML file of settings, in place of the checkpoint's (default: the checkpoint's)."""
    trust: list[str] = field(default_factory=list)
    """Package whose code somebody else's checkpoint may name; repeatable (default: none)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@dataclass
class PolicyOptions(CheckpointOptions):
    """Which policy of a checkpoint to use."""

    module: str | None = None
    """Id of the module; needed for multi-agent checkpoints (default: none)."""
    agent: str | None = None
    """Id of the agent that it plays (default: the first one that is mapped to the module)."""


def code_arguments(options: CheckpointOptions) -> dict[str, Any]:
    """Import the modules that the options name; return the fields of `Given` that the options hand over."""
    from rlzmq.algorithms.checkpoints import read_algorithm
    from rlzmq.algorithms.stored_config import Given

    import_first(options.import_)
    check_no_search(options.checkpoint)
    config = None
    if options.config is not None:
        stored = read_algorithm(options.checkpoint)
        config = stored.config.config_class(Given(trust=options.trust)).from_toml(options.config)
    settings = {} if options.env is None else {"env": options.env}
    return {"config": config, "trust": options.trust, "settings": settings}


def load_arguments(options: CheckpointOptions) -> dict[str, Any]:
    """Return `code_arguments` as arguments of `Policy.load` and `evaluate_checkpoint`."""
    arguments = code_arguments(options)
    return {**arguments.pop("settings"), **arguments}


def policy_arguments(options: PolicyOptions) -> dict[str, Any]:
    """Return the arguments of `Policy.load` that the options ask for."""
    agent: Any = options.agent
    if agent is not None and agent.isdigit():
        agent = int(agent)  # most environments number their agents or name them
    return {
        "module_id": options.module,
        "agent_id": agent,
        **load_arguments(options),
    }


def place_of(options: CheckpointOptions, name: str, flag: str) -> Path:
    """Return the path for a file that is made of a checkpoint: in its run's directory, else in the checkpoint.

    Raises:
        ConfigurationError: There is no checkpoint on this machine.
    """
    from rlzmq.core.run_dir import checkpoints_at, run_of

    check_no_search(options.checkpoint)
    if not checkpoints_at(options.checkpoint):
        raise ConfigurationError(
            f"{options.checkpoint} holds no checkpoint on this machine. Expected a run or a checkpoint; for one in an "
            f"object store, also name a file with {flag}."
        )
    return run_of(options.checkpoint) / name


@contextmanager
def unknown_ids_explained() -> Iterator[None]:
    """Raise ConfigurationError for a module or an agent that `Policy.load` does not find."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(str(error.args[0])) from None


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


@command(
    EvaluateOptions,
    usage="rlzmq evaluate RUN_OR_CHECKPOINT [options]",
    description="Evaluate a checkpoint's policy on complete episodes, in one process.",
)
def evaluate(options: EvaluateOptions) -> int:
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


@command(
    RecordOptions,
    usage="rlzmq record RUN_OR_CHECKPOINT --output DIRECTORY [options]",
    description="Record complete episodes of a checkpoint's policy as shards, for offline algorithms.",
)
def record(options: RecordOptions) -> int:
    for name in ("episodes", "envs_per_env_runner"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigurationError(f"--{flag} {getattr(options, name)}: expected 1 or more")
    with _taken(options):
        returns = _record(options)
    if not returns:
        print(f"recorded  no episode has ended: nothing is in {options.output}")
        return EXIT_INTERRUPTED
    print(
        f"recorded  {len(returns)} episodes, return mean {sum(returns) / len(returns):.2f}, in {options.output}"
    )
    return 0 if len(returns) >= options.episodes else EXIT_INTERRUPTED


@contextmanager
def _taken(options: RecordOptions) -> Iterator[None]:
    """Take the directory for the shards, before anything is written into it."""
    from rlzmq.core.run_dir import RunDir
    from rlzmq.replay.shards import find_shards

    with RunDir(options.output) as directory:
        if num := len(find_shards(options.output)):
            if not options.overwrite:
                raise ConfigurationError(
                    f"--output {options.output} holds {num} shard{'s' * (num > 1)}. Name another directory (offline "
                    "algorithms read several), or --overwrite to move it aside."
                )
            aside = directory.move_aside()
            print(f"moved     the shards in {options.output} to {aside}", flush=True)
        yield


def _record(options: RecordOptions) -> list[float]:
    """Write the episodes and return their returns: fewer than asked for after Ctrl-C."""
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
    shards = open_shards(options.output).shards if find_shards(options.output) else []
    written = sum(map(len, shards))
    if written < len(returns):
        raise ConfigurationError(
            f"--output {options.output}: expected {len(returns)} episodes, got {written}. The "
            "reason is in the error above."
        )
    if written > len(returns):  # Ctrl-C came after the last round was written
        returns = [episode.get_return() for shard in shards for episode in shard]
    return returns


@dataclass
class ExportOptions(PolicyOptions):
    """Options of ``rlzmq export``."""

    format: Literal["onnx", "pt2"] = "onnx"
    """Format of the file: onnx (for onnxruntime), or pt2 (for torch.export.load) (default: onnx)."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file; it is replaced if it exists (default: policy.onnx or policy.pt2 in the run directory)."""
    observations: int = 1000
    """Number of random observations on which the file is compared with the policy (default: 1000)."""
    seed: int = 0
    """Seed of these observations (default: 0)."""


@command(
    ExportOptions,
    usage="rlzmq export RUN_OR_CHECKPOINT [options]",
    description="Write a checkpoint's policy with its connectors as one file, and compare it with the policy.",
)
def export(options: ExportOptions) -> int:
    from rlzmq.algorithms.policy import Policy
    from rlzmq.deploy.export import export_policy

    if options.observations < 1:
        raise ConfigurationError(f"--observations {options.observations}: expected 1 or more")
    output = options.output or place_of(options, f"policy.{options.format}", "--output")
    with unknown_ids_explained():
        policy = Policy.load(options.checkpoint, **policy_arguments(options))
    result = export_policy(
        policy, output, format=options.format, num_checked=options.observations, seed=options.seed
    )
    print(f"checked   {result}")
    print(f"exported  {output} ({output.stat().st_size / 1024:,.0f} KiB)")
    return 0
