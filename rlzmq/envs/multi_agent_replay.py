"""Recording and replaying the actions of multi-agent environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.tree import tree_stack, tree_unstack
from rlzmq.core.typed_values import decode, encode
from rlzmq.envs.env_state import MAX_REPLAYED_STEPS, Replay, saved_state, state_digest
from rlzmq.envs.rng_state import get_random_states, set_random_states

__all__ = ["MultiAgentHistory", "MultiAgentReplay", "multi_agent_env_state"]

AgentDict = dict[Any, Any]

# As in `StepHistory`, but longer, since finding all generators of an environment takes longer.
_STEPS_BETWEEN_BEGINS = 1_024


class MultiAgentHistory:
    """An earlier reset of one environment, and the resets and actions since.

    Attributes:
        seed: Seed passed to the reset, or None.
        random: The states of the environment's random number generators before it, or None if unknown.
        episode_seed: Seed passed to the reset of the current episode.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.random: dict[str, Any] | None = None
        self.episode_seed: int | None = None
        # Actions by agent id of each step since the reset, None for each further reset.
        self._entries: list[AgentDict | None] = []
        self._episode_at = 0
        self._is_known = False

    @property
    def episode_actions(self) -> list[AgentDict]:
        """Actions of the current episode; only the last steps of very long episodes."""
        return [actions for actions in self._entries[self._episode_at :] if actions is not None]

    @property
    def is_known(self) -> bool:
        """Whether it is complete, and short enough to be replayed."""
        return self._is_known and len(self._entries) <= MAX_REPLAYED_STEPS

    def record_reset(self, env: Any, seed: int | None, *, is_known: bool = True) -> None:
        """Record a reset that is about to happen; `is_known` is False if it cannot be repeated."""
        if is_known and self._is_known and seed is None and len(self._entries) < _STEPS_BETWEEN_BEGINS:
            self._entries.append(None)
        else:
            self.seed, self.random, self._entries = seed, get_random_states(env), []
            self._is_known = is_known
        self.episode_seed, self._episode_at = seed, len(self._entries)

    def record_step(self, actions: AgentDict) -> None:
        """Record the actions of a step that is about to happen."""
        entries = self._entries
        entries.append(actions)
        if len(entries) > 2 * MAX_REPLAYED_STEPS:
            del entries[:MAX_REPLAYED_STEPS]
            self._episode_at = max(0, self._episode_at - MAX_REPLAYED_STEPS)
            self._is_known = False

    def replay(self, env: Any) -> Iterator[tuple[AgentDict, bool]]:
        """Replay in a new environment: yield (observations, whether the episode is over) of each step."""
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
        """Return the history as plain values and arrays.

        Raises:
            NotPlainError: If actions have other types.
            ValueError: If an agent's actions that differ in form.
        """
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
            # Indices of the agents that acted, step after step; number of them in each step, -1 for a reset.
            "order": np.array(order, np.int32),
            "num_acted": np.array([-1 if e is None else len(e) for e in self._entries], np.int32),
            "actions": [encode(tree_stack(actions), "actions") for actions in by_agent.values()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MultiAgentHistory:
        """Return the history that `get_state` was called on."""
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


class MultiAgentReplay(Replay):
    """Restores multi-agent environments' states."""

    def _history(self, saved: Mapping[str, Any]) -> MultiAgentHistory | None:
        return MultiAgentHistory.from_state(saved["history"]) if "history" in saved else None

    def _steps(self, env: Any, history: MultiAgentHistory) -> Iterator[tuple[Any, bool]]:
        return history.replay(env)

    def _random(self, env: Any) -> Any:
        return get_random_states(env)

    def _set_random(self, env: Any, state: Any) -> None:
        set_random_states(env, state)


def multi_agent_env_state(
    env: Any, observations: AgentDict, needs_reset: bool, history: MultiAgentHistory, *, is_new: bool
) -> dict[str, Any]:
    """Return a multi-agent environment's state within its episode; see `env_state.env_state`."""
    own = None if is_new else saved_state(env)
    saved: dict[str, Any] = {"random": get_random_states(env), **(own or {})}
    if own is not None:
        return {"kind": "reset" if needs_reset else "own", **saved}
    try:
        known = history.get_state() if history.is_known else None
    except (NotPlainError, ValueError):
        known = None
    if known is None:
        return {"kind": "reset" if needs_reset else "unknown", **saved}
    saved["history"] = known
    if needs_reset:  # needed by later states
        return {"kind": "reset", **saved}
    return {
        "kind": "replay",
        **saved,
        "digest": state_digest(observations, saved["random"]),
    }
