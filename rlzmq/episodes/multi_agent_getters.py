"""MultiAgentGetters: access to a MultiAgentEpisode by env steps or by agent steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.episodes.agent_timelines import AgentTrack, Timeline
from rlzmq.episodes.episode_columns import UnknownColumnError, located
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer, index_list, resolve, resolve_int
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["MultiAgentGetters"]

# A positive index beyond any buffer's end: get(_NOWHERE, fill=...) returns the buffer's filler.
_NOWHERE = 1 << 62
_MISSING: Any = object()


class _Column:
    """One agent's data of one kind: its buffer, followed by the hanging step's value.

    Attributes:
        buffer: The agent episode's column; None if it has no such column yet.
        hanging: Value of the step that waits for its outcome, or `_MISSING`.
    """

    __slots__ = ("buffer", "hanging", "hot", "num_raw")

    def __init__(self, buffer: Any, hanging: object, hot: bool) -> None:
        self.buffer = buffer
        self.hanging = hanging
        self.hot = hot
        self.num_raw = 0 if buffer is None else buffer.len_incl_lookback()

    def has(self, k: int | None) -> bool:
        """Return whether there is a k-th value, including the lookback part."""
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

    def filler(self, fill: object) -> Any:
        return fill if self.buffer is None else self.buffer.get(_NOWHERE, fill=fill, **self._options())

    def several(self, ks: Sequence[int | None], fill: object) -> Any:
        """Return the values at all `ks`, with fillers (if wanted) in place of missing ones."""
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
            return tree_stack(items, objects=True)
        return items

    def by_agent_steps(self, indices: object, neg_index_as_lookback: bool, fill: object) -> Any:
        """Return the agent episode's items, with the hanging value as the last one unless ``indices`` is None."""
        buffer = self.buffer
        if indices is not None and self.hanging is not _MISSING:
            if type(indices) is int:
                lookback = 0 if buffer is None else buffer.lookback
                k = resolve_int(indices, lookback, self.num_raw + 1, neg_index_as_lookback)
                if k >= 0 and self.has(k):  # avoids a copy of all the others
                    return self.at(k)
            if buffer is None:
                buffer = InfiniteLookbackBuffer([self.hanging])
            else:
                buffer = buffer + [self.hanging]  # noqa: RUF005 - not a list
        if buffer is None:
            return None
        found = buffer.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill, **self._options())
        several = indices is None or isinstance(indices, slice) or index_list(indices) is not None
        return None if several and isinstance(found, list) and not found else found


