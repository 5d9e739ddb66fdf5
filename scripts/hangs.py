"""Environments that never return, at random places; measures how soon each hang is noticed, and that the run continues.

    python scripts/hangs.py --hangs 100                    # every vectorization, training and evaluation
    python scripts/hangs.py --hangs 100 --first            # each in the very first step
    python scripts/hangs.py --hangs 40 --kill-broker       # the broker dies when the first one hangs

Every runner of a run hangs once: in a reset, in a step (a third of them in the first one), or, after that, in the
constructor of its replacement's environment. Time is measured from the last return, which may be a little before the
call that hangs. Exit code 1: a hang was noticed too early, or more than half a second after its time limit, or
training did not continue.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq import MultiAgentEnv, PPOConfig

MODES = ("sync", "async", "vector_entry_point", "multi_agent")
STEP_TIMEOUT_S = 1.0
LATE_S = 0.5
EARLY_S = 0.9
_STANDSTILL_S = 120.0
_OBSERVATIONS = gym.spaces.Box(-1, 1, (2,), np.float32)
_ACTIONS = gym.spaces.Discrete(2)
_LENGTH = 7  # steps of an episode


class Traps:
    """Places where an environment hangs: ``env_config["traps"][worker_index] = [(call, number), …]``.

    Each trap fires once per directory, and writes the time (monotonic seconds) to a file there.

    Args:
        config: An EnvContext with "traps" and "directory".
    """

    def __init__(self, config: Any) -> None:
        self._traps = config["traps"].get(config.worker_index, [])
        self._worker = config.worker_index
        self._directory = Path(config["directory"])
        self._counts: Counter[str] = Counter()
        self.come("make again" if config.recreated_worker else "make")

    def come(self, call: str) -> None:
        """Note the start of a call, which may never return."""
        self._counts[call] += 1
        if (call, self._counts[call]) not in self._traps:
            return
        name = f"{self._worker} {call} {self._counts[call]}"
        try:
            descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(descriptor, str(time.monotonic()).encode())
        os.close(descriptor)
        threading.Event().wait()


class Trapped(gym.Env[Any, Any]):
    """Episodes of a few steps, with `Traps`."""

    observation_space = _OBSERVATIONS
    action_space = _ACTIONS

    def __init__(self, config: Any) -> None:
        self.traps = Traps(config)
        self.num_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.traps.come("reset")
        self.num_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.traps.come("step")
        self.num_steps += 1
        return np.zeros(2, np.float32), 1.0, self.num_steps >= _LENGTH, False, {}


class TrappedVector(gym.vector.VectorEnv[Any, Any, Any]):
    """The same as a native vector env."""

    def __init__(self, config: Any, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = _OBSERVATIONS, _ACTIONS
        self.observation_space = gym.vector.utils.batch_space(_OBSERVATIONS, num_envs)
        self.action_space = gym.vector.utils.batch_space(_ACTIONS, num_envs)
        self.traps = Traps(config)
        self.num_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.traps.come("reset")
        self.num_steps = 0
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        begins = self.num_steps >= _LENGTH
        self.traps.come("reset" if begins else "step")
        self.num_steps = 0 if begins else self.num_steps + 1
        over = np.full(self.num_envs, self.num_steps >= _LENGTH)
        rewards = np.full(self.num_envs, 0.0 if begins else 1.0)
        return np.zeros((self.num_envs, 2), np.float32), rewards, over, np.zeros_like(over), {}


class TrappedAgents(MultiAgentEnv):
    """The same for two agents."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, _OBSERVATIONS)
        self.action_spaces = dict.fromkeys(self.agents, _ACTIONS)
        self.traps = Traps(config)
        self.num_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.traps.come("reset")
        self.num_steps = 0
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {}

    def step(self, action_dict: Any) -> Any:
        self.traps.come("step")
        self.num_steps += 1
        observations = {agent: np.zeros(2, np.float32) for agent in self.agents}
        over = {"__all__": self.num_steps >= _LENGTH}
        return observations, dict.fromkeys(self.agents, 1.0), over, {"__all__": False}, {}


