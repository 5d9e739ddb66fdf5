"""The env runner interface used by samplers of single-agent episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array

from rlzmq.core.tree import tree_map
from rlzmq.runners.module_step import ModuleStep
from rlzmq.runners.sampling_runner import SamplingRunner
from rlzmq.runners.vector_io import VectorStepper

__all__ = ["VectorEnvRunner"]


class VectorEnvRunner(SamplingRunner):
    """A runner of one vector env and one module.

    Attributes:
        stepper: Steps the vector env.
        module_step: The module's forward pass on a vector step.
    """

    stepper: VectorStepper
    module_step: ModuleStep

    def sample_random_actions(self) -> Any:
        """Return one random action per environment, from the seeded action space."""
        return self.env.action_space.sample()

    def example_actions(self) -> Any:
        """Return zeros of the shape and dtype in which actions are stored, leaves ``[num_envs, ...]``."""
        zeros = create_empty_array(self.env.single_action_space, n=self.num_envs, fn=np.zeros)

        def as_stored(leaf: Any) -> Any:
            return leaf.astype(np.float32) if np.issubdtype(leaf.dtype, np.floating) else leaf

        return tree_map(as_stored, zeros)
