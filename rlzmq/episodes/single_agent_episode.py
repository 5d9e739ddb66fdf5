"""One agent's episode, or a chunk of it: how it grows, is cut into chunks, sliced and put together."""

from __future__ import annotations

import builtins
import copy
import operator
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.episodes import episode_state
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import REWARD_SPACE, EpisodeColumns, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer, same_items

__all__ = ["SingleAgentEpisode"]


class SingleAgentEpisode(EpisodeColumns):
    """What one agent saw, did and got, one item per time step, with a lookback part in front.

    An episode grows by `add_env_reset` and `add_env_step`. Sampling cuts a long one into chunks (`cut`), all
    with the same ``id_``; a chunk carries the last items of its predecessor as its lookback part, which
    indices can reach but lengths and returns leave out. Data is list-backed while an episode grows and
    array-backed after `to_numpy` (or when it is an item of an `EpisodeBatch`).

    Example:
        >>> episode = SingleAgentEpisode()
        >>> episode.add_env_reset(observation=0)
        >>> episode.add_env_step(1, 10, 0.5)
        >>> episode.add_env_step(2, 11, 0.25, terminated=True)
        >>> len(episode), episode.get_return(), episode.get_observations([-2, -1])
        (2, 0.75, [1, 2])

    Args:
        id_: The episode's id; a new unique one when None.
        observations: Items from the first to the last observation, one more than rewards: a list, or a tree
            of arrays ``[num_items, ...]``.
        observation_space, action_space: Spaces of one item, needed for one-hots.
        infos: As many dicts as observations; empty ones when None.
        actions, rewards: Items of the steps, lists or arrays.
        terminated, truncated: Whether the last step ended the episode.
        extra_model_outputs: Further columns with as many items as rewards, by name.
        t_started: The time step, from the episode's start, of this chunk's first observation (after the
            lookback part).
        len_lookback_buffer: How many of the given steps are lookback. "auto": all of them, so the new chunk
            has length 0. Clipped to the number of rewards.
        agent_id, module_id, multi_agent_episode_id: Set for the episodes inside of a multi-agent episode.

    Attributes:
        t_started: See above.
        t: The time step of the last observation; ``len(episode) == t - t_started``.
        is_terminated, is_truncated: Whether, and how, the episode ended with the last step.
        custom_data: A dict for user code. Chunks cut off get a deep copy.
        initial_state: The module's state before this chunk's first step, when known (stateful modules:
            chunks made by `cut`, `slice` and `EpisodeBatch` know it without any lookback), else None.

    Raises:
        ValueError: When the columns' lengths do not fit together.
    """

    __slots__ = (
        "_duration_s",
        "_last_step_time",
        "agent_id",
        "custom_data",
        "initial_state",
        "is_terminated",
        "is_truncated",
        "module_id",
        "multi_agent_episode_id",
        "t",
        "t_started",
    )

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Any = None,
        observation_space: gym.Space[Any] | None = None,
        infos: Sequence[dict[str, Any]] | InfiniteLookbackBuffer | None = None,
        actions: Any = None,
        action_space: gym.Space[Any] | None = None,
        rewards: Any = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_id: Any = None,
        module_id: str | None = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        self.id_ = id_ if id_ is not None else uuid.uuid4().hex
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.is_terminated = bool(terminated)
        self.is_truncated = bool(truncated)
        self.custom_data: dict[str, Any] = {}
        self.initial_state: Any = None
        self._observation_space = observation_space
        self._action_space = action_space
        self._duration_s = 0.0
        self._last_step_time: float | None = None

        try:
            lookback = self._given_lookback(rewards, len_lookback_buffer)
            self.observations = _buffer(observations, lookback, observation_space)
            self.actions = _buffer(actions, lookback, action_space)
            self.rewards = _buffer(rewards, lookback, REWARD_SPACE)
            self.extra_model_outputs = {
                key: _buffer(values, lookback, None) for key, values in (extra_model_outputs or {}).items()
            }
        except ValueError as error:
            raise ValueError(f"Episode {self.id_!r}: {error}") from None
        self._infos_source = None
        if isinstance(infos, InfiniteLookbackBuffer):
            self._infos = infos
        else:
            # An empty list counts as none given.
            given = list(infos) if infos else [{} for _ in range(self.observations.len_incl_lookback())]
            self._infos = InfosBuffer(given, lookback)
        self.t_started = operator.index(t_started) if t_started is not None else 0
        self.t = self.t_started + len(self.rewards)
        self._check_lengths()

    @staticmethod
    def _given_lookback(rewards: Any, len_lookback_buffer: int | str) -> int:
        if isinstance(rewards, InfiniteLookbackBuffer):
            return rewards.lookback
        num_rewards = 0 if rewards is None else len(rewards)
        if len_lookback_buffer == "auto":
            return num_rewards
        if isinstance(len_lookback_buffer, str):
            raise ValueError(f"len_lookback_buffer: expected an int or 'auto', got {len_lookback_buffer!r}.")
        return min(operator.index(len_lookback_buffer), num_rewards)

    # -- growing --------------------------------------------------------------------------------------

    def add_env_reset(self, observation: Any, infos: dict[str, Any] | None = None) -> None:
        """Add the observation (and infos) that ``env.reset()`` returned.

        Raises:
            RuntimeError: When the episode has an observation already, or is done.
        """
        if self.is_terminated or self.is_truncated or self.observations.len_incl_lookback():
            raise RuntimeError(
                f"Episode {self.id_!r}: expected an empty episode to add an env reset to, got one with "
                f"{self.observations.len_incl_lookback()} observations, terminated={self.is_terminated}, "
                f"truncated={self.is_truncated}. A reset begins a new SingleAgentEpisode."
            )
        self.observations.append(observation)
        self.infos.append(infos if infos is not None else {})
        self._last_step_time = time.perf_counter()

    def add_env_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        infos: dict[str, Any] | None = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step: the action, and what ``env.step(action)`` returned.

        On an array-backed episode this copies the columns once (they may be shared) and then grows them.

        Args:
            observation: What the step led to.
            action: What was done at the observation before, as the module gave it.
            reward: Scalar.
            infos: The step's info dict; empty when None.
            terminated, truncated: Whether the episode ends here.
            extra_model_outputs: Values of further columns. Every step must have the same keys.

        Raises:
            RuntimeError: When the episode is done, or was never reset.
            ValueError: When extra keys come too late or are missing, or (array-backed) an item has another
                structure or shape than its column. The episode is then as before.
        """
        if self.is_terminated or self.is_truncated:
            raise RuntimeError(
                f"Episode {self.id_!r}: expected an ongoing episode to add a step to, got one that ended at "
                f"t={self.t} (terminated={self.is_terminated}, truncated={self.is_truncated})."
            )
        observations = self.observations
        if not observations.len_incl_lookback():
            raise RuntimeError(
                f"Episode {self.id_!r}: expected add_env_reset before the first add_env_step, got none."
            )
        extras = self.extra_model_outputs
        if extra_model_outputs:
            if extras.keys() != extra_model_outputs.keys():
                extras = self._begin_extra_columns(extra_model_outputs)
        elif extras:
            extras = self._begin_extra_columns({})
        try:
            observations.append(observation)
            self.actions.append(action)
            self.rewards.append(reward)
            if extra_model_outputs:
                for key, value in extra_model_outputs.items():
                    extras[key].append(value)
        except Exception as error:
            raise self._undo_step(error) from None
        self.infos.append(infos if infos is not None else {})
        self.t += 1
        if terminated:
            self.is_terminated = True
        if truncated:
            self.is_truncated = True
        now = time.perf_counter()
        if self._last_step_time is not None:
            self._duration_s += now - self._last_step_time
        self._last_step_time = now

    def _begin_extra_columns(self, given: Mapping[str, Any]) -> dict[str, InfiniteLookbackBuffer]:
        """New columns for ``given``, allowed only when there is no step yet (lookback included)."""
        if self.rewards.len_incl_lookback():
            raise self._extra_keys_error(given)
        self.extra_model_outputs = {key: InfiniteLookbackBuffer() for key in given}
        if self.rewards.finalized:
            for buffer in self.extra_model_outputs.values():
                buffer.finalize()
        return self.extra_model_outputs

    def _undo_step(self, error: Exception) -> Exception:
        """Take back the items of a step that could not be added; the error to raise for it."""
        num_steps = self.rewards.lookback + self.t - self.t_started
        self.observations._truncate(num_steps + 1)
        failed = "observations" if self.actions.len_incl_lookback() == num_steps else None
        for name, buffer in self._step_columns():
            if failed is None and buffer.len_incl_lookback() == num_steps:
                failed = name
            buffer._truncate(num_steps)
        return self._located(error, failed or "observations")

    # -- facts ----------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether the episode ended, terminated or truncated."""
        return self.is_terminated or self.is_truncated

    @property
    def is_reset(self) -> bool:
        """Whether the first observation is there."""
        return len(self.observations) > 0

    @property
    def is_numpy(self) -> bool:
        """Whether all columns but the infos are arrays."""
        return self.observations.finalized and all(buffer.finalized for _, buffer in self._step_columns())

    def __len__(self) -> int:
        """Number of env steps in this chunk, lookback left out."""
        return self.t - self.t_started

    def env_steps(self) -> int:
        """Number of env steps in this chunk."""
        return len(self)

    def agent_steps(self) -> int:
        """Number of agent steps in this chunk; one agent, so the same as `env_steps`."""
        return len(self)

    def get_return(self) -> float:
        """Sum of this chunk's rewards, lookback left out."""
        rewards = self.rewards.get()
        return float(rewards.sum(dtype=np.float64) if isinstance(rewards, np.ndarray) else sum(rewards))

    def get_duration_s(self) -> float:
        """Seconds from this chunk's start (reset or cut) to its last step."""
        return self._duration_s

    def get_data_dict(self) -> dict[str, Any]:
        """This chunk's columns by name, one item per step (the last observation and info are left out).

        Returns:
            Columns.OBS, ACTIONS, REWARDS, INFOS, T (from the episode's start), EPS_ID, TERMINATEDS,
            TRUNCATEDS and every extra model output; arrays ``[len, ...]`` for a numpy episode (INFOS stay a
            list), else lists.
        """
        num_steps = len(self)
        ends = [False] * num_steps
        columns: dict[str, Any] = {
            Columns.T: list(range(self.t_started, self.t)),
            Columns.EPS_ID: [self.id_] * num_steps,
            Columns.TERMINATEDS: [*ends[1:], self.is_terminated] if num_steps else [],
            Columns.TRUNCATEDS: [*ends[1:], self.is_truncated] if num_steps else [],
        }
        if self.is_numpy:
            columns = {name: np.array(column) for name, column in columns.items()}
        chunk = slice(0, num_steps)
        return {
            Columns.OBS: self.get_observations(chunk),
            Columns.INFOS: self.get_infos(chunk),
            Columns.ACTIONS: self.get_actions(),
            Columns.REWARDS: self.get_rewards(),
            **columns,
            **{key: buffer.get() for key, buffer in self.extra_model_outputs.items()},
        }

    def __repr__(self) -> str:
        return (
            f"SingleAgentEpisode(id_={self.id_!r}, len={len(self)}, t={self.t}, done={self.is_done}, "
            f"return={self.get_return():g})"
        )

    def to_numpy(self) -> SingleAgentEpisode:
        """Turn all columns but the infos into arrays, in place; an episode of length 0 stays as it is.

        Returns:
            This episode.

        Raises:
            ValueError: When a column's items differ in structure or shape, naming the first one that does.
        """
        if len(self) == 0:
            return self
        name, buffer = "observations", self.observations
        try:
            buffer.finalize()
            for name, buffer in self._step_columns():  # noqa: B007
                buffer.finalize()
        except ValueError as error:
            raise self._located(error, name) from None
        return self

    def validate(self) -> None:
        """Check that all lengths fit together.

        Raises:
            ValueError: Naming the column, the expected and the actual length.
        """
        self._check_lengths()
        if len(self.rewards) != self.t - self.t_started:
            raise ValueError(
                f"Episode {self.id_!r}: expected t - t_started = {self.t} - {self.t_started} rewards, got "
                f"{len(self.rewards)}."
            )

    # -- chunks ---------------------------------------------------------------------------------------

    def cut(self, len_lookback_buffer: int = 0) -> SingleAgentEpisode:
        """The continuation of this episode: an empty chunk that begins at this one's last observation.

        Args:
            len_lookback_buffer: How many of the last steps it holds as lookback, as far as there are any.

        Returns:
            A chunk of length 0 with the same ids and spaces, ``t_started == self.t`` and a deep copy of
            ``custom_data``.

        Raises:
            RuntimeError: When this episode is done.
            ValueError: For a negative lookback.
        """
        if self.is_done:
            raise RuntimeError(
                f"Episode {self.id_!r}: expected an ongoing episode to cut, got one that ended at t={self.t}."
            )
        if len_lookback_buffer < 0:
            raise ValueError(f"expected a len_lookback_buffer of at least 0, got {len_lookback_buffer}.")
        num_steps = self.rewards.len_incl_lookback()
        lookback = min(operator.index(len_lookback_buffer), num_steps)
        chunk = self._chunk(num_steps - lookback, num_steps, lookback, self.t)
        chunk.custom_data = copy.deepcopy(self.custom_data)
        chunk._last_step_time = self._last_step_time
        return chunk

    def slice(self, slice_: builtins.slice, *, len_lookback_buffer: int | None = None) -> SingleAgentEpisode:
        """A chunk of this one's steps ``start…stop-1``, and the observation after the last of them.

        Args:
            slice_: Bounds count from this chunk's first step, negative ones from its end; they are clipped.
            len_lookback_buffer: Number of steps before ``start`` (as far as there are any) to hold as
                lookback; None for as many as this chunk has.

        Returns:
            A chunk with the same ids, spaces and a copy of ``custom_data``; it is done only if it contains
            the end of an episode that is done. Arrays are shared, not copied.

        Raises:
            NotImplementedError: For a step other than 1.
        """
        if slice_.step not in (None, 1):
            raise NotImplementedError(
                f"Episode {self.id_!r}: expected a slice with step 1, got step {slice_.step}: an episode's "
                "steps follow each other."
            )
        start, stop, _ = slice_.indices(len(self))
        stop = max(start, stop)
        lookback = self.rewards.lookback if len_lookback_buffer is None else len_lookback_buffer
        if lookback < 0:
            raise ValueError(f"expected a len_lookback_buffer of at least 0, got {len_lookback_buffer}.")
        first = self.rewards.lookback + start
        lookback = min(lookback, first)
        end = self.rewards.lookback + stop
        chunk = self._chunk(first - lookback, end, lookback, self.t_started + start)
        if stop == len(self):
            chunk.is_terminated = self.is_terminated
            chunk.is_truncated = self.is_truncated
        chunk.custom_data = dict(self.custom_data)
        if len(self):
            chunk._duration_s = self._duration_s * len(chunk) / len(self)
        return chunk

    def __getitem__(self, item: builtins.slice) -> SingleAgentEpisode:
        if not isinstance(item, builtins.slice):
            raise NotImplementedError(
                f"Episode {self.id_!r}: expected a slice such as episode[2:5], got {item!r}; "
                "get_observations, get_actions, … return single items."
            )
        return self.slice(item)

    def _chunk(self, begin: int, end: int, lookback: int, t_started: int) -> SingleAgentEpisode:
        """The steps at absolute positions ``begin…end-1``, the first ``lookback`` of them as lookback."""
        chunk = type(self).__new__(type(self))
        chunk.id_ = self.id_
        chunk.agent_id = self.agent_id
        chunk.module_id = self.module_id
        chunk.multi_agent_episode_id = self.multi_agent_episode_id
        chunk.is_terminated = chunk.is_truncated = False
        chunk._observation_space = self._observation_space
        chunk._action_space = self._action_space
        chunk._duration_s = 0.0
        chunk._last_step_time = None
        chunk.initial_state = self._state_before(begin + lookback)
        # An episode that was never reset has no observation to keep.
        last = min(end + 1, self.observations.len_incl_lookback())
        chunk.observations = self.observations._part(begin, last, lookback)
        chunk.infos = self.infos._part(begin, last, lookback)
        chunk.actions = self.actions._part(begin, end, lookback)
        chunk.rewards = self.rewards._part(begin, end, lookback)
        chunk.extra_model_outputs = {
            key: buffer._part(begin, end, lookback) for key, buffer in self.extra_model_outputs.items()
        }
        chunk.t_started = t_started
        chunk.t = t_started + end - begin - lookback
        return chunk

    def _state_before(self, position: int) -> Any:
        """The module's state before the step at an absolute position, or None when not known."""
        state_out = self.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and 0 < position <= state_out.len_incl_lookback():
            return state_out._at(position - 1)
        return self.initial_state if position == self.rewards.lookback else None

    def concat_episode(self, other: SingleAgentEpisode) -> None:
        """Append the chunk that continues this one, in place.

        The observation at the border is in both; it is kept once, with the other's info. The other's lookback
        part is left out; its ``custom_data`` updates this one's.

        Raises:
            ValueError: When the other is no continuation (another id, this one done, a gap in time, another
                first observation) or has other columns. This episode is then as before.
        """
        self._check_continuation(other)
        before = self.rewards.len_incl_lookback()
        if before == 0 and len(other):
            self._begin_extra_columns(other.extra_model_outputs)
        name = "observations"
        try:
            self.observations.extend(other.observations.get(slice(1, None)))
            self.actions.extend(other.actions.get())
            self.rewards.extend(other.rewards.get())
            for key, values in other.extra_model_outputs.items():
                name = key
                self.extra_model_outputs[key].extend(values.get())
        except (ValueError, TypeError) as error:
            self.observations._truncate(before + 1)
            for _, buffer in self._step_columns():
                buffer._truncate(before)
            raise self._located(error, name) from None
        self.infos.set(other.infos.get(0), at_indices=-1)
        self.infos.extend(other.infos.get(slice(1, None)))
        self.t = other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)
        self._duration_s += other._duration_s
        self._last_step_time = other._last_step_time

    def _check_continuation(self, other: SingleAgentEpisode) -> None:
        def refuse(expected: str, actual: object) -> ValueError:
            return ValueError(f"Episode {self.id_!r} can't be continued: expected {expected}, got {actual}.")

        if other.id_ != self.id_:
            raise refuse("a chunk with the same id_", repr(other.id_))
        if self.is_done:
            raise refuse("this episode to be ongoing", f"one that ended at t={self.t}")
        if self.t != other.t_started:
            raise refuse(f"a chunk with t_started={self.t}", f"t_started={other.t_started}")
        if not (self.is_reset and other.is_reset):
            raise refuse("two chunks with at least one observation", "an empty one")
        if not same_items(self.observations.get(-1), other.observations.get(0)):
            raise refuse("the other's first observation to equal this one's last", "another one")
        own, others = sorted(self.extra_model_outputs), sorted(other.extra_model_outputs)
        if len(other) and self.rewards.len_incl_lookback() and own != others:
            raise refuse(f"the extra model outputs {own}", others)

    # -- state ----------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """The whole episode as plain values (msgpack packs them as they are).

        Info values without a plain form are left out and counted in ``state["num_infos_left_out"]``.

        Raises:
            NotPlainError: When an item or a value of ``custom_data`` has no plain form, naming the path.
        """
        return episode_state.get_state(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> SingleAgentEpisode:
        """The episode that `get_state` was called on.

        Raises:
            ValueError: When the state is none of `get_state`'s.
        """
        return episode_state.set_state(SingleAgentEpisode.__new__(SingleAgentEpisode), state)

    def __getstate__(self) -> dict[str, Any]:
        infos = self.infos
        names = [*EpisodeColumns.__slots__, *SingleAgentEpisode.__slots__]
        state = {name: getattr(self, name) for name in names}
        # The clock's zero point is another one in another process.
        return {**state, "_infos": infos, "_infos_source": None, "_last_step_time": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _buffer(data: Any, lookback: int, space: gym.Space[Any] | None) -> InfiniteLookbackBuffer:
    if isinstance(data, InfiniteLookbackBuffer):
        if data.space is None:
            data.space = space
        return data
    return InfiniteLookbackBuffer(data, lookback, space)
