"""EpisodeChunks: cutting, slicing and concatenating chunks of a single-agent episode."""

from __future__ import annotations

import builtins
import copy
import operator
from collections.abc import Mapping
from typing import Any, Self

from rlzmq.episodes.column_store import same_items
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import EpisodeColumns
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["EpisodeChunks"]


class EpisodeChunks(EpisodeColumns):
    """Base class of `SingleAgentEpisode`: time steps, done flags, and operations on chunks.

    Attributes:
        t_started: The time step, from the episode's start, of this chunk's first observation.
        t: The time step of the last observation.
        is_terminated, is_truncated: Whether, and how, the episode ended with the last step.
        custom_data: A dict for user code.
        initial_state: The module's state before this chunk's first step; None: unknown or stateless.
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
        """Return the module's state before the step at an absolute position; None if unknown."""
        if position == self.rewards.lookback and self.initial_state is not None:
            return self.initial_state
        state_out = self.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and 0 < position <= state_out.len_incl_lookback():
            return state_out._at(position - 1)
        return None

    def concat_episode(self, other: EpisodeChunks) -> None:
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

    def _check_continuation(self, other: EpisodeChunks) -> None:
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
