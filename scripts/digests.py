"""Digests of all weights after 20 PPO updates: MLP, LSTM, MeanStdFilter, two modules; serial and 1 runner × 1 learner.

    python scripts/digests.py                # a line per case; fails if serial and distributed weights differ
    python scripts/digests.py --only lstm

Two checkouts that print the same lines compute the same bits, so a redraw of the code has changed nothing that is
trained. The digests depend on torch's version and on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import numpy as np

from rlzmq import MeanStdFilter, PPOConfig
from rlzmq.envs.examples import MultiAgentCartPole

NUM_UPDATES = 20
LSTM = {"fcnet_hiddens": [16], "use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8}


def make_filter(env: Any = None, spaces: Any = None, device: Any = None) -> MeanStdFilter:
    return MeanStdFilter()


def map_agent(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    return f"p{agent_id % 2}"


def config_of(case: str) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=7)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2, lr=1e-3)
    config.rl_module(model_config={"fcnet_hiddens": [32, 32]} if case != "lstm" else LSTM)
    if case == "filter":
        config.env_runners(env_to_module_connector=make_filter)
    if case == "two modules":
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=map_agent)
    return config


CASES = ("mlp", "lstm", "filter", "two modules")


def digest(case: str, num_processes: int) -> str:
    """Return the digest after a run with so many runners and learners; 0: everything in this process."""
    config = config_of(case).env_runners(num_env_runners=num_processes, num_envs_per_env_runner=4)
    with config.learners(num_learners=num_processes).build() as algo:
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
