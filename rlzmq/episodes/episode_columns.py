"""EpisodeColumns: the columns of one agent's episode: lookback buffers, getters, setters and length checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.synonyms import did_you_mean
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer, index_list
from rlzmq.episodes.step_values import kept_reward, kept_rewards

__all__ = ["EpisodeColumns", "Indices", "UnknownColumnError", "located"]

Indices = int | slice | Sequence[int] | None

# Used because environments define no reward space.
REWARD_SPACE = gym.spaces.Box(-np.inf, np.inf, (), np.float32)


class UnknownColumnError(KeyError):
    """Raised for an extra model output that an episode does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InfosBuffer(InfiniteLookbackBuffer):
    """A lookback buffer of infos, which is always a list and is filled with the plain fill value."""

    __slots__ = ()
    _opaque = True

    def finalize(self) -> None:
        """Do nothing, since infos stay a list."""


def located(error: Exception, where: str, column: str) -> Exception:
    """Return the same error with the location (episode, agent) and column in front of its message."""
    kind = type(error) if type(error) in (IndexError, ValueError, TypeError) else ValueError
    return kind(f"{where}, column {column!r}: {error}")


class EpisodeColumns:
    """Base class of `SingleAgentEpisode`: data per time step, getters and setters.

    Attributes:
        id_: The episode's id, the same for all its chunks.
        observations: One more item than the step columns: action t was computed from observation t.
        actions, rewards: Index t belongs to the step from observation t to t + 1.
        extra_model_outputs: Additional step columns by name, e.g. ``"action_logp"``.
        infos: The info dicts, as many as observations.
    """

    __slots__ = (
        "_action_space",
        "_observation_space",
        "_source",
        "actions",
        "extra_model_outputs",
        "id_",
        "infos",
        "observations",
        "rewards",
    )

    id_: str
    observations: InfiniteLookbackBuffer
    actions: InfiniteLookbackBuffer
    rewards: InfiniteLookbackBuffer
    extra_model_outputs: dict[str, InfiniteLookbackBuffer]
    infos: InfiniteLookbackBuffer
    # Of a batch's items: the batch's chunks, which make their other attributes, and their position and row in them.
    _source: tuple[Any, int, Any]
    _observation_space: gym.Space[Any] | None
    _action_space: gym.Space[Any] | None

    def __getattr__(self, name: str) -> Any:
        """Create an attribute of an episode on shared columns at its first use."""
        if name == "_source" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            batch, position, row = self._source
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
        value = batch.part_of(position, row, name)
        setattr(self, name, value)
        return value

    @property
    def observation_space(self) -> gym.Space[Any] | None:
        """The space of one observation, or None."""
        return self._observation_space

    @observation_space.setter
    def observation_space(self, space: gym.Space[Any] | None) -> None:
        self._observation_space = space
        self.observations.space = space

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """The space of one action, or None."""
        return self._action_space

    @action_space.setter
    def action_space(self, space: gym.Space[Any] | None) -> None:
        self._action_space = space
        self.actions.space = space

    # -- getters --------------------------------------------------------------------------------------

    def get_observations(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return one observation or several, by time step within this chunk.

        Args:
            indices: None for all of this chunk (len + 1 of them, without lookback), an int for one, a list of ints or
                a slice for several. Negative ones count from the end, and may reach into the lookback part.
            neg_index_as_lookback: Whether negative indices count backwards from this chunk's first observation: -1 is
                then the last one of the lookback part.
            fill: Value for every element of items outside of the data. Without it, there is an IndexError (int,
                list), or they are left out (slice). Fillers have the space's structure, shapes and dtypes.
            one_hot_discrete: Whether to one-hot encode Discrete and MultiDiscrete parts (float32).

        Returns:
            One observation, or a list of them; for a numpy episode a tree of arrays ``[num_items, ...]`` (views if
            they contain no filler).

        Raises:
            IndexError: There is no such time step, and no ``fill``.
            ValueError: ``one_hot_discrete`` is set without an observation space.
        """
        items = self.observations._items
        if (
            type(indices) is int
            and indices == -1
            and items
            and not (neg_index_as_lookback or one_hot_discrete)
        ):
            return items[-1]  # what pieces in env runners read again and again
        return self._get(
            "observations", self.observations, indices, neg_index_as_lookback, fill, one_hot_discrete
        )

    def get_infos(
        self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: object = None
    ) -> Any:
        """Return one info dict or a list of them. See `get_observations`; ``fill`` is used unchanged."""
        return self._get("infos", self.infos, indices, neg_index_as_lookback, fill)

    def get_actions(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return one action or several. Arguments, results and errors are those of `get_observations`."""
        return self._get("actions", self.actions, indices, neg_index_as_lookback, fill, one_hot_discrete)

    def get_rewards(
        self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: object = None
    ) -> Any:
        """Return one reward or several. Arguments, results and errors are those of `get_observations`."""
        return self._get("rewards", self.rewards, indices, neg_index_as_lookback, fill)

    def get_extra_model_outputs(
        self,
        key: str,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: object = None,
    ) -> Any:
        """Return one value or several of an extra model output. The other arguments are those of `get_observations`.

        Raises:
            KeyError: The episode has no such column.
            IndexError: There is no such time step, and no ``fill``.
        """
        return self._get(key, self._extra(key), indices, neg_index_as_lookback, fill)

    def _get(
        self,
        name: str,
        buffer: InfiniteLookbackBuffer,
        indices: Indices,
        neg: bool,
        fill: object,
        hot: bool = False,
    ) -> Any:
        try:
            return buffer.get(indices, neg_index_as_lookback=neg, fill=fill, one_hot_discrete=hot)
        except (IndexError, ValueError, TypeError) as error:
            raise self._located(error, name) from None

    # -- setters --------------------------------------------------------------------------------------

    def set_observations(
        self, *, new_data: object, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite observations. Their number never changes.

        Args:
            new_data: One observation for an int index; otherwise a list of them or a tree of arrays ``[num_items,
                ...]``.
            at_indices: The items to overwrite, as in `get_observations`; None: all of this chunk.
            neg_index_as_lookback: See `get_observations`.

        Raises:
            IndexError: There is no such time step, or ``new_data`` has another number of items.
            ValueError: Items of a numpy episode have another structure, shape or kind (string or number).
        """
        items = self.observations._items
        if type(at_indices) is int and at_indices == -1 and items and not neg_index_as_lookback:
            items[-1] = new_data
            return
        self._set("observations", self.observations, new_data, at_indices, neg_index_as_lookback)

    def set_actions(
        self, *, new_data: object, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite actions. Arguments and errors are those of `set_observations`."""
        self._set("actions", self.actions, new_data, at_indices, neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: object, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite rewards. Arguments and errors are those of `set_observations`."""
        several = isinstance(at_indices, (slice, NoneType)) or index_list(at_indices) is not None
        new_data = kept_rewards(new_data) if several else kept_reward(new_data)
        self._set("rewards", self.rewards, new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: object, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite values of an extra model output. Arguments and errors are those of `set_observations`.

        Raises:
            KeyError: The episode has no such column (columns begin only with a chunk's first step).
        """
        self._set(key, self._extra(key), new_data, at_indices, neg_index_as_lookback)

    def _set(
        self, name: str, buffer: InfiniteLookbackBuffer, new_data: object, at_indices: Indices, neg: bool
    ) -> None:
        try:
            buffer.set(new_data, at_indices=at_indices, neg_index_as_lookback=neg)
        except (IndexError, ValueError, TypeError) as error:
            raise self._located(error, name) from None

    # -- checks ---------------------------------------------------------------------------------------

    def _extra(self, key: str) -> InfiniteLookbackBuffer:
        try:
            return self.extra_model_outputs[key]
        except KeyError:
            raise UnknownColumnError(
                f"Episode {self.id_!r} has no extra model output {key!r}."
                f"{did_you_mean(key, self.extra_model_outputs)}"
            ) from None

    def _step_columns(self) -> Iterator[tuple[str, InfiniteLookbackBuffer]]:
        yield "actions", self.actions
        yield "rewards", self.rewards
        yield from self.extra_model_outputs.items()

    def _located(self, error: Exception, column: str) -> Exception:
        return located(error, f"Episode {self.id_!r}", column)

    def _check_lengths(self) -> None:
        num_steps, lookback = self.rewards.len_incl_lookback(), self.rewards.lookback
        num_observations = self.observations.len_incl_lookback()
        where = f"Episode {self.id_!r}"
        counted = f"({lookback} of them lookback)"
        if num_observations != num_steps + 1 and (num_observations or num_steps):
            raise ValueError(
                f"{where}: expected one observation more than rewards, got {num_observations} observations "
                f"and {num_steps} rewards {counted}."
            )
        if self.observations.lookback != lookback:
            raise ValueError(
                f"{where}, column 'observations': expected a lookback of {lookback}, like the rewards, got "
                f"{self.observations.lookback}."
            )
        if self.infos.len_incl_lookback() != num_observations:
            raise ValueError(
                f"{where}: expected as many infos as observations, {num_observations} {counted}, got "
                f"{self.infos.len_incl_lookback()}."
            )
        for name, buffer in self._step_columns():
            if buffer.len_incl_lookback() != num_steps or buffer.lookback != lookback:
                raise ValueError(
                    f"{where}, column {name!r}: expected {num_steps} items {counted}, like the rewards, got "
                    f"{buffer.len_incl_lookback()} ({buffer.lookback} of them lookback)."
                )

    def _extra_keys_error(self, given: Mapping[str, Any]) -> ValueError:
        late = sorted(set(given) - set(self.extra_model_outputs))
        missing = sorted(set(self.extra_model_outputs) - set(given))
        what = []
        if late:
            what.append(f"{late} came too late")
        if missing:
            what.append(f"{missing} are missing")
        return ValueError(
            f"Episode {self.id_!r}, extra_model_outputs: {' and '.join(what)} at step {len(self.rewards)}: "
            f"expected the keys {sorted(self.extra_model_outputs)} of the first step, got {sorted(given)}. A "
            "column has a value for every step or for none."
        )
