"""SingleAgentEpisode: single-agent episodes and chunks of them."""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.episodes import episode_state
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_chunks import EpisodeChunks
from rlzmq.episodes.episode_columns import REWARD_SPACE, EpisodeColumns, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.step_values import REWARD_TYPES, as_rewards, kept_reward, kept_rewards

__all__ = ["SingleAgentEpisode"]


class SingleAgentEpisode(EpisodeChunks):
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

    __slots__ = ()

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Any = None,
        observation_space: gym.Space[Any] | None = None,
        infos: Sequence[Any] | InfiniteLookbackBuffer | None = None,
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
        self.id_: str = id_ if id_ is not None else uuid.uuid4().hex
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.is_terminated: bool = bool(terminated)
        self.is_truncated: bool = bool(truncated)
        self.custom_data: dict[str, Any] = {}
        self.initial_state: Any = None
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

    def add_env_reset(self, observation: Any, infos: Any = None) -> None:
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
        observation: Any,
        action: Any,
        reward: Any,
        infos: Any = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step: the action, and the result of ``env.step(action)``.

        An array-backed episode copies its columns once (they may be shared) and then grows them.

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
        self.extra_model_outputs: dict[str, InfiniteLookbackBuffer] = extras
        return self._located(error, failed)

    def _take_back_step(self) -> None:
        """Remove the last step, which did not end the episode. Its duration remains counted."""
        self.t -= 1
        self._truncate(self.rewards.lookback + self.t - self.t_started)
        if self.t == 0:
            self.extra_model_outputs = {}  # the columns started with this step

    def _truncate(self, num_steps: int) -> None:
        """Drop all but the first steps (including the lookback part)."""
        self.observations._truncate(num_steps + 1)
        self.infos._truncate(num_steps + 1)
        for _, buffer in self._step_columns():
            buffer._truncate(num_steps)

    # -- facts ----------------------------------------------------------------------------------------

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
        return float(rewards.sum(dtype=np.float64) if isinstance(rewards, np.ndarray) else sum(rewards))

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
        """Return the whole episode as plain values, which msgpack can pack.

        Values of info dicts without a plain form are left out and counted in ``state["num_infos_left_out"]``. Columns
        of other objects are included unchanged; such a state can be pickled, but not packed.

        Raises:
            NotPlainError: A value of ``custom_data`` has no plain form; the text names its path.
        """
        return episode_state.get_state(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> SingleAgentEpisode:
        """Return the episode of a state from `get_state`.

        Raises:
            ValueError: The state does not come from `get_state`.
        """
        episode = episode_state.from_state(SingleAgentEpisode, state)
        episode.validate()
        return episode

    def __getstate__(self) -> dict[str, Any]:
        names = {*EpisodeColumns.__slots__, *EpisodeChunks.__slots__} - {"_source", "_created"}
        # The clock's zero differs between processes.
        return {**{name: getattr(self, name) for name in names}, "_last_step_time": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _buffer(data: Any, lookback: int, space: gym.Space[Any] | None) -> InfiniteLookbackBuffer:
    if isinstance(data, InfiniteLookbackBuffer):
        if data.space is None:
            data.space = space
        return data
    return InfiniteLookbackBuffer(data, lookback, space)
