"""ConnectorV2: one step on the way from episodes to a module's batch, or from its outputs to the env.

**Protocol.** ``piece(rl_module=, batch=, episodes=, explore=, shared_data=, metrics=) -> batch``.
The batch is a dict that passes through these phases (infos are neither batched nor padded):

1. ``{}``
2. ``{column: {(episode_id,): [items]}}``, multi-agent ``{(episode_id, agent_id, module_id): [items]}``;
   a plain ``{column: [items]}`` is legal too
3. multi-agent: ``{module_id: {column: [items]}}``
4. ``{column: array}``, for a MultiRLModule ``{module_id: {column: array}}``
5. the same with tensors

**State.** A piece with state keeps two things: what it knows in all (`get_state`/`set_state`: exact
copy, for checkpoints) and, where its state is learned from samples, what it saw since the last
synchronisation. Many runners and one driver agree as follows::

    deltas = [runner.env_to_module.get_delta() for runner in runners]   # and starts new deltas
    driver.env_to_module.merge_deltas(deltas)                           # folds all into the driver's
    merged = driver.env_to_module.get_state()
    for runner in runners:
        runner.env_to_module.apply_merged_state(merged)   # keeps what came after its last delta

`merge_states(states)` is RLlib's form of it: the states of all runners in, one merged state out, to
be given to `set_state` of everybody.

**Whole columns.** How a piece takes part in the fused path is told in `rlzmq.connectors.columnar`:
declare ``columnar = True`` (and ``writes_episodes``) and implement `transform_observations`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlzmq.connectors.batching import BatchedNdArray
from rlzmq.connectors.columnar import RowsContext
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.tree import tree_map

if TYPE_CHECKING:
    import gymnasium as gym

    from rlzmq.episodes.episode_batch import EpisodeBatch
    from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["BatchedNdArray", "ConnectorV2", "RowsContext", "batch_key"]


class _RecomputesAfterInit(abc.ABCMeta):
    """Computes a piece's output spaces once its whole ``__init__`` has run.

    So a subclass may set its attributes before or after ``super().__init__(...)``.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        piece = super().__call__(*args, **kwargs)
        piece._is_constructed = True
        piece._recompute_output_spaces()
        return piece


