"""docs/examples/ppo_from_parts.py computes what PPOConfig's algorithm does, bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/ppo_from_parts.py"


def test_ppo_from_its_parts_is_ppo() -> None:
    example = runpy.run_path(str(EXAMPLE))
    mine = example["PPO"](example["make_config"](seed=3))
    with example["make_config"](seed=3).build() as algo:
        for _ in range(2):
            ours, result = mine.train(), algo.train()
            assert mine.num_env_steps == result["num_env_steps_sampled_lifetime"]
            wanted = result["learners"]["default_policy"]
            for name in ("policy_loss", "vf_loss", "entropy", "gradients_default_optimizer_global_norm"):
                assert ours[name] == wanted[name], name
        weights = algo.learner_group.get_weights()["default_policy"]
    for name, value in mine.learner.get_state("rl_module")["rl_module"]["default_policy"].items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)
    mine.runner.stop()
