"""Digests of all weights after 20 updates, serial and 1 runner × 1 learner: four PPO runs, APPO, DQN, SAC and BC.

    python scripts/digests.py                # a line per case; fails if serial and distributed weights differ
    python scripts/digests.py --only lstm

Two checkouts that print the same lines compute the same bits, so a redraw of the code has changed nothing that is
trained. The digests depend on torch's version and on the CPU.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

from rlzmq import (
    AlgorithmConfig,
    APPOConfig,
    BCConfig,
    DQNConfig,
    MeanStdFilter,
    PPOConfig,
    SACConfig,
)
from rlzmq.envs.examples import MultiAgentCartPole

NUM_UPDATES = 20
LSTM = {"fcnet_hiddens": [16], "use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8}


def make_filter(env: Any = None, spaces: Any = None, device: Any = None) -> MeanStdFilter:
    return MeanStdFilter()


def map_agent(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    return f"p{agent_id % 2}"


def config_of(case: str) -> AlgorithmConfig:
    """Return the config of a case, but for its processes."""
    if case in OTHERS:
        one_update = {"min_time_s_per_iteration": 0, "min_sample_timesteps_per_iteration": 0}
        return OTHERS[case]().debugging(seed=7).reporting(**one_update)
    config = PPOConfig().environment("CartPole-v1").debugging(seed=7)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2, lr=1e-3)
    config.rl_module(model_config={"fcnet_hiddens": [32, 32]} if case != "lstm" else LSTM)
    if case == "filter":
        config.env_runners(env_to_module_connector=make_filter)
    if case == "two modules":
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=map_agent)
    return config


def appo() -> AlgorithmConfig:
    config = APPOConfig().environment("CartPole-v1").rl_module(model_config=SMALL)
    return config.training(staleness=0, train_batch_size_per_learner=256, lr=1e-3)


def replayed(config: AlgorithmConfig, env: str) -> AlgorithmConfig:
    """Let a config with a replay buffer train one batch per env step, after a short warm-up."""
    config.environment(env).rl_module(model_config=SMALL).env_runners(rollout_fragment_length=8)
    return config.training(
        train_batch_size_per_learner=32,
        training_intensity=8.0,
        num_steps_sampled_before_learning_starts=64,
    )


def offline() -> AlgorithmConfig:
    config = BCConfig().environment("CartPole-v1").rl_module(model_config=SMALL)
    return config.offline_data(input_=[recorded()]).training(train_batch_size_per_learner=64, lr=1e-3)


@functools.cache
def recorded() -> str:
    """Return a directory, which is removed at the end, of episodes that an untrained PPO has played."""
    directory = tempfile.mkdtemp(prefix="digests-")
    atexit.register(shutil.rmtree, directory)
    config = config_of("mlp").env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    with config.offline_data(output=directory).build() as algo:
        algo.train()
    return directory


SMALL = {"fcnet_hiddens": [32, 32]}
OTHERS = {
    "appo": appo,
    "dqn": lambda: replayed(DQNConfig(), "CartPole-v1"),
    "sac": lambda: replayed(SACConfig(), "Pendulum-v1"),
    "bc": offline,
}
CASES = ("mlp", "lstm", "filter", "two modules", *OTHERS)


def digest(case: str, num_processes: int) -> str:
    """Return the digest after a run with so many runners and learners; 0: everything in this process."""
    config = config_of(case).learners(num_learners=num_processes)
    if case != "bc":
        config.env_runners(num_env_runners=num_processes, num_envs_per_env_runner=4)
    with config.build() as algo:
        for _ in range(NUM_UPDATES):
            algo.train()
        state = algo.learner_group.get_weights()
    found = hashlib.sha256()
    for module_id, weights in sorted(state.items()):
        for name, value in sorted(weights.items()):
            found.update(f"{module_id}/{name}".encode() + np.asarray(value).tobytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES)
    only = parser.parse_args().only
    num_differing = 0
    for case in CASES if only is None else (only,):
        serial, distributed = digest(case, 0), digest(case, 1)
        num_differing += serial != distributed
        print(f"{case:12} {serial}" + ("" if serial == distributed else f"  distributed: {distributed}"))
    return min(1, num_differing)


if __name__ == "__main__":
    sys.exit(main())