class ConnectorV2(metaclass=_RecomputesAfterInit):
    """Base class of all connector pieces and pipelines.

    Subclasses implement `__call__` only; those that change spaces override
    `recompute_output_observation_space` and/or `recompute_output_action_space`.

    Example::

        class RewardSign(ConnectorV2):
            def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):
                for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
                    episode.set_rewards(new_data=np.sign(episode.get_rewards()))
                return batch

    Args:
        input_observation_space: Of one env (multi-agent: a Dict by agent id); usually left to the
            pipeline that the piece is put into.
        input_action_space: Likewise.
    """

    columnar: ClassVar[bool] = False
    """Whether `transform_observations` (or, on the learner, `compute_columns`) is implemented."""

    writes_episodes: ClassVar[bool] = False
    """Whether the observations that this piece returns are also what the episodes store."""

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(
                f"{type(self).__name__}() got an unexpected argument {next(iter(kwargs))!r}. "
                "Expected: input_observation_space, input_action_space."
            )
        self._input_observation_space = input_observation_space
        self._input_action_space = input_action_space
        self._observation_space: gym.Space[Any] | None = None
        self._action_space: gym.Space[Any] | None = None

    _is_constructed = False

    @abc.abstractmethod
    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Changes or extends the batch (in place or not) and returns it.

        Args:
            rl_module: The RLModule or MultiRLModule; None where a piece needs none.
            batch: In one of the phases above.
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, or an EpisodeBatch.
            explore: Whether actions will be, or are, exploratory. False in learner pipelines.
            shared_data: Scratch dict shared by the pieces of one call; env-to-module and
                module-to-env share one between two full resets.
            metrics: MetricsLogger or None.
        """

    # -- spaces ---------------------------------------------------------------------------------

    def recompute_output_observation_space(
        self,
        input_observation_space: gym.Space[Any] | None,
        input_action_space: gym.Space[Any] | None,
    ) -> gym.Space[Any] | None:
        """The observation space that this piece leaves behind; unchanged unless overridden."""
        return input_observation_space

    def recompute_output_action_space(
        self,
        input_observation_space: gym.Space[Any] | None,
        input_action_space: gym.Space[Any] | None,
    ) -> gym.Space[Any] | None:
        """The action space that this piece leaves behind; unchanged unless overridden."""
        return input_action_space

    @property
    def input_observation_space(self) -> gym.Space[Any] | None:
        """The observation space before this piece; setting it recomputes the output spaces."""
        return self._input_observation_space

    @input_observation_space.setter
    def input_observation_space(self, space: gym.Space[Any] | None) -> None:
        self.set_input_spaces(space, self._input_action_space)

    @property
    def input_action_space(self) -> gym.Space[Any] | None:
        """The action space before this piece; setting it recomputes the output spaces."""
        return self._input_action_space

    @input_action_space.setter
    def input_action_space(self, space: gym.Space[Any] | None) -> None:
        self.set_input_spaces(self._input_observation_space, space)

    def set_input_spaces(
        self, observation_space: gym.Space[Any] | None, action_space: gym.Space[Any] | None
    ) -> None:
        """Sets both input spaces at once and recomputes both output spaces."""
        self._input_observation_space = observation_space
        self._input_action_space = action_space
        self._recompute_output_spaces()

    def _recompute_output_spaces(self) -> None:
        if not self._is_constructed:
            return
        observation_space, action_space = self._input_observation_space, self._input_action_space
        if observation_space is not None:
            self._observation_space = self.recompute_output_observation_space(observation_space, action_space)
        if action_space is not None:
            self._action_space = self.recompute_output_action_space(observation_space, action_space)

    @property
    def observation_space(self) -> gym.Space[Any] | None:
        """The observation space after this piece; None while the input space is unknown."""
        return self._observation_space

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """The action space after this piece; None while the input space is unknown."""
        return self._action_space

    # -- state ----------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The full state as plain dicts, numbers, strings and arrays; ``{}`` for stateless pieces."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores exactly what `get_state` gave."""

    def reset_state(self) -> None:
        """Back to the state right after construction."""

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state out of those of several copies of this piece. Default: the first one."""
        return dict(states[0]) if states else {}

    def get_delta(self) -> dict[str, Any]:
        """What was learned since the last call (plain data), then starts anew; ``{}``: nothing."""
        return {}

    def merge_deltas(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Folds the deltas of other copies of this piece into this one's state."""

    def apply_merged_state(self, state: dict[str, Any]) -> None:
        """Adopts the merged state of all copies, keeping what this one has not shipped yet."""
        self.set_state(state)

    def freeze_statistics(self) -> None:
        """Stops learning from samples, for evaluation. Nothing to do in most pieces."""

    # -- whole columns (see rlzmq.connectors.columnar) ------------------------------------------

    @property
    def required_lookback(self) -> int:
        """How many earlier steps of an episode the piece looks at (frame stacking: frames - 1)."""
        return 0

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """The columnar twin of `__call__` for pieces that change observations.

        Args:
            observations: Tree of arrays ``[N, ...]``; not to be changed in place.
            rows: What is known of each row, and the values before it.

        Returns:
            A new tree of arrays ``[N, ...]`` as `observation_space` says.
        """
        raise NotImplementedError(f"{type(self).__name__} is not columnar.")

    def compute_columns(self, episodes: EpisodeBatch) -> dict[str, Any]:
        """The columnar twin of `__call__` for learner pieces that add columns.

        Returns:
            Column name -> array ``[num_env_steps, ...]``, rows in the order of
            ``episodes.step_slots()``.
        """
        return {}

    # -- helpers for __call__ -------------------------------------------------------------------

    @staticmethod
    def single_agent_episode_iterator(
        episodes: Sequence[Any],
        agents_that_stepped_only: bool = True,
        zip_with_batch_column: Mapping[tuple[Any, ...], list[Any]] | list[Any] | None = None,
    ) -> Iterator[Any]:
        """All SingleAgentEpisodes, in the order of the batch: by episode, then by agent.

        Args:
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, EpisodeBatches, also mixed.
            agents_that_stepped_only: Of MultiAgentEpisodes, only agents that have an observation at
                the last env step. Learner pipelines pass False.
            zip_with_batch_column: A batch column in phase 2. If given, yields pairs (episode, item),
                the k-th item of a key going to the k-th episode of that key.

        Raises:
            ValueError: The column has no item for one of the episodes.
        """
        if zip_with_batch_column is None:
            yield from _iterate(episodes, agents_that_stepped_only)
            return
        num_taken: dict[Any, int] = {}
        by_key = not isinstance(zip_with_batch_column, list)
        for episode in _iterate(episodes, agents_that_stepped_only):
            key = batch_key(episode) if by_key else None
            items: Any = zip_with_batch_column.get(key, []) if by_key else zip_with_batch_column  # type: ignore[union-attr,arg-type]
            index = num_taken.get(key, 0)
            if index >= len(items):
                valid = did_you_mean(key, zip_with_batch_column) if by_key else ""
                raise ValueError(
                    f"zip_with_batch_column has {len(items)} item(s) {f'under {key}' if by_key else ''} but "
                    f"episode {episode.id_!r} needs item number {index}.{valid}"
                )
            num_taken[key] = index + 1
            yield episode, items[index]

    @staticmethod
    def add_batch_item(
        batch: dict[str, Any],
        column: str,
        item_to_add: Any,
        single_agent_episode: SingleAgentEpisode | None = None,
    ) -> None:
        """Appends one item to a column, under the episode's key.

        Args:
            batch: In phase 1 or 2.
            column: Column name; created where missing.
            item_to_add: A tree without batch axis.
            single_agent_episode: Where the item comes from; None: a plain list is kept under the
                column.

        Raises:
            ValueError: The column already holds the other kind (plain list / by episode), or
                batched data.
        """
        key = None if single_agent_episode is None else batch_key(single_agent_episode)
        _items_of(batch, column, key).append(item_to_add)

    @staticmethod
    def add_n_batch_items(
        batch: dict[str, Any],
        column: str,
        items_to_add: Any,
        num_items: int,
        single_agent_episode: SingleAgentEpisode | None = None,
    ) -> None:
        """Appends `num_items` items to a column, under the episode's key.

        Args:
            batch: In phase 1 or 2.
            column: Column name; created where missing.
            items_to_add: A list of `num_items` items, or a tree of arrays ``[num_items, ...]``,
                which is kept as ONE entry of BatchedNdArrays.
            num_items: How many.
            single_agent_episode: See `add_batch_item`.

        Raises:
            ValueError: `items_to_add` has another length; see also `add_batch_item`.
        """
        key = None if single_agent_episode is None else batch_key(single_agent_episode)
        if isinstance(items_to_add, list):
            if len(items_to_add) != num_items:
                raise ValueError(
                    f"column {column!r}, key {key}: expected {num_items} items, got {len(items_to_add)}."
                )
            _items_of(batch, column, key).extend(items_to_add)
            return

        def tag(leaf: Any) -> Any:
            array = BatchedNdArray(leaf)
            if array.ndim == 0 or len(array) != num_items:
                raise ValueError(
                    f"column {column!r}, key {key}: expected an array [{num_items}, ...], got shape {array.shape}."
                )
            return array

        _items_of(batch, column, key).append(tree_map(tag, items_to_add))

    @staticmethod
    def foreach_batch_item_change_in_place(
        batch: dict[str, Any],
        column: str | Sequence[str],
        func: Callable[[Any, Any, Any, Any], Any],
    ) -> None:
        """Replaces every item of one or several columns by a function of it.

        Args:
            batch: In phase 2.
            column: A column name, or a list of them: `func` then gets and returns a tuple of items.
            func: ``func(item, episode_id, agent_id, module_id) -> new item``; ids are None where
                unknown. An item that was added as one array for many steps comes as that
                BatchedNdArray, ``[num_items, ...]``.

        Raises:
            ValueError: A column is missing, not in phase 2, or the columns' items do not match.
        """
        columns = [column] if isinstance(column, str) else list(column)
        for name in columns:
            if name not in batch:
                raise ValueError(f"column {name!r} is not in the batch.{did_you_mean(name, batch)}")
            if not isinstance(batch[name], (dict, list)):
                raise ValueError(
                    f"column {name!r}: expected items in a list or by episode, got {type(batch[name]).__name__} "
                    "(already batched?)."
                )
        first = batch[columns[0]]
        keys = [None] if isinstance(first, list) else list(first)
        for key in keys:
            lists = [batch[name] if key is None else batch[name][key] for name in columns]
            if len({len(items) for items in lists}) > 1:
                raise ValueError(f"columns {columns}, key {key}: numbers of items differ.")
            ids = (*key, None, None)[:3] if key is not None else (None, None, None)
            for index, items in enumerate(zip(*lists, strict=True)):
                if isinstance(column, str):
                    lists[0][index] = _tag_like(items[0], func(items[0], *ids))
                    continue
                for target, old, new in zip(lists, items, func(items, *ids), strict=True):  # type: ignore[arg-type]
                    target[index] = _tag_like(old, new)

    @staticmethod
    def switch_batch_from_column_to_module_ids(
        batch: dict[str, dict[str, Any]],
    ) -> dict[str, dict[str, Any]]:
        """``{column: {module_id: data}}`` to ``{module_id: {column: data}}``."""
        by_module: dict[str, dict[str, Any]] = {}
        for column, column_data in batch.items():
            for module_id, data in column_data.items():
                by_module.setdefault(module_id, {})[column] = data
        return by_module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def batch_key(episode: Any) -> tuple[Any, ...]:
    """The key of an episode's items: ``(episode_id,)`` or ``(episode_id, agent_id, module_id)``."""
    agent_id = getattr(episode, "agent_id", None)
    if agent_id is None:
        return (episode.id_,)
    return (episode.multi_agent_episode_id or episode.id_, agent_id, episode.module_id)


