"""Progress of a multi-agent sampling call."""

from __future__ import annotations

from rlzmq.runners.request import SampleRequest

__all__ = ["StepCount"]


class StepCount:
    """Counts of one sampling call.

    Args:
        request: The request.
        counts_agent_steps: Whether ``num_timesteps`` are agent steps (``config.count_steps_by``).

    Attributes:
        num_vector_steps, num_env_steps, num_agent_steps: Made so far; the agents' steps are counted only
            where they matter.
    """

    def __init__(self, request: SampleRequest, counts_agent_steps: bool) -> None:
        self._request = request
        self.counts_agent_steps = counts_agent_steps
        self.num_vector_steps = 0
        self.num_env_steps = 0
        self.num_agent_steps = 0

    def is_fulfilled(self, num_ends: int) -> bool:
        """Return whether the request is fulfilled after `num_ends` episodes."""
        request = self._request
        if request.num_episodes is not None:
            return num_ends >= request.num_episodes
        if request.num_timesteps is not None:
            made = self.num_agent_steps if self.counts_agent_steps else self.num_env_steps
            return made >= request.num_timesteps
        if self.num_vector_steps and request.is_over(self.num_env_steps):
            return True
        return self.num_vector_steps >= (request.num_vector_steps or 0)