def one_policy(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    """Map both agents to the same policy."""
    return "shared"


def make_config(
    mode: str, directory: Path, traps: dict[int, list[tuple[str, int]]], num_env_runners: int
) -> PPOConfig:
    """Return the config of a small run with this number of env runners, whose environments have these traps."""
    envs = {"vector_entry_point": TrappedVector, "multi_agent": TrappedAgents}
    config = (
        PPOConfig()
        .environment(envs.get(mode, Trapped), env_config={"directory": str(directory), "traps": traps})
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2)
        .learners(num_learners=1)
        .training(train_batch_size_per_learner=120, minibatch_size=60, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .fault_tolerance(env_step_timeout_s=STEP_TIMEOUT_S, env_reset_timeout_s=reset_timeout_s(mode))
        .debugging(seed=1)
    )
    if mode == "multi_agent":
        return config.multi_agent(policies={"shared"}, policy_mapping_fn=one_policy)
    return config.env_runners(gym_env_vectorize_mode=mode)


def evaluated(config: PPOConfig, num_env_runners: int, *, parallel: bool) -> PPOConfig:
    """Return the same config with evaluation runners, whose worker indices start at 1,000,001."""
    return config.evaluation(
        evaluation_interval=1,
        evaluation_num_env_runners=num_env_runners,
        evaluation_duration=40 * num_env_runners,
        evaluation_duration_unit="timesteps",
        evaluation_parallel_to_training=parallel,
    )


def reset_timeout_s(mode: str) -> float:
    """Return the seconds that a reset may take; each env of an async vector env starts a process and imports."""
    return 20.0 if mode == "async" else 3.0


class Notices(logging.Handler):
    """Times of the driver's log lines about runner processes that ended because their environments hang."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "exited with code 72" in text:
            self.at.append(time.monotonic())
        self.texts.append(text)


def caught(directory: Path) -> dict[str, float]:
    """Return the traps that have fired, with their times."""
    return {path.name: float(text) for path in directory.iterdir() if (text := path.read_text())}


async def run_until_noticed(
    config: PPOConfig, directory: Path, num_traps: int, *, kill_broker: bool
) -> Notices:
    """Train until every trap has fired and was noticed, and for one more iteration."""
    notices = Notices()
    logger = logging.getLogger("rlzmq.driver")
    logger.addHandler(notices)
    try:
        async with asyncio.timeout(_STANDSTILL_S), config.build_async() as algo:
            killing = asyncio.create_task(_kill_broker(algo, directory)) if kill_broker else None
            while len(notices.at) < num_traps:
                await algo.train()
            if killing is not None:
                await killing
            await algo.train()
    finally:
        logger.removeHandler(notices)
    return notices


async def _kill_broker(algo: Any, directory: Path) -> None:
    while not caught(directory):  # noqa: ASYNC110 (other processes' files)
        await asyncio.sleep(0.01)
    algo.session.pipeline._broker.handle.send_signal(signal.SIGKILL)


def draw_traps(random_: random.Random, first: bool) -> list[tuple[str, int]]:
    """Draw a trap for a runner, and sometimes one for its replacement's environment."""
    if first:
        return [("step", 1)]
    call = random_.choice(("step", "step", "reset"))
    number = 1 if random_.random() < 1 / 3 else random_.randint(2, 20 if call == "step" else 3)
    traps = [(call, number)]
    if random_.random() < 0.2:
        traps.append(("make again", 1))
    return traps


def judge(mode: str, hung_at: dict[str, float], noticed_at: list[float]) -> list[tuple[str, float]]:
    """Return how many seconds after its time limit each hang was noticed, matched with the nearest notice."""
    expected = {
        name: at + (STEP_TIMEOUT_S if " step " in name else reset_timeout_s(mode))
        for name, at in hung_at.items()
    }
    notices = sorted(noticed_at)
    by_time = sorted(expected.items(), key=lambda item: item[1])
    return [(name, notice - at) for (name, at), notice in zip(by_time, notices, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hangs", type=int, default=100)
    parser.add_argument("--runners", type=int, default=6, help="per run, evaluation runners included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", action="store_true", help="each in its very first step")
    parser.add_argument("--kill-broker", action="store_true")
    arguments = parser.parse_args()
    random_ = random.Random(arguments.seed)
    delays: list[tuple[str, float]] = []
    number = 0
    while len(delays) < arguments.hangs:
        mode = MODES[number % len(MODES)]
        kind = ("training", "evaluation", "parallel evaluation")[number // len(MODES) % 3]
        number += 1
        num_runners = arguments.runners if mode != "async" else 2
        num_evaluating = 0 if kind == "training" else num_runners // 2
        num_training = num_runners - num_evaluating
        indices = [*range(1, num_training + 1), *range(1_000_001, 1_000_001 + num_evaluating)]
        traps = {index: draw_traps(random_, arguments.first) for index in indices}
        num_traps = sum(map(len, traps.values()))
        with tempfile.TemporaryDirectory() as directory:
            config = make_config(mode, Path(directory), traps, num_training)
            if num_evaluating:
                evaluated(config, num_evaluating, parallel=kind != "evaluation")
            start = time.monotonic()
            try:
                notices = asyncio.run(
                    run_until_noticed(config, Path(directory), num_traps, kill_broker=arguments.kill_broker)
                )
            except TimeoutError:
                hung = caught(Path(directory))
                print(f"{mode} {kind}: stands still, {len(hung)} of {num_traps} caught: {sorted(hung)}")
                return 1
            found = judge(mode, caught(Path(directory)), notices.at)
        delays += found
        took_s = time.monotonic() - start
        worst = max(delay for _, delay in found)
        print(f"{mode}, {kind}: {len(found)} hangs in {took_s:.1f} s, at most {worst:.2f} s late", flush=True)
    late = sorted(delay for _, delay in delays)
    in_time = sum(-EARLY_S <= delay <= LATE_S for delay in late)
    print(
        f"{in_time} of {len(late)} hangs noticed in time; after the limit: p50 {late[len(late) // 2]:.2f} s, "
        f"p99 {late[int(0.99 * (len(late) - 1))]:.2f} s, at most {late[-1]:.2f} s, at least {late[0]:.2f} s"
    )
    return 0 if in_time == len(late) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
