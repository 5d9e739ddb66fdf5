"""SingleAgentEpisode: single-agent episodes and chunks of them."""

from __future__ import annotations

import builtins
import copy
import operator
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import gymnasium as gym
import numpy as np

from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import REWARD_SPACE, EpisodeColumns, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer, same_items
from rlzmq.episodes.step_values import REWARD_TYPES, as_rewards, kept_reward, kept_rewards, sum_of

__all__ = ["SingleAgentEpisode"]

_FACTS = (
    "id_",
    "agent_id",
    "module_id",
    "multi_agent_episode_id",
    "t",
    "t_started",
    "is_terminated",
    "is_truncated",
    "custom_data",
    "initial_state",
    "observation_space",
    "action_space",
)


class SingleAgentEpisode(EpisodeColumns):
    """One agent's observations, actions, rewards and other data per time step, with a lookback part in front.

    An episode grows by `add_env_reset` and `add_env_step`. Sampling cuts a long one into chunks (`cut`) with the same
    ``id_``. A chunk contains the last items of its predecessor as its lookback part, which indices can reach but
    lengths and returns leave out. Data is list-backed while an episode grows, and array-backed after `to_numpy` (or
    in an item of an `EpisodeBatch`).

    Observations, actions, rewards, infos and extra model outputs may be anything: numbers, arrays, trees of them,
    strings, None, instances of any class. Numbers are required only where they are needed: `get_return` needs rewards
    that are single numbers; an `EpisodeBatch`, which is sent and learned from, needs numbers, strings or arrays of
    them in all columns.

    Example:
        >>> episode = SingleAgentEpisode()
        >>> episode.add_env_reset(observation=0)
        >>> episode.add_env_step(1, 10, 0.5)
        >>> episode.add_env_step(2, 11, 0.25, terminated=True)
        >>> len(episode), episode.get_return(), episode.get_observations([-2, -1])
        (2, 0.75, [1, 2])

    Args:
        id_: The episode's id; None: a new unique id.
        observations: All observations, one more than rewards: a list, or a tree of arrays ``[num_items, ...]``.
        observation_space, action_space: Spaces of one item, needed for one-hots.
        infos: As many as observations, usually dicts; None: empty dicts.
        actions, rewards: Items of the steps, lists or arrays.
        terminated, truncated: Whether the last step ended the episode.
        extra_model_outputs: Additional columns with as many items as rewards, by name.
        t_started: Time step, counted from the episode's start, of this chunk's first observation (after the lookback
            part).
        len_lookback_buffer: Number of the given steps that are lookback. "auto": all of them, so the new chunk has
            length 0. Clipped to the number of rewards.
        agent_id, module_id, multi_agent_episode_id: Set for the episodes in a multi-agent episode.

    Attributes:
        t_started: See above.
        t: The time step of the last observation; ``len(episode) == t - t_started``.
        is_terminated, is_truncated: Whether, and how, the episode ended with the last step.
        custom_data: A dict for user code. Continuations get a deep copy.
        initial_state: The module's state before this chunk's first step, if known (for stateful modules, chunks made
            by `cut`, `slice` and `EpisodeBatch` know it without any lookback), otherwise None.

    Raises:
        ValueError: The columns' lengths do not fit together.
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

    _duration_s: float
    _last_step_time: float | None
    agent_id: Any
    custom_data: dict[str, Any]
    initial_state: Any
    is_terminated: bool
    is_truncated: bool
    module_id: str | None
    multi_agent_episode_id: str | None
    t: int
    t_started: int

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: object = None,
        observation_space: gym.Space[Any] | None = None,
        infos: Sequence[Any] | InfiniteLookbackBuffer | None = None,
        actions: object = None,
        action_space: gym.Space[Any] | None = None,
        rewards: object = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_id: Hashable = None,
        module_id: str | None = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        self.id_: str = id_ if id_ is not None else uuid.uuid4().hex
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.is_terminated: bool = bool(terminated)
        self.is_truncated: bool = bool(truncated)
        self.custom_data: dict[str, Any] = {}
        self.initial_state = None
        self._observation_space = observation_space
        self._action_space = action_space
        self._duration_s = 0.0
        self._last_step_time = None
        is_empty = observations is None and actions is None and rewards is None and infos is None
        if is_empty and not extra_model_outputs and len_lookback_buffer == "auto":
            self._begin_empty(operator.index(t_started) if t_started is not None else 0)
            return

        try:
            lookback = self._given_lookback(rewards, len_lookback_buffer)
            self.observations: InfiniteLookbackBuffer = _buffer(observations, lookback, observation_space)
            self.actions: InfiniteLookbackBuffer = _buffer(actions, lookback, action_space)
            self.rewards: InfiniteLookbackBuffer = _buffer(rewards, lookback, REWARD_SPACE)
            self.extra_model_outputs = {
                key: _buffer(values, lookback, None) for key, values in (extra_model_outputs or {}).items()
            }
        except ValueError as error:
            raise ValueError(f"Episode {self.id_!r}: {error}") from None
        self._unpack_rewards()
        if isinstance(infos, InfiniteLookbackBuffer):
            self.infos: InfiniteLookbackBuffer = infos
        else:
            # An empty list counts as missing.
            given = list(infos) if infos else [{} for _ in range(self.observations.len_incl_lookback())]
            self.infos = InfosBuffer(given, lookback)
        self.t_started: int = operator.index(t_started) if t_started is not None else 0
        self.t: int = self.t_started + len(self.rewards)
        self._check_lengths()

    def _begin_empty(self, t_started: int) -> None:
        """Make empty columns, as an env runner needs them for each episode."""
        empty = InfiniteLookbackBuffer._of_list
        self.observations = empty([], 0, self._observation_space)
        self.actions = empty([], 0, self._action_space)
        self.rewards = empty([], 0, REWARD_SPACE)
        self.extra_model_outputs = {}
        self.infos = InfosBuffer._of_list([], 0, None)
        self.t_started = self.t = t_started

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

    def _unpack_rewards(self) -> None:
        """Replace given rewards that are arrays with one element by numbers."""
        data = self.rewards.data
        kept = kept_rewards(data)
        if kept is not data:
            self.rewards.set(kept, at_indices=slice(-len(kept), None))

    # -- growing --------------------------------------------------------------------------------------

    def add_env_reset(self, observation: object, infos: object = None) -> None:
        """Add the observation (and infos) from ``env.reset()``.

        Raises:
            RuntimeError: The episode has an observation already, or is done.
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
        observation: object,
        action: object,
        reward: object,
        infos: object = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step: the action, and the result of ``env.step(action)``.

        An array-backed episode copies its columns at every step.

        Args:
            observation: The observation after the step.
            action: The action taken on the previous observation, as returned by the module.
            reward: A number; an array or tensor with one element counts as a number. For other values, see the class.
            infos: The step's info dict (or anything else); None: an empty dict.
            terminated, truncated: Whether the episode ends here.
            extra_model_outputs: Values of additional columns. Every step must have the same keys.

        Raises:
            RuntimeError: The episode is done, or was never reset.
            ValueError: Extra keys come too late or are missing, or (array-backed) an item has another structure,
                shape or kind (number, string or object) than its column. The episode is then unchanged.
        """
        if self.is_terminated or self.is_truncated:
            raise RuntimeError(
                f"Episode {self.id_!r}: expected an ongoing episode to add a step to, got one that ended at "
                f"t={self.t} (terminated={self.is_terminated}, truncated={self.is_truncated})."
            )
        observations = self.observations
        if not (observations._num if observations._items is None else observations._items):
            raise RuntimeError(
                f"Episode {self.id_!r}: expected add_env_reset before the first add_env_step, got none."
            )
        before = extras = self.extra_model_outputs
        if extra_model_outputs:
            if extras.keys() != extra_model_outputs.keys():
                extras = self._begin_extra_columns(extra_model_outputs)
        elif extras:
            extras = self._begin_extra_columns({})
        try:
            # Appending to the lists of a growing episode here takes half the time of calling each column's `append`.
            kept = reward if type(reward) in REWARD_TYPES else kept_reward(reward)
            for buffer, item in ((observations, observation), (self.actions, action), (self.rewards, kept)):
                if (items := buffer._items) is None:
                    buffer.append(item)
                else:
                    items.append(item)
            if extra_model_outputs:
                for key, item in extra_model_outputs.items():
                    if (items := extras[key]._items) is None:
                        extras[key].append(item)
                    else:
                        items.append(item)
        except Exception as error:
            raise self._undo_step(error, before) from None
        if (items := self.infos._items) is None:
            self.infos.append({} if infos is None else infos)
        else:
            items.append({} if infos is None else infos)
        self.t += 1
        if terminated:
            self.is_terminated = True
        if truncated:
            self.is_truncated = True
        now = time.perf_counter()
        if self._last_step_time is not None:
            self._duration_s += now - self._last_step_time
        self._last_step_time = now

    def _undo_step(self, error: Exception, extras: dict[str, InfiniteLookbackBuffer]) -> Exception:
        """Remove the items of a step that could not be added, and return the error to raise."""
        num_steps = self.rewards.lookback + self.t - self.t_started
        failed = "observations" if self.observations.len_incl_lookback() == num_steps + 1 else None
        if failed is None:
            failed = next(
                (name for name, buffer in self._step_columns() if buffer.len_incl_lookback() == num_steps),
                "observations",
            )
        self._truncate(num_steps)
        self.extra_model_outputs = extras
        return self._located(error, failed)

    def _look_back(self, num_steps: int, t_started: int) -> None:
        """Make the first steps of a new episode its lookback part, at most `num_steps`."""
        num_steps = min(num_steps, len(self.rewards))
        for buffer in (self.observations, self.infos, *(buffer for _, buffer in self._step_columns())):
            buffer.lookback = num_steps
        self.t_started, self.t = t_started, t_started + len(self.rewards)
        self._duration_s, self._last_step_time = 0.0, None

    def _truncate(self, num_steps: int) -> None:
        """Drop all but the first steps (including the lookback part)."""
        self.observations._truncate(num_steps + 1)
        self.infos._truncate(num_steps + 1)
        for _, buffer in self._step_columns():
            buffer._truncate(num_steps)

    def truncate(self) -> None:
        """End the episode here. Used after an environment has failed: the failed step is not part of the episode."""
        self.is_truncated = True

    # -- chunks ---------------------------------------------------------------------------------------

    def cut(self, len_lookback_buffer: int = 0) -> Self:
        """Return the continuation of this episode: an empty chunk that begins at this one's last observation.

        Args:
            len_lookback_buffer: Number of last steps to keep as lookback, as far as they exist.

        Returns:
            A chunk of length 0 with the same ids and spaces, ``t_started == self.t`` and a deep copy of
            ``custom_data``.

        Raises:
            RuntimeError: This episode is done.
            ValueError: The lookback is negative.
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

    def slice(self, slice_: builtins.slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return a chunk of this one's steps ``start…stop-1``, with the observation after the last of them.

        Args:
            slice_: Bounds count from this chunk's first step, negative ones from its end; they are clipped.
            len_lookback_buffer: Number of steps before ``start`` (as far as they exist) to keep as lookback; None: as
                many as this chunk has.

        Returns:
            A chunk with the same ids, spaces and a copy of ``custom_data``. It is done only if the episode is done
            and the slice stops exactly at its end (as in RLlib, not beyond it). Arrays are shared, not copied.

        Raises:
            NotImplementedError: The slice's step is not 1.
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
        if stop == len(self) and (slice_.stop is None or slice_.stop <= len(self)):
            chunk.is_terminated = self.is_terminated
            chunk.is_truncated = self.is_truncated
        chunk.custom_data = dict(self.custom_data)
        if len(self):
            chunk._duration_s = self._duration_s * len(chunk) / len(self)
        return chunk

    def __getitem__(self, item: builtins.slice) -> Self:
        if not isinstance(item, builtins.slice):
            raise NotImplementedError(
                f"Episode {self.id_!r}: expected a slice such as episode[2:5], got {item!r}; "
                "get_observations, get_actions, … return single items."
            )
        return self.slice(item)

    def _chunk(self, begin: int, end: int, lookback: int, t_started: int) -> Self:
        """Return the stored steps ``begin…end-1``; the first ``lookback`` of them become lookback."""
        chunk = type(self).__new__(type(self))
        chunk.id_ = self.id_
        chunk.agent_id, chunk.module_id = self.agent_id, self.module_id
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

    def writable_copy(self) -> Self:
        """Return a copy that shares its arrays with this episode until one of them is written to."""
        return self.slice(builtins.slice(0, len(self)))

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """Key of this episode's items in batches: ``(episode id,)`` or ``(episode id, agent id, module id)``."""
        if self.agent_id is None:
            return (self.id_,)
        return (self.multi_agent_episode_id or self.id_, self.agent_id, self.module_id)

    def set_id(self, id_: str) -> None:
        """Change the episode id in `batch_key`."""
        if self.agent_id is None or self.multi_agent_episode_id is None:
            self.id_ = id_
        else:
            self.multi_agent_episode_id = id_

    def _state_before(self, position: int) -> object:
        """Return the module's state before the step at an absolute position; None if unknown."""
        if position == self.rewards.lookback and self.initial_state is not None:
            return self.initial_state
        state_out = self.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and 0 < position <= state_out.len_incl_lookback():
            return state_out._at(position - 1)
        return None

    def concat_episode(self, other: SingleAgentEpisode) -> None:
        """Append the chunk that continues this one, in place.

        The observation at the border is in both chunks; it is kept once, with the other chunk's info. The other's
        lookback part is left out; its ``custom_data`` updates this one's.

        Raises:
            ValueError: The other chunk is not a continuation (another id, this one done, a gap in time, another first
                observation) or has other columns. This episode is unchanged.
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

    def _begin_extra_columns(self, given: Mapping[str, Any]) -> dict[str, InfiniteLookbackBuffer]:
        """Return new columns for ``given``. Allowed only before the first step, including the lookback."""
        if self.rewards.len_incl_lookback():
            raise self._extra_keys_error(given)
        self.extra_model_outputs: dict[str, InfiniteLookbackBuffer] = {
            key: InfiniteLookbackBuffer() for key in given
        }
        if self.rewards.finalized:
            for buffer in self.extra_model_outputs.values():
                buffer.finalize()
        return self.extra_model_outputs

    # -- facts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of env steps in this chunk, without lookback."""
        return self.t - self.t_started

    @property
    def is_done(self) -> bool:
        """Whether the episode has ended, terminated or truncated."""
        return self.is_terminated or self.is_truncated

    @property
    def is_reset(self) -> bool:
        """Whether the episode has its first observation."""
        return len(self.observations) > 0

    @property
    def is_numpy(self) -> bool:
        """Whether all columns but the infos are arrays."""
        return self.observations.finalized and all(buffer.finalized for _, buffer in self._step_columns())

    def env_steps(self) -> int:
        """Return the number of env steps in this chunk."""
        return len(self)

    def agent_steps(self) -> int:
        """Return the number of agent steps in this chunk, which equals `env_steps`."""
        return len(self)

    def get_return(self) -> float:
        """Return the sum of this chunk's rewards, without lookback.

        Raises:
            ValueError: A reward is not a single number.
        """
        try:
            rewards = as_rewards(self.rewards.get())
        except ValueError as error:
            raise self._located(error, "rewards") from None
        return float(rewards.sum(dtype=np.float64)) if isinstance(rewards, np.ndarray) else sum_of(rewards)

    def get_duration_s(self) -> float:
        """Return the duration in seconds from this chunk's start (reset or cut) to its last step."""
        return self._duration_s

    def get_data_dict(self) -> dict[str, Any]:
        """Return this chunk's columns by name, with one item per step (without the last observation and info).

        Returns:
            Columns.OBS, ACTIONS, REWARDS, INFOS, T (from the episode's start), EPS_ID, TERMINATEDS, TRUNCATEDS and
            every extra model output; arrays ``[len, ...]`` for a numpy episode (except INFOS, a list), otherwise lists.
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
        try:
            total = f"{self.get_return():g}"
        except ValueError:
            total = "none, rewards are not numbers"
        return (
            f"SingleAgentEpisode(id_={self.id_!r}, len={len(self)}, t={self.t}, done={self.is_done}, "
            f"return={total})"
        )

    def to_numpy(self) -> SingleAgentEpisode:
        """Convert all columns except the infos to arrays, in place. An episode of length 0 is unchanged.

        Items that are not numbers, strings or arrays of them (None, instances of any class) become an array of dtype
        object.

        Returns:
            This episode.

        Raises:
            ValueError: A column's items differ in structure or shape, or mix numbers and strings; the text names the
                first one that does not fit.
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
            ValueError: They do not; the text names the column, the expected and the actual length.
        """
        self._check_lengths()
        if len(self.rewards) != self.t - self.t_started:
            raise ValueError(
                f"Episode {self.id_!r}: expected t - t_started = {self.t} - {self.t_started} rewards, got "
                f"{len(self.rewards)}."
            )

    # -- state ----------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the whole episode as a dict of lists, arrays and other values, which can be pickled."""
        buffers = {name: getattr(self, name) for name in ("observations", "actions", "rewards", "infos")}
        return {
            **{name: copy.deepcopy(getattr(self, name)) for name in _FACTS},
            **{name: buffer.get_state() for name, buffer in buffers.items()},
            "extra_model_outputs": {
                key: buffer.get_state() for key, buffer in self.extra_model_outputs.items()
            },
            "duration_s": self._duration_s,
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> SingleAgentEpisode:
        """Return the episode of a state from `get_state`.

        Raises:
            ValueError: The state does not come from `get_state`.
        """
        buffer = InfiniteLookbackBuffer.from_state
        try:
            state = copy.deepcopy(state)
            episode = SingleAgentEpisode(
                state["id_"],
                observations=buffer(state["observations"]),
                actions=buffer(state["actions"]),
                rewards=buffer(state["rewards"], REWARD_SPACE),
                infos=InfosBuffer.from_state(state["infos"]),
                extra_model_outputs={
                    key: buffer(column) for key, column in state["extra_model_outputs"].items()
                },
                t_started=state["t_started"],
            )
            for name in _FACTS:
                setattr(episode, name, state[name])
            episode._duration_s = float(state["duration_s"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"expected a SingleAgentEpisode's state, got one with a wrong field: {error!r}."
            ) from error
        episode.validate()
        return episode

    def __getstate__(self) -> dict[str, Any]:
        names = {*EpisodeColumns.__slots__, *SingleAgentEpisode.__slots__} - {"_source"}
        # The clock's zero differs between processes.
        return {**{name: getattr(self, name) for name in names}, "_last_step_time": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _buffer(data: object, lookback: int, space: gym.Space[Any] | None) -> InfiniteLookbackBuffer:
    if isinstance(data, InfiniteLookbackBuffer):
        if data.space is None:
            data.space = space
        return data
    return InfiniteLookbackBuffer(data, lookback, space)
