"""Reading a MultiAgentEpisode by env steps or by agent steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlzmq.core.tree import tree_stack
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.lookback_index import index_list, resolve_int, resolve_slice

if TYPE_CHECKING:
    from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
    from rlzmq.episodes.timeline import AgentTrack, Timeline

__all__ = ["MultiAgentGetters"]

# A positive index that no buffer reaches: what a buffer answers to it, with fill=, is its filler.
_NOWHERE = 1 << 62
_MISSING: Any = object()


class _Column:
    """One agent's data of one kind: its buffer, and the hanging step's value behind it.

    Attributes:
        buffer: The agent episode's column, or None when it has none of this name yet.
        hanging: Value of the step that waits for its outcome, or `_MISSING`.
    """

    __slots__ = ("buffer", "hanging", "hot", "num_raw")

    def __init__(self, buffer: Any, hanging: Any, hot: bool) -> None:
        self.buffer = buffer
        self.hanging = hanging
        self.hot = hot
        self.num_raw = 0 if buffer is None else buffer.len_incl_lookback()

    def has(self, k: int | None) -> bool:
        """Whether there is a k-th value, the lookback part included."""
        return k is not None and (k < self.num_raw or (k == self.num_raw and self.hanging is not _MISSING))

    def _options(self) -> dict[str, Any]:
        return {"one_hot_discrete": True} if self.hot else {}

    def at(self, k: int) -> Any:
        if k < self.num_raw:
            return self.buffer.get(k - self.buffer.lookback, neg_index_as_lookback=True, **self._options())
        if not self.hot:
            return self.hanging
        space = None if self.buffer is None else self.buffer.space
        return InfiniteLookbackBuffer([self.hanging], 0, space).get(0, one_hot_discrete=True)

    def filler(self, fill: Any) -> Any:
        return fill if self.buffer is None else self.buffer.get(_NOWHERE, fill=fill, **self._options())

    def several(self, ks: list[int | None], fill: Any) -> Any:
        """The values at all `ks`, fillers (if wanted) in place of those that do not exist."""
        wanted = ks if fill is not None else [k for k in ks if self.has(k)]
        if not wanted:
            return None
        known = [k for k in wanted if k is not None and k < self.num_raw]
        if len(known) == len(wanted):
            lookback = self.buffer.lookback
            first, last = known[0], known[-1]
            chosen: Any = [k - lookback for k in known]
            if known == list(range(first, last + 1)):  # a view instead of a copy
                chosen = slice(first - lookback, last + 1 - lookback)
            return self.buffer.get(chosen, neg_index_as_lookback=True, **self._options())
        items = [self.at(k) if k is not None and self.has(k) else self.filler(fill) for k in wanted]
        if self.buffer is not None and self.buffer.finalized and self.num_raw:
            return tree_stack(items)
        return items

    def by_agent_steps(self, indices: Any, neg_index_as_lookback: bool, fill: Any) -> Any:
        """The agent episode's own getter, the hanging value as one item more unless all are asked for."""
        buffer = self.buffer
        if indices is not None and self.hanging is not _MISSING:
            if buffer is None:
                buffer = InfiniteLookbackBuffer([self.hanging])
            else:
                buffer = buffer + [self.hanging]  # noqa: RUF005 - not a list
        if buffer is None:
            return None
        found = buffer.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill, **self._options())
        several = indices is None or isinstance(indices, slice) or index_list(indices) is not None
        return None if several and _is_empty(found) else found


def _is_empty(found: Any) -> bool:
    while isinstance(found, dict | tuple):
        if not found:
            return True
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return len(found) == 0


