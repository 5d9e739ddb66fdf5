"""``rlzmq inspect`` and ``rlzmq check-env``: look at environments and data before a run."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from gymnasium.utils.env_checker import data_equivalence

from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.cli.options import table_from_texts
from rlzmq.cli.parsing import command, import_first
from rlzmq.cli.runs import show_checkpoints
from rlzmq.core.errors import ConfigurationError, RlzmqError, printable
from rlzmq.core.synonyms import did_you_mean, instead_of_algorithm
from rlzmq.core.tracebacks import is_of_user, place_of
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.envs.wrappers import split_wrappers
from rlzmq.replay.shards import find_shards, open_shards

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig

__all__ = ["check_env", "inspect", "show_shards"]


@dataclass
class InspectOptions:
    """Options of ``rlzmq inspect``."""

    what: tyro.conf.Positional[str] = "ppo"
    """An algorithm, whose defaults and connectors are used; or a run directory, a checkpoint, a directory of shards
    (default: ppo)."""
    env: str | None = None
    """Gymnasium id, or 'package.module:Class' (default: that of --config)."""
    config: Path | None = None
    """TOML file of settings (default: the algorithm's defaults)."""
    steps: int = 8
    """Number of env steps to sample, at least 1 (default: 8)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@command(
    InspectOptions,
    usage="rlzmq inspect ALGORITHM --env ENV [options], or rlzmq inspect RUN_OR_CHECKPOINT_OR_SHARDS",
    description="Show the data that flows through a run, or check every byte of a run's checkpoints or of shards.",
)
def inspect(options: InspectOptions) -> int:
    place = Path(options.what)
    if place.is_dir():
        is_run = (place / "checkpoints").is_dir()
        return show_checkpoints(place) if is_run or not find_shards(place) else show_shards(place)
    if options.what.lower() not in ALGORITHMS and not instead_of_algorithm(options.what):
        raise ConfigurationError(
            f"{place} is neither a directory (a run, a checkpoint, shards) nor an algorithm."
            f"{did_you_mean(options.what, ALGORITHMS)}"
        )
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps}: expected 1 or more")
    from rlzmq.roles.runner_role import make_env_runner

    import_first(options.import_)
    config_class = get_config_class(options.what)
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
    print(_described(getattr(batch, "columns", {})))
    learner = config.build_learner(spaces=spaces)
    for module_id, module in learner.module.items():
        num = sum(parameter.numel() for parameter in module.parameters())
        print(f"\nmodule {module_id}: {type(module).__name__}, {num} parameters\n{module}")


def _described(columns: Mapping[str, Any]) -> str:
    from rlzmq.connectors.pipelines import describe_batch

    return "\n".join(describe_batch(dict(columns)))


def show_shards(place: Path) -> int:
    """Check and print the shards of a directory; return 0. Raises ConfigurationError if none is usable."""
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
    for file, reason in opened.skipped:
        print(f"{file.name:<40} NOT USABLE  {printable(reason)}")
    all_returns, all_lengths = np.concatenate(returns), np.concatenate(lengths)
    first = opened.shards[0]
    print(f"\nobservations  {first.observation_space}\nactions       {first.action_space}")
    print(_described(first.columns))
    num_ended, num_steps = int(np.concatenate(is_done).sum()), int(all_lengths.sum())
    print(f"\n{len(all_returns)} episodes ({num_ended} ended), {num_steps} env steps in", end=" ")
    print(f"{len(opened.shards)} shards; {len(opened.skipped)} files skipped")
    for name, values in (("return", all_returns), ("length", all_lengths)):
        print(f"{name}  mean {values.mean():.2f}  min {values.min():.2f}  max {values.max():.2f}")
    return 0


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in Gymnasium's warnings


@dataclass
class CheckEnvOptions:
    """Options of ``rlzmq check-env``."""

    env: tyro.conf.Positional[str]
    """Gymnasium id, or 'package.module:Class'."""
    steps: int = 500
    """Number of random env steps, at least 1 (default: 500)."""
    seed: int = 0
    """Seed of the first reset (default: 0)."""
    env_config: Annotated[list[str], tyro.conf.arg(metavar="KEY=VALUE|JSON")] = field(default_factory=list)
    """Setting of the env: size=3, a JSON object or a TOML inline table; repeatable (default: none)."""
    wrappers: str = ""
    """What the env is wrapped in: NAME,NAME(KEY=VALUE),…, as in rlzmq train (default: nothing)."""
    is_atari: bool = False
    """Preprocess frames as usual for Atari (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@command(
    CheckEnvOptions,
    usage="rlzmq check-env ENV [options]",
    description="Check an environment: report what training would refuse and what Gymnasium's checker finds.",
)
def check_env(options: CheckEnvOptions) -> int:
    """Run the command with `arguments`, which follow ``rlzmq check-env``; return 0, or 78 if there are problems."""
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps}: expected 1 or more")
    import_first(options.import_)
    problems: list[str] = []
    env: Any = None
    try:
        from rlzmq.algorithms.ppo import PPOConfig

        config = PPOConfig().environment(
            options.env,
            env_config=table_from_texts("env_config", options.env_config),
            wrappers=split_wrappers(options.wrappers),
            is_atari=options.is_atari,
        )
        env = config.make_env()
        problems += [] if isinstance(env, MultiAgentEnv) else _gymnasium(env)
        problems += _step_randomly(env, options) or (_train(env, config, options) if not problems else [])
    except ConfigurationError:
        raise
    except Exception as error:  # raised by the env
        place = f" ({place_of(error)})" if is_of_user(error) else ""
        problems.append(f"{type(error).__name__}: {error}{place}")
    finally:
        if env is not None:
            env.close()
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"{options.env}: " + (f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "ok"))
    return EXIT_CONFIG if problems else 0


