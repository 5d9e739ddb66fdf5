"""How a multi-agent environment came to where it is, and the way back there after a restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.tree import tree_stack, tree_unstack
from rlzmq.core.typed_values import freeze, thaw
from rlzmq.envs.env_state import MAX_REPLAYED_STEPS, Replay, own_state, position_digest
from rlzmq.envs.rng_state import get_random_states, set_random_states

__all__ = ["AgentsReplay", "AgentsWay", "agents_position"]

AgentDict = dict[Any, Any]

# As in `StepHistory`; to look for all generators of an environment takes longer than to look at one.
_STEPS_BETWEEN_BEGINS = 1_024


class AgentsWay:
    """An earlier reset of one environment, and what followed.

    Attributes:
        seed: That the reset was given, or None.
        random: The states of the environment's random number generators before it; None: not known.
        episode_seed: What the reset of the current episode was given.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.random: dict[str, Any] | None = None
        self.episode_seed: int | None = None
        # Since the reset: actions by agent id of each step, None for each further reset.
        self._entries: list[AgentDict | None] = []
        self._episode_at = 0
        self._is_known = False

    @property
    def episode_actions(self) -> list[AgentDict]:
        """What the environment was given in its current episode; the last steps only of very long ones."""
        return [actions for actions in self._entries[self._episode_at :] if actions is not None]

    @property
    def is_known(self) -> bool:
        """Whether it is whole, and short enough to go it again."""
        return self._is_known and len(self._entries) <= MAX_REPLAYED_STEPS

    def note_reset(self, env: Any, seed: int | None, *, is_known: bool = True) -> None:
        """The environment is about to be reset; not `is_known`: in a way that cannot be repeated."""
        if is_known and self._is_known and seed is None and len(self._entries) < _STEPS_BETWEEN_BEGINS:
            self._entries.append(None)
        else:
            self.seed, self.random, self._entries = seed, get_random_states(env), []
            self._is_known = is_known
        self.episode_seed, self._episode_at = seed, len(self._entries)

    def note_step(self, actions: AgentDict) -> None:
        """The environment is about to be stepped."""
        entries = self._entries
        entries.append(actions)
        if len(entries) > 2 * MAX_REPLAYED_STEPS:
            del entries[:MAX_REPLAYED_STEPS]
            self._episode_at = max(0, self._episode_at - MAX_REPLAYED_STEPS)
            self._is_known = False

    def go(self, env: Any) -> Iterator[tuple[AgentDict, bool]]:
        """Takes a new environment the same way: (observations, whether the episode is over) of each step."""
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
        """As plain values and arrays.

        Raises:
            NotPlainError: Actions of other types.
            ValueError: An agent's actions that differ in form.
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
            # Who acted: numbers of agents, one after the other; how many in each step, -1 for a reset.
            "order": np.array(order, np.int32),
            "num_acted": np.array([-1 if e is None else len(e) for e in self._entries], np.int32),
            "actions": [freeze(tree_stack(actions), "actions") for actions in by_agent.values()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AgentsWay:
        """What `get_state` was called on."""
        way = cls()
        way.seed, way.episode_seed, way.random = state["seed"], state["episode_seed"], state["random"]
        way._episode_at = int(state["episode_at"])
        agent_ids = [from_plain(agent_id) for agent_id in state["agents"]]
        rows = [iter(tree_unstack(thaw(actions))) for actions in state["actions"]]
        order = iter(np.asarray(state["order"]).tolist())
        for num in np.asarray(state["num_acted"]).tolist():
            acted = [next(order) for _ in range(num)]
            way._entries.append(None if num < 0 else {agent_ids[n]: next(rows[n]) for n in acted})
        way._is_known = True
        return way


class AgentsReplay(Replay):
    """Brings multi-agent environments back to their positions."""

    def _way(self, position: Mapping[str, Any]) -> AgentsWay | None:
        return AgentsWay.from_state(position["way"]) if "way" in position else None

    def _steps(self, env: Any, way: AgentsWay) -> Iterator[tuple[Any, bool]]:
        return way.go(env)

    def _random(self, env: Any) -> Any:
        return get_random_states(env)

    def _set_random(self, env: Any, state: Any) -> None:
        set_random_states(env, state)


def agents_position(
    env: Any, observations: AgentDict, needs_reset: bool, way: AgentsWay, *, is_new: bool
) -> dict[str, Any]:
    """Where a multi-agent environment is, as plain values and arrays; see `positions.env_position`."""
    own = None if is_new else own_state(env)
    position: dict[str, Any] = {"random": get_random_states(env), **(own or {})}
    if own is not None:
        return {"kind": "reset" if needs_reset else "own", **position}
    try:
        known = way.get_state() if way.is_known else None
    except (NotPlainError, ValueError):
        known = None
    if known is None:
        return {"kind": "reset" if needs_reset else "unknown", **position}
    position["way"] = known
    if needs_reset:  # of use to later positions
        return {"kind": "reset", **position}
    return {
        "kind": "replay",
        **position,
        "digest": position_digest(observations, position["random"]),
    }
