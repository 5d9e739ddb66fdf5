"""CurrentPolicies: Policies with the current weights of a run."""

from __future__ import annotations

from typing import Any

from rlzmq.algorithms.policy import Policy
from rlzmq.driver.session import Session

__all__ = ["CurrentPolicies"]


class CurrentPolicies:
    """Factory of Policies with a run's current weights and connector states; caches those of `compute_action`.

    Args:
        session: The run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept: dict[Any, Policy] = {}
        self._kept_since = -1  # number of weight changes at their creation

    async def make(self, *, module_id: str | None, agent_id: Any) -> Policy:
        """See AsyncAlgorithm.get_policy."""
        session = self._session
        config = session.config
        spaces = {"__env_single__": session.spaces}
        modules = config.get_multi_rl_module_spec(spaces=spaces, inference_only=True).build(seed=config.seed)
        modules.set_state(await session.learner_group.get_weights())
        return Policy(
            config,
            modules,
            spaces=session.spaces,
            connector_state=session.get_connector_state(),
            module_id=module_id,
            agent_id=agent_id,
            num_env_steps_sampled=session.accounting.sampled,
        )

    async def compute_action(
        self,
        observation: Any,
        *,
        explore: bool,
        reward: Any,
        begins_episode: bool,
        module_id: str | None,
        agent_id: Any,
    ) -> Any:
        """See AsyncAlgorithm.compute_action."""
        num_changes = self._session.num_weight_changes
        if self._kept_since != num_changes:
            self._kept, self._kept_since = {}, num_changes
        key = module_id, agent_id
        policy = self._kept.get(key)
        if policy is None:
            policy = self._kept[key] = await self.make(module_id=module_id, agent_id=agent_id)
        if begins_episode:
            policy.reset()
        return policy.compute_action(observation, explore=explore, reward=reward)