class MultiAgentGetters:
    """Mixin with the getters and setters of `MultiAgentEpisode`."""

    agent_episodes: dict[Any, SingleAgentEpisode]
    _timeline: Timeline

    if TYPE_CHECKING:

        def _where(self) -> str: ...

    def get_observations(
        self,
        indices: object = None,
        agent_ids: object = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Return the observations by agent.

        Args:
            indices: None for the whole chunk (without lookback); an int, a list of ints or a slice. 0 is the
                observation at the chunk's start, -1 the latest one.
            agent_ids: One agent id or a collection of them; None: all. Unknown ids are ignored.
            env_steps: Whether `indices` count env steps; otherwise they count each agent's own steps.
            neg_index_as_lookback: Whether negative indices count backwards from the chunk's start.
            fill: Value for all elements of observations that an agent does not have at a step; every agent is then
                present at every step.
            one_hot_discrete: Whether to return Discrete and MultiDiscrete values one-hot encoded.
            return_list: Whether to return a list with one dict per env step instead.

        Returns:
            ``{agent_id: item}`` for an int. Otherwise ``{agent_id: items}``, with a list per agent (or arrays
            ``[num_items, ...]`` after `to_numpy`) of the steps at which it has data; agents without data are left out
            (by agent steps only while they are lists). With `return_list`: ``[{agent_id: item}, …]``, one dict per
            env step.

        Raises:
            IndexError: An int, or an element of a list, refers to no step, and there is no `fill`.
            ValueError: ``return_list=True`` is combined with ``env_steps=False``.
        """
        return self._get(
            "observations", lambda sae, track: _Column(sae.observations, _MISSING, one_hot_discrete),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list, includes_last=True,
        )  # fmt: skip

    def get_infos(
        self,
        indices: object = None,
        agent_ids: object = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        return_list: bool = False,
    ) -> Any:
        """Return info dicts by agent. Arguments and results are those of `get_observations`."""
        return self._get(
            "infos", lambda sae, track: _Column(sae.infos, _MISSING, False),
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list, includes_last=True,
        )  # fmt: skip

    def get_actions(
        self,
        indices: object = None,
        agent_ids: object = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Return the actions by agent. An action belongs to the step of the observation that it answers.

        Hanging actions (without an outcome yet) are included, except by agent steps with ``indices=None``. Arguments
        and results are those of `get_observations`; index -1 is the latest step.
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
        indices: object = None,
        agent_ids: object = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        return_list: bool = False,
    ) -> Any:
        """Return the rewards by agent. A step's reward belongs to the same step as its action.

        It is the sum of all rewards until the agent's next observation; for a hanging action, the sum so far.
        Arguments and results are those of `get_actions`.
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
        indices: object = None,
        agent_ids: object = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        return_list: bool = False,
    ) -> Any:
        """Return one extra model output (e.g. ``"action_logp"``) by agent, or all of them.

        Args:
            key: The output's name; None for all outputs: the result is then ``{agent_id: {key: items}}``, or with
                `return_list` ``[{agent_id: {key: item}}, …]``.
            indices, agent_ids, env_steps, neg_index_as_lookback, fill, return_list: See `get_actions`.

        Raises:
            KeyError: There are such agents, but none has an output of this name.
        """
        chosen = self._chosen_agents(agent_ids)
        if not chosen:
            return [] if return_list else {}
        keys: dict[str, None] = {}
        for agent_id in chosen:
            pending = self._timeline.tracks[agent_id].pending
            keys.update(dict.fromkeys(self.agent_episodes[agent_id].extra_model_outputs))
            keys.update(dict.fromkeys(pending.extra_model_outputs if pending else ()))
        if key is not None and key not in keys:
            raise UnknownColumnError(
                f"{self._where()}: no agent has the extra model output {key!r}; known: {sorted(keys)}."
            )

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
        self, *, new_data: Mapping[Any, Any], at_indices: object = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite observations, by agent steps. Their number never changes.

        Args:
            new_data: ``{agent_id: new item or items}``.
            at_indices: Each agent's own steps: None for all of the chunk, an int, a list or a slice.
            neg_index_as_lookback: Whether negative indices count backwards from the agent's first step in this chunk.

        Raises:
            KeyError: An agent is unknown.
            IndexError: There is no such step, or the data have another length.
            ValueError: See the agents' own setters. After an error, no agent's data have changed.
        """
        self._set("observations", new_data, at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_actions(
        self, *, new_data: Mapping[Any, Any], at_indices: object = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite actions of completed steps. Arguments and errors are those of `set_observations`."""
        self._set("actions", new_data, at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: Mapping[Any, Any], at_indices: object = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite rewards of completed steps. Arguments and errors are those of `set_observations`."""
        self._set("rewards", new_data, at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_extra_model_outputs(
        self,
        *,
        key: str,
        new_data: Mapping[Any, Any],
        at_indices: object = None,
        neg_index_as_lookback: bool = False,
    ) -> None:
        """Overwrite an extra model output of completed steps. Arguments and errors are those of `set_observations`."""
        self._set(
            "extra_model_outputs", new_data, at_indices, key=key, neg_index_as_lookback=neg_index_as_lookback
        )

    # -- inside -------------------------------------------------------------------------------------

    def _set(self, what: str, new_data: Mapping[Any, Any], at_indices: object, **options: object) -> None:
        """Set the data of all agents, or of none if one agent's setter raises an error."""
        for agent_id in new_data:
            if agent_id not in self.agent_episodes:
                raise KeyError(
                    f"{self._where()}: no agent {agent_id!r}; known: "
                    f"{sorted(map(repr, self.agent_episodes))}."
                )
        saes = [self.agent_episodes[agent_id] for agent_id in new_data]
        before = [_private(getattr(sae, f"get_{what}")(indices=at_indices, **options)) for sae in saes]
        num_set = 0
        try:
            for sae, data in zip(saes, new_data.values(), strict=True):
                getattr(sae, f"set_{what}")(new_data=data, at_indices=at_indices, **options)
                num_set += 1
        except Exception:
            for sae, data in zip(saes[:num_set], before, strict=False):
                getattr(sae, f"set_{what}")(new_data=data, at_indices=at_indices, **options)
            raise

    def _chosen_agents(self, agent_ids: object) -> list[Any]:
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
        indices: object,
        agent_ids: object,
        env_steps: bool,
        neg_index_as_lookback: bool,
        fill: object,
        return_list: bool,
        *,
        includes_last: bool = False,
    ) -> Any:
        tracks = self._timeline.tracks
        chosen = self._chosen_agents(agent_ids)
        found: dict[Any, Any] = {}
        if not env_steps:
            if return_list:
                raise ValueError(
                    f"{self._where()}, column {what!r}: return_list=True gives one dict per env step, which "
                    "needs env_steps=True; got env_steps=False."
                )
            for agent_id in chosen:
                column = column_of(self.agent_episodes[agent_id], tracks[agent_id])
                try:
                    values = column.by_agent_steps(indices, neg_index_as_lookback, fill)
                except (IndexError, ValueError, TypeError) as error:
                    raise located(error, f"{self._where()}, agent {agent_id!r}", what) from None
                if values is not None:
                    found[agent_id] = values
            return found

        total = self._timeline.lookback + self._timeline.env_t - self._timeline.env_t_started + includes_last
        try:
            is_single, positions = resolve(
                indices, self._timeline.lookback, total, neg_index_as_lookback, filled=fill is not None
            )
        except (IndexError, ValueError, TypeError) as error:
            raise located(error, self._where(), what) from None
        base = self._timeline.env_t_started - self._timeline.lookback
        by_step = return_list or is_single
        listed: list[dict[Any, Any]] = [{} for _ in positions] if by_step else []
        for agent_id in chosen:
            track = tracks[agent_id]
            column = column_of(self.agent_episodes[agent_id], track)
            ks = _observations_at(track.obs_env_ts, base, positions, with_gaps=by_step or fill is not None)
            try:
                if by_step:
                    for step, k in zip(listed, ks, strict=True):
                        if k is not None and column.has(k):
                            step[agent_id] = column.at(k)
                        elif fill is not None:
                            step[agent_id] = column.filler(fill)
                    continue
                values = column.several(ks, fill)
                if values is not None:
                    found[agent_id] = values
            except (IndexError, ValueError, TypeError) as error:
                raise located(error, f"{self._where()}, agent {agent_id!r}", what) from None
        if return_list:
            return listed
        return listed[0] if is_single else found


def _private(data: object) -> object:
    """Return a getter's result with copied arrays, so that later writes to the column do not change it."""
    return tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, data)


def _observations_at(
    obs_env_ts: list[int], base: int, positions: Sequence[int | None], *, with_gaps: bool
) -> Sequence[int | None]:
    """Return an agent's observations at env steps, relative to `base`; `with_gaps`: None where there is none."""
    if not with_gaps and isinstance(positions, range) and positions.step == 1:
        begin = bisect_left(obs_env_ts, base + positions.start)
        return range(begin, bisect_left(obs_env_ts, base + positions.stop, begin))
    ks: list[int | None] = []
    for position in positions:
        if position is not None:
            k = bisect_left(obs_env_ts, base + position)
            ks.append(k if k < len(obs_env_ts) and obs_env_ts[k] == base + position else None)
        else:
            ks.append(None)
    return ks


def _by_agent(by_key: Mapping[str, Mapping[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """Turn ``{key: {agent: value}}`` into ``{agent: {key: value}}``."""
    found: dict[Any, dict[str, Any]] = {}
    for name, values in by_key.items():
        for agent_id, value in values.items():
            found.setdefault(agent_id, {})[name] = value
    return found
