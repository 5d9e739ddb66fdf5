"""An env of chosen speed and size, importable by processes of their own."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

__all__ = ["MadeEnv"]


class MadeEnv(gymnasium.Env[Any, Any]):
    """Observations of `size` numbers; steps take `step_s`, those of the second runner `second_step_s`.

    Each step is a byte more in the file `steps_path`, where there is one.
    """

    def __init__(self, config: Any) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (config.get("size", 2),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._observation = np.zeros(self.observation_space.shape, np.float32)
        own = config.get("second_step_s") if config.worker_index == 2 else None
        self._step_s = own or config.get("step_s", 0.0)
        self._num_steps, self._steps_path = 0, config.get("steps_path")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self._num_steps = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._step_s:
            time.sleep(self._step_s)
        self._num_steps += 1
        if self._steps_path:
            with open(self._steps_path, "ab") as file:
                file.write(b".")
        return self._observation, 1.0, False, self._num_steps == 30, {}