def _gymnasium(env: Any) -> list[str]:
    """Run Gymnasium's checker and return its problems."""
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    for warning in caught:
        text = _COLOURS.sub("", str(warning.message)).splitlines()[0]
        print(f"note: {text.removeprefix('WARN: ')}")
    return []


def _step_randomly(env: Any, options: CheckEnvOptions) -> list[str]:
    """Take random steps, check observations and rewards, and print the speed and episode lengths."""
    problems: dict[str, str] = {}  # with the first value that shows it
    is_multi = not hasattr(env, "observation_space") or hasattr(env, "possible_agents")
    first, again = (_parts(env.reset(seed=options.seed), "reset", "observation, info")[0] for _ in range(2))
    if not data_equivalence(first, again, exact=True):
        problems["reset(seed=…) twice with the same seed gives different observations"] = ""
    spaces = env.observation_spaces if is_multi else {"": env.observation_space}
    actions = env.action_spaces if is_multi else {"": env.action_space}
    for agent in env.possible_agents if is_multi else actions:
        actions[agent].seed(options.seed)
    observation, length, lengths = again, 0, []
    start = time.perf_counter()
    for _ in range(options.steps):
        chosen = {agent: actions[agent].sample() for agent in (observation if is_multi else actions)}
        action = chosen if is_multi else chosen[""]
        observation, reward, terminated, truncated, _ = _parts(
            env.step(action), "step", "observation, reward, terminated, truncated, info"
        )
        length += 1
        items = observation.items() if is_multi else [("", observation)]
        for agent, item in items:
            if not (space := spaces[agent]).contains(item):
                who = f"an observation {f'of {agent!r} ' if is_multi else ''}is outside of {space}"
                dtype = getattr(item, "dtype", space.dtype)
                problems.setdefault(
                    who, f": {item!r:.120}" + (f", of {dtype}" if dtype != space.dtype else "")
                )
        rewards = list(reward.values()) if is_multi else [reward]
        if not np.isfinite(np.asarray(rewards, dtype=np.float64)).all():
            problems["a reward is not finite"] = f": {reward!r:.80}"
        is_over = (
            terminated.get("__all__") or truncated.get("__all__") if is_multi else terminated or truncated
        )
        if is_over:
            lengths.append(length)
            length, (observation, _) = 0, env.reset()
    seconds = time.perf_counter() - start
    print(
        f"{options.steps / seconds:.0f} steps/s  {len(lengths)} episodes"
        + (f", {min(lengths)}–{max(lengths)} steps" if lengths else " ended")
    )
    if not lengths:
        from rlzmq.runners.episode_metrics import HOW_TO_LIMIT

        print(f"note: no episode ended in {options.steps} steps. If they never end: {HOW_TO_LIMIT}")
    return [name + value for name, value in problems.items()]


def _parts(returned: object, method: str, names: str) -> tuple[Any, ...]:
    """Return what a method of the env returned, if it is a tuple of as many values as there are names."""
    if not isinstance(returned, tuple) or len(returned) != names.count(",") + 1:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"{method}() returned {what}, expected ({names})")
    return returned


def _train(env: object, config: AlgorithmConfig, options: CheckEnvOptions) -> list[str]:
    """Sample with an env runner, a new module and default settings; return the errors that training would raise."""
    from rlzmq.roles.runner_role import make_env_runner

    config.env_runners(num_env_runners=0).debugging(seed=options.seed)
    config.fault_tolerance(restart_failed_sub_environments=False)
    if isinstance(env, MultiAgentEnv):
        agents = [str(agent) for agent in env.possible_agents]
        config.multi_agent(policies=set(agents), policy_mapping_fn=lambda agent_id, episode: str(agent_id))
    try:
        config.validate()
        runner = make_env_runner(config, 0)
        try:
            runner.sample(num_timesteps=options.steps)
            if not config.is_multi_agent:
                config.build_learner(spaces={"__env_single__": config.single_spaces()})
        finally:
            runner.stop()
    except (RlzmqError, TypeError, ValueError) as error:
        return [f"training refuses it: {error}"]
    return []