def _iterate(episodes: Sequence[Any], agents_that_stepped_only: bool) -> Iterator[Any]:
    for episode in episodes:
        if hasattr(episode, "agent_episodes"):
            stepped = episode.get_agents_that_stepped() if agents_that_stepped_only else None
            # In the order of agent_episodes: sets of ids have no order that other processes share.
            for agent_id, agent_episode in episode.agent_episodes.items():
                if stepped is None or agent_id in stepped:
                    yield agent_episode
        elif hasattr(episode, "step_slots"):
            yield from episode
        else:
            yield episode


def _items_of(batch: dict[str, Any], column: str, key: tuple[Any, ...] | None) -> list[Any]:
    """The list that items of (column, key) go into."""
    if key is None:
        items = batch.setdefault(column, [])
    else:
        by_key = batch.setdefault(column, {})
        items = by_key.setdefault(key, []) if isinstance(by_key, dict) else by_key
    if not isinstance(items, list) or (key is not None and items is batch[column]):
        raise ValueError(
            f"column {column!r} holds {type(batch[column]).__name__}: cannot add an item "
            f"{'without episode' if key is None else f'of episode {key}'} to it."
        )
    return items


def _tag_like(old: Any, new: Any) -> Any:
    """Keeps the many-steps mark on results of array-wise functions."""
    if isinstance(old, BatchedNdArray) and not isinstance(new, (BatchedNdArray, dict, tuple, list)):
        return BatchedNdArray(new)
    return new