class MultiAgentGetters:
    """The getters and setters of MultiAgentEpisode (a part of it, of no use alone)."""

    agent_episodes: dict[Any, SingleAgentEpisode]
    _timeline: Timeline

    if TYPE_CHECKING:

        def _where(self) -> str: ...

    def get_observations(
        self,
        indices: Any = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Observations by agent.

        Args:
            indices: None for the whole chunk (no lookback); an int, a list of ints or a slice. 0 is the
                observation that the chunk starts with, -1 the latest.
            agent_ids: One agent id or a collection of them; None for all. Unknown ids are left out.
            env_steps: Whether `indices` count env steps; else each agent's own steps.
            neg_index_as_lookback: Negative indices count backwards from the chunk's start.
            fill: Value for all elements of the observations that an agent does not have at a step; then
                every agent is present at every step.
            one_hot_discrete: Return Discrete and MultiDiscrete values one-hot encoded.
            return_list: Return a list with one dict per env step instead.

        Returns:
            ``{agent_id: item}`` for an int; else ``{agent_id: items}`` with a list per agent (or arrays
            ``[num_items, ...]`` after `to_numpy`) of the steps at which it has data; agents without any
            are left out. With `return_list`: ``[{agent_id: item}, …]``, one dict per env step.

        Raises:
            IndexError: An int or a list's element names no step and there is no `fill`.
            ValueError: ``return_list=True`` together with ``env_steps=False``.
        """
        return self._get(
            "observations", lambda sae, track: _Column(sae.observations, _MISSING, one_hot_discrete),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list, includes_last=True,
        )  # fmt: skip

    def get_infos(
        self,
        indices: Any = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """Info dicts by agent; arguments and returns as `get_observations`."""
        return self._get(
            "infos", lambda sae, track: _Column(sae.infos, _MISSING, False),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list, includes_last=True,
        )  # fmt: skip

    def get_actions(
        self,
        indices: Any = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Actions by agent; an action counts at the step of the observation that it answers.

        Hanging actions (their outcome has not come yet) are included, except by agent steps with
        ``indices=None``. Arguments and returns as `get_observations`; index -1 is the latest step.
        """
        return self._get(
            "actions",
            lambda sae, track: _Column(
                sae.actions, _MISSING if track.pending is None else track.pending.action, one_hot_discrete
            ),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list,
        )  # fmt: skip

    def get_rewards(
        self,
        indices: Any = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """Rewards by agent; a step's reward counts at the step of its action, like the action.

        It is the sum of all that came until the agent's next observation; a hanging action's is the sum
        so far. Arguments and returns as `get_actions`.
        """
        return self._get(
            "rewards",
            lambda sae, track: _Column(
                sae.rewards, _MISSING if track.pending is None else track.reward, False
            ),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list,
        )  # fmt: skip

    def get_extra_model_outputs(
        self,
        key: str | None = None,
        indices: Any = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """One extra model output (e.g. ``"action_logp"``) by agent, or all of them.

        Args:
            key: The output's name; None for all: ``{agent_id: {key: items}}`` then, or with `return_list`
                ``[{agent_id: {key: item}}, …]``.
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list: As in `get_actions`.

        Raises:
            KeyError: No agent has an output of this name.
        """
        chosen = self._chosen_agents(agent_ids)
        keys: dict[str, None] = {}
        for agent_id in chosen:
            pending = self._timeline.tracks[agent_id].pending
            keys.update(dict.fromkeys(self.agent_episodes[agent_id].extra_model_outputs))
            keys.update(dict.fromkeys(pending.extra_model_outputs if pending else ()))
        if key is not None and key not in keys:
            raise KeyError(f"{key!r}: no agent has this extra model output; known: {sorted(keys)}.")

        def one(name: str) -> Any:
            def column(sae: SingleAgentEpisode, track: AgentTrack) -> _Column:
                hanging = _MISSING
                if track.pending is not None:
                    hanging = track.pending.extra_model_outputs.get(name, _MISSING)
                outputs = sae.extra_model_outputs
                return _Column(outputs.get(name), hanging, False)

            return self._get(
                name, column, indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list
            )

        if key is not None:
            return one(key)
        found = {name: one(name) for name in keys}
        if return_list:
            num = len(next(iter(found.values()))) if found else 0
            return [_by_agent({name: steps[i] for name, steps in found.items()}) for i in range(num)]
        return _by_agent(found)

    # -- setters ------------------------------------------------------------------------------------

    def set_observations(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite observations, by agent steps; the number of observations never changes.

        Args:
            new_data: ``{agent_id: new item or items}``.
            at_indices: Which of each agent's own steps: None for all of the chunk, an int, a list, a slice.
            neg_index_as_lookback: Negative indices count backwards from the agent's first in this chunk.

        Raises:
            KeyError: Unknown agent; nothing was changed then.
            IndexError: No such step, or data of another length.
        """
        for sae, data in self._to_set(new_data):
            sae.set_observations(
                new_data=data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback
            )

    def set_actions(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite actions of completed steps; arguments and errors as `set_observations`."""
        for sae, data in self._to_set(new_data):
            sae.set_actions(new_data=data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite rewards of completed steps; arguments and errors as `set_observations`."""
        for sae, data in self._to_set(new_data):
            sae.set_rewards(new_data=data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_extra_model_outputs(
        self,
        *,
        key: str,
        new_data: Mapping[Any, Any],
        at_indices: Any = None,
        neg_index_as_lookback: bool = False,
    ) -> None:
        """Overwrite an extra model output of completed steps; arguments and errors as `set_observations`."""
        for sae, data in self._to_set(new_data):
            sae.set_extra_model_outputs(
                key=key, new_data=data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback
            )

    # -- inside -------------------------------------------------------------------------------------

    def _to_set(self, new_data: Mapping[Any, Any]) -> list[tuple[SingleAgentEpisode, Any]]:
        for agent_id in new_data:
            if agent_id not in self.agent_episodes:
                raise KeyError(
                    f"{self._where()}: no agent {agent_id!r}; known: "
                    f"{sorted(map(repr, self.agent_episodes))}."
                )
        return [(self.agent_episodes[agent_id], data) for agent_id, data in new_data.items()]

    def _chosen_agents(self, agent_ids: Any) -> list[Any]:
        if agent_ids is None:
            return list(self.agent_episodes)
        if isinstance(agent_ids, str) or not isinstance(agent_ids, Collection):
            return [agent_ids] if agent_ids in self.agent_episodes else []
        if isinstance(agent_ids, tuple) and agent_ids in self.agent_episodes:
            return [agent_ids]
        wanted = set(agent_ids)
        return [agent_id for agent_id in self.agent_episodes if agent_id in wanted]

    def _get(
        self,
        what: str,
        column_of: Callable[[SingleAgentEpisode, AgentTrack], _Column],
        indices: Any,
        agent_ids: Any,
        env_steps: bool,
        neg_index_as_lookback: bool,
        fill: Any,
        return_list: bool,
        *,
        includes_last: bool = False,
    ) -> Any:
        tracks = self._timeline.tracks
        chosen = self._chosen_agents(agent_ids)
        if not env_steps:
            if return_list:
                raise ValueError(
                    "return_list=True gives one dict per env step, which needs env_steps=True; got "
                    "env_steps=False."
                )
            found = {}
            for agent_id in chosen:
                column = column_of(self.agent_episodes[agent_id], tracks[agent_id])
                values = column.by_agent_steps(indices, neg_index_as_lookback, fill)
                if values is not None:
                    found[agent_id] = values
            return found

        total = self._timeline.lookback + self._timeline.env_t - self._timeline.env_t_started + includes_last
        is_single, positions = _env_positions(
            indices, self._timeline.lookback, total, neg_index_as_lookback, fill is not None, what
        )
        base = self._timeline.env_t_started - self._timeline.lookback
        env_ts = [None if position is None else base + position for position in positions]
        listed: list[dict[Any, Any]] = [{} for _ in positions]
        found = {}
        for agent_id in chosen:
            track = tracks[agent_id]
            column = column_of(self.agent_episodes[agent_id], track)
            if len(env_ts) == 1 and env_ts[0] is not None and track.obs_env_ts[-1] == env_ts[0]:
                ks: list[int | None] = [len(track.obs_env_ts) - 1]
            else:
                k_of = {env_t: k for k, env_t in enumerate(track.obs_env_ts)}
                ks = [None if env_t is None else k_of.get(env_t) for env_t in env_ts]
            if return_list or is_single:
                for step, k in zip(listed, ks, strict=True):
                    if k is not None and column.has(k):
                        step[agent_id] = column.at(k)
                    elif fill is not None:
                        step[agent_id] = column.filler(fill)
                continue
            values = column.several(ks, fill)
            if values is not None:
                found[agent_id] = values
        if return_list:
            return listed
        return listed[0] if is_single else found


def _env_positions(
    indices: Any, lookback: int, total: int, neg_index_as_lookback: bool, filled: bool, what: str
) -> tuple[bool, list[int | None]]:
    """(whether it is one int, positions into the stored env steps; None where a filler goes)."""
    if indices is None:
        return False, list(range(lookback, total))
    if isinstance(indices, slice):
        span = resolve_slice(indices, lookback, total, neg_index_as_lookback, fill=filled)
        existing = list(range(total))[span.existing]
        return False, [*[None] * span.num_left, *existing, *[None] * span.num_right]
    ints = index_list(indices)
    is_single = ints is None
    if ints is None:
        try:
            ints = [operator.index(indices)]
        except TypeError:
            raise TypeError(
                "expected an index that is None, an int, a list of ints or a slice, got "
                f"{type(indices).__name__} "
                f"{indices!r}."
            ) from None
    positions: list[int | None] = []
    for index in ints:
        position = resolve_int(index, lookback, total, neg_index_as_lookback)
        if 0 <= position < total:
            positions.append(position)
        elif filled:
            positions.append(None)
        else:
            low = -lookback if neg_index_as_lookback else -total
            raise IndexError(
                f"env step {index} of {what} is out of range: expected {low}…{total - lookback - 1} "
                "(lookback "
                f"{lookback}); fill= gives a value for what is not there."
            )
    return is_single, positions


def _by_agent(by_key: Mapping[str, Mapping[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """``{key: {agent: value}}`` turned inside out."""
    found: dict[Any, dict[str, Any]] = {}
    for name, values in by_key.items():
        for agent_id, value in values.items():
            found.setdefault(agent_id, {})[name] = value
    return found
