"""Recording and replaying the actions of multi-agent environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.plain import decode, encode, from_plain, to_plain
from rlzmq.core.tree import tree_stack, tree_unstack
from rlzmq.envs.env_state import MAX_REPLAYED_STEPS, History
from rlzmq.envs.rng_state import get_random_states, set_random_states

__all__ = ["MultiAgentHistory"]

AgentDict = dict[Any, Any]

# Longer than in `StepHistory`, since finding all generators of an environment takes longer.
_STEPS_BETWEEN_BEGINS = 1_024


class MultiAgentHistory(History):
    """An earlier reset of one environment, and the resets and actions since then.

    Attributes:
        seed, random: See `History`.
        episode_seed: Seed passed to the reset of the current episode.
    """

    @staticmethod
    def get_random(env: Any) -> dict[str, Any]:
        """Return the random states of an environment and its agents' spaces."""
        return get_random_states(env)

    @staticmethod
    def set_random(env: Any, state: Mapping[str, Any]) -> None:
        """Set random states from `get_random`."""
        set_random_states(env, state)

    def __init__(self) -> None:
        self.seed: int | None = None
        self.random: dict[str, Any] | None = None
        self.episode_seed: int | None = None
        # Per step since the reset: the actions by agent id; None for a further reset.
        self._entries: list[AgentDict | None] = []
        self._episode_at = 0
        self._is_known = False

    @property
    def episode_actions(self) -> list[AgentDict]:
        """Actions of the current episode; only the last steps of very long episodes."""
        return [actions for actions in self._entries[self._episode_at :] if actions is not None]

    def if_known(self) -> MultiAgentHistory | None:
        """Return this history if it is complete and short enough to be replayed, else None."""
        return self if self._is_known and len(self._entries) <= MAX_REPLAYED_STEPS else None

    def record_reset(self, env: Any, seed: int | None, *, is_known: bool = True) -> None:
        """Record the next reset; `is_known` is False if it cannot be repeated."""
        if is_known and self._is_known and seed is None and len(self._entries) < _STEPS_BETWEEN_BEGINS:
            self._entries.append(None)
        else:
            self.seed, self.random, self._entries = seed, get_random_states(env), []
            self._is_known = is_known
        self.episode_seed, self._episode_at = seed, len(self._entries)

    def record_step(self, actions: AgentDict) -> None:
        """Record the actions of the next step."""
        entries = self._entries
        entries.append(actions)
        if len(entries) > 2 * MAX_REPLAYED_STEPS:
            del entries[:MAX_REPLAYED_STEPS]
            self._episode_at = max(0, self._episode_at - MAX_REPLAYED_STEPS)
            self._is_known = False

    def replay(self, env: Any) -> Iterator[tuple[AgentDict, bool]]:
        observations, _ = env.reset(seed=self.seed)
        yield observations, False
        for actions in self._entries:
            if actions is None:
                observations, _ = env.reset()
                yield observations, False
            else:
                observations, _, terminateds, truncateds, _ = env.step(actions)
                yield observations, bool(terminateds.get("__all__") or truncateds.get("__all__"))

    def get_state(self) -> dict[str, Any]:
        by_agent: dict[Any, list[Any]] = {}
        order: list[int] = []
        numbers: dict[Any, int] = {}
        for entry in self._entries:
            for agent_id, action in (entry or {}).items():
                order.append(numbers.setdefault(agent_id, len(numbers)))
                by_agent.setdefault(agent_id, []).append(action)
        return {
            "seed": self.seed,
            "episode_seed": self.episode_seed,
            "episode_at": self._episode_at,
            "random": self.random,
            "agents": [to_plain(agent_id) for agent_id in numbers],
            # Indices of the agents that acted, concatenated over the steps; the number of agents per step, -1 for a
            # reset.
            "order": np.array(order, np.int32),
            "num_acted": np.array([-1 if e is None else len(e) for e in self._entries], np.int32),
            "actions": [encode(tree_stack(actions), "actions") for actions in by_agent.values()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MultiAgentHistory:
        history = cls()
        history.seed, history.episode_seed, history.random = (
            state["seed"],
            state["episode_seed"],
            state["random"],
        )
        history._episode_at = int(state["episode_at"])
        agent_ids = [from_plain(agent_id) for agent_id in state["agents"]]
        rows = [iter(tree_unstack(decode(actions))) for actions in state["actions"]]
        order = iter(np.asarray(state["order"]).tolist())
        for num in np.asarray(state["num_acted"]).tolist():
            acted = [next(order) for _ in range(num)]
            history._entries.append(None if num < 0 else {agent_ids[n]: next(rows[n]) for n in acted})
        history._is_known = True
        return history
