"""Data that would poison the weights is kept out, counted, put aside, and its runner restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from recovery_runs import check_account, small

from rlzmq.protocol.fragments import decode_fragment, fragment_from_bytes


class Poisonous(gym.Env[Any, Any]):
    """Its reward is NaN once in a while, as long as a file does not exist."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.cured = Path(config["cured"])
        self.t = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        is_bad = self.t % 150 == 0 and not self.cured.exists()
        return np.zeros(2, np.float32), float("nan" if is_bad else 1.0), self.t % 10 == 0, False, {}


async def test_fragments_with_nan_are_put_aside_and_their_runner_is_restarted(tmp_path: Path) -> None:
    cured, quarantine = tmp_path / "cured", tmp_path / "quarantine"
    config = (
        small(1, 2)
        .environment(Poisonous, env_config={"cured": str(cured)})
        .fault_tolerance(quarantine_dir=str(quarantine))
    )
    async with config.build_async() as algo:
        number = 0
        while algo.env_runner_group.num_restarts == 0:
            number += 1
            assert number < 100
            check_account(await algo.train(), number)
        cured.touch()
        result = await algo.train()
        check_account(result, number + 1)
        weights = (await algo.get_module()).get_state()
    assert all(np.isfinite(value).all() for value in weights.values())
    assert result["accounting"]["dropped"]["rejected"] > 0
    reasons = [json.loads(path.read_text())["reason"] for path in quarantine.glob("*.json")]
    assert len(reasons) >= 3
    assert all("'rewards' is not finite" in reason for reason in reasons)
    for path in quarantine.glob("*.fragment"):
        _, arrays, _ = decode_fragment(fragment_from_bytes(path.read_bytes()))
        assert any(array.dtype.kind == "f" and np.isnan(array).any() for array in arrays)
