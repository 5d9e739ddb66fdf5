"""Pipelines, which call connector pieces in order and propagate their spaces."""

from __future__ import annotations

import copy
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

import numpy as np

from rlzmq.connectors.common.agent_to_module_mapping import AgentToModuleMapping, is_multi_rl_module
from rlzmq.connectors.common.layout import NumpyToTensor
from rlzmq.connectors.connector_v2 import LAST_STAGE, ConnectorV2, name_set
from rlzmq.connectors.module_to_env import NormalizeAndClipActions
from rlzmq.connectors.rows import RowsContext, TrainRows
from rlzmq.core.checkpoint import find_inside
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map
from rlzmq.core.trust import CALLER, find_code
from rlzmq.episodes.columns import Columns

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = [
    "ConnectorPipelineV2",
    "EnvToModulePipeline",
    "LearnerConnectorPipeline",
    "ModuleToEnvPipeline",
    "describe_batch",
    "flat_pieces",
]

PieceRef: TypeAlias = str | type[ConnectorV2] | ConnectorV2

# Named by a string, not imported: it is above the connectors, and only a pipeline of a checkpoint needs it.
_POLICY = "rlzmq.algorithms.policy:Policy"


class ConnectorPipelineV2(ConnectorV2):
    """Calls its pieces in order. A pipeline is itself a piece, so pipelines can be nested.

    Every piece has a unique name: its class name, with ``_2``, ``_3``, … for further pieces of the same class. States,
    timers and error texts use it. After every edit, including edits of a nested pipeline, the spaces are propagated
    again.

    `run_pieces` calls pieces on episodes, one after the other: for `EpisodeObjects.observe`, in env runners in which a
    piece or a callback needs episodes (`EnvRunner._choose_sampler`), and for `TrainBatches._columns_of_episodes`,
    in learners in which a piece or the data needs them. All other pipelines run on rows.

    Args:
        input_observation_space: Observation space of one env (multi-agent: a Dict by agent id).
        input_action_space: Action space of one env, likewise.
        connectors: The pieces.

    Attributes:
        connectors: The pieces, in order. They are edited by the methods, which also update the spaces.
        flat: The pieces, with nested pipelines expanded.
        num_edits: How often the pieces or their spaces have changed.
        learning: Names and pieces that may have a delta (see `get_delta`).
        timers: Piece, by its id -> [number of calls, total seconds]; empty if no piece was called.
        time_pieces: Whether every piece is really called, to be timed. Off by default, because the pipeline then does
            not run on rows, which reduces the sampling speed.
    """

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Create a pipeline with the states of a checkpoint.

        Without pieces, the pipeline is the one that acts in `Policy.load`: the run's own pieces are found by their
        names. It must be called on the class of the pipeline that `path` names.

        Args:
            path: See `restore_from_path`; without pieces, an algorithm's checkpoint or a path into one.
            args, kwargs: The constructor's arguments, among them the pieces (``connectors=[…]``).

        Raises:
            CheckpointError: The checkpoint has no states of pieces, or needs code that it does not find.
            ConfigurationError: No pieces are given for a pipeline that does not act.
        """
        if kwargs.get("connectors"):
            return super().from_checkpoint(path, *args, **kwargs)
        acting = find_code(_POLICY, CALLER).load(find_inside(path)[0]).pipelines()
        for pipeline in acting.values():
            if isinstance(pipeline, cls):
                return pipeline
        raise ConfigurationError(
            f"{cls.__name__}.from_checkpoint({str(path)!r}): a checkpoint has the states of connector pieces, not "
            "their code. Give the pieces (connectors=[…])."
        )

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        connectors: Sequence[ConnectorV2] | None = None,
    ) -> None:
        self.connectors: tuple[ConnectorV2, ...] = tuple(_checked(piece) for piece in connectors or ())
        self.flat: tuple[ConnectorV2, ...] = ()
        self.num_edits: int = 0
        self.learning: list[tuple[str, ConnectorV2]] = []
        self._fits_rows = False
        self.time_pieces = False
        self.timers: dict[int, list[float]] = {}
        # The pipeline that contains this one.
        self._outer: weakref.ref[ConnectorPipelineV2] | None = None
        super().__init__(input_observation_space, input_action_space)

    # -- calling --------------------------------------------------------------------------------

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any] | None = None,
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the batch through all pieces. The arguments are those of ConnectorV2; batch defaults to ``{}``.

        Raises:
            ConfigurationError: A piece returned something that is not a dict, or without a column that a later one
                needs; the text names the piece.
            Exception: An error raised by a piece, with a note that names the piece.
        """
        arguments = {"rl_module": rl_module, "episodes": episodes, "explore": explore, "metrics": metrics}
        return self.run_pieces(
            0, len(self.connectors), batch=batch, shared_data=shared_data, **arguments, **kwargs
        )

    def run_pieces(
        self,
        begin: int,
        end: int,
        *,
        batch: dict[str, Any] | None = None,
        shared_data: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run the batch through pieces ``begin … end - 1`` only, with all arguments of `__call__`."""
        batch = {} if batch is None else batch
        shared_data = {} if shared_data is None else shared_data
        for index, piece in enumerate(self.connectors[begin:end], begin):
            start_s = time.perf_counter()
            try:
                batch = piece(batch=batch, shared_data=shared_data, **arguments)
            except Exception as error:
                if isinstance(error, KeyError) and _is_ours(piece):
                    self.blame_for(error.args[0], batch, self._where(index), index, **arguments)
                error.add_note(f"in {self._where(index)}")
                raise
            if not isinstance(batch, dict):
                raise ConfigurationError(
                    f"{self._where(index)} must return the batch, a dict, but returned "
                    f"{type(batch).__name__}. Does its __call__ end with `return batch`?"
                )
            timer = self.timers.setdefault(id(piece), [0, 0.0])
            timer[0] += 1
            timer[1] += time.perf_counter() - start_s
        return batch

    def blame_for(
        self, column: object, batch: dict[str, Any], reader: str, end: int | None = None, **arguments: Any
    ) -> None:
        """Raise an error that names the piece which drops a column, if there is one. Copies of the pieces are called.

        Args:
            column: The column that may be missing.
            batch: The batch that the pieces returned.
            reader: Who needs it, for the text.
            end: Number of pieces before the reader; None: all.
            arguments: See `__call__`.

        Raises:
            ConfigurationError: A custom piece returns the batch without this column, even if it gets it.
        """
        custom = [n for n, piece in enumerate(self.connectors[:end]) if not _is_ours(piece)]
        for index in () if _has(batch, column) else reversed(custom):
            try:
                trial, episodes = copy.deepcopy((self.connectors[index], list(arguments["episodes"])))
                given = {"shared_data": {}, **arguments, "episodes": episodes}
                returned = trial(batch=_with_column(batch, column, arguments.get("rl_module")), **given)
            except Exception:  # the piece misses something else
                continue
            if not _has(returned, column):
                raise ConfigurationError(
                    f"{self._where(index)} returned the batch without the column {column!r}, which {reader} needs. "
                    "Return all columns that it gets: change the batch in place, or return {**batch, …}."
                ) from None

    def _where(self, index: int) -> str:
        place = f"number {index + 1} of {len(self.connectors)} in {type(self).__name__}"
        return f"connector piece {self.piece_names[index]!r} ({place})"

    @property
    def piece_timers(self) -> dict[str, list[float]]:
        """Piece name -> [number of calls, total seconds], for the pieces that were called.

        A pipeline on rows calls no pieces. Runners and learners include these timers in their results.
        """
        named = zip(self.piece_names, self.connectors, strict=True)
        return {name: list(self.timers[id(piece)]) for name, piece in named if id(piece) in self.timers}

    def take_piece_timers(self) -> dict[str, list[float]]:
        """Return `piece_timers` and reset them."""
        if not self.timers:
            return {}
        timers = self.piece_timers
        self.timers.clear()
        return timers

    # -- rows -----------------------------------------------------------------------------------

    @property
    def on_rows(self) -> bool:
        """Whether the pipeline runs on rows (see `rlzmq.connectors.rows`) instead of calling pieces with episodes."""
        return self._fits_rows and not self.time_pieces

    def _find_row_form(self) -> bool:
        """Return whether all pieces work on rows, in this order; subclasses note what the row form needs."""
        stages = [piece.stage for piece in self.flat]
        return (
            all(piece.has_row_form for piece in self.flat)
            and stages == sorted(stages)
            and bool(stages)
            and stages[-1] >= LAST_STAGE
        )

    @property
    def required_lookback(self) -> int:
        """The largest lookback of any piece, in steps."""
        return max((piece.required_lookback for piece in self.connectors), default=0)

    def explain(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any] | None = None,
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        print_it: bool = True,
        **kwargs: Any,
    ) -> str:
        """Describe the batch after each piece, from a trial call without side effects.

        The call does not change episodes, batch, shared data or the pieces' states.

        Args:
            print_it: Whether to print the text, too.

        Returns:
            One block per piece: its name, and the batch's columns with shapes and dtypes.
        """
        import torch

        trial, episodes = copy.deepcopy((self, list(episodes)))
        batch, shared_data = (tree_map(_copied, data or {}) for data in (batch, shared_data))
        num = f"{len(episodes)} episode{'' if len(episodes) == 1 else 's'}"
        lines = [f"{type(self).__name__}: {len(self)} pieces, {num}", "input batch:", *describe_batch(batch)]
        arguments = {
            "rl_module": rl_module,
            "episodes": private_copies(episodes),
            "explore": explore,
            **kwargs,
        }
        # Pieces without their own generator use torch's global one.
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(gpus):
            for index, name in enumerate(self.piece_names):
                batch = trial.run_pieces(index, index + 1, batch=batch, shared_data=shared_data, **arguments)
                lines += [f"after {index + 1}. {name}:", *describe_batch(batch)]
        text = "\n".join(lines)
        if print_it:
            print(text)
        return text

    @property
    def piece_names(self) -> list[str]:
        """The unique name of each piece, in order."""
        counts: dict[str, int] = {}
        names = []
        for piece in self.connectors:
            name = type(piece).__name__
            counts[name] = counts.get(name, 0) + 1
            names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
        return names

    def index(self, name_or_class: PieceRef) -> int:
        """Return the position of a piece. Argument and errors are those of `insert_before`."""
        names = self.piece_names
        for index, piece in enumerate(self.connectors):
            if name_or_class in (names[index], type(piece)) or piece is name_or_class:
                return index
        wanted = getattr(name_or_class, "__name__", name_or_class)
        raise ValueError(
            f"{type(self).__name__} has no connector piece {wanted!r}.{did_you_mean(wanted, names)}"
        )

    # -- state, by unique piece name ------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return piece name -> state, without stateless pieces.

        Args:
            components: Names of the pieces to include; None: all.
            not_components: Names of pieces to leave out.
        """
        wanted, unwanted = name_set(components), name_set(not_components) or set()
        state = {}
        for name, piece in zip(self.piece_names, self.connectors, strict=True):
            if (wanted is None or name in wanted) and name not in unwanted:
                piece_state = piece.get_state(**kwargs)
                if piece_state:
                    state[name] = piece_state
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state`. Pieces that it does not name keep their state.

        Raises:
            ValueError: The state names a piece that this pipeline does not have.
        """
        for name, piece_state in state.items():
            self.connectors[self.index(name)].set_state(piece_state)

    def reset_state(self) -> None:
        """Reset every piece."""
        for piece in self.connectors:
            piece.reset_state()

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of copies of this pipeline, piece by piece, matched by name."""
        merged = {}
        for name, piece in zip(self.piece_names, self.connectors, strict=True):
            of_piece = [state[name] for state in states if state.get(name)]
            piece_state = piece.merge_states(of_piece) if of_piece else {}
            if piece_state:
                merged[name] = piece_state
        return merged

    def get_delta(self) -> dict[str, Any]:
        """Return piece name -> delta since the last call, without empty deltas."""
        if not self.learning:
            return {}
        return {name: delta for name, piece in self.learning if (delta := piece.get_delta())}

    def merge_deltas(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Merge the deltas of copies of this pipeline into its pieces, matched by name."""
        by_name: dict[str, list[dict[str, Any]]] = {}
        for delta in deltas:
            for name, piece_delta in delta.items():
                by_name.setdefault(name, []).append(piece_delta)
        for name, piece_deltas in by_name.items():
            self.connectors[self.index(name)].merge_deltas(piece_deltas)

    def apply_merged_state(self, state: dict[str, Any]) -> None:
        """Load a merged state; each piece keeps its unsent delta."""
        for name, piece_state in state.items():
            self.connectors[self.index(name)].apply_merged_state(piece_state)

    def freeze_statistics(self) -> None:
        """Stop all pieces from learning from samples."""
        for piece in self.connectors:
            piece.freeze_statistics()

    # -- editing --------------------------------------------------------------------------------

    def prepend(self, connector: ConnectorV2) -> None:
        """Insert a piece at the beginning."""
        self._insert(0, connector)

    def append(self, connector: ConnectorV2) -> None:
        """Append a piece at the end."""
        self._insert(len(self.connectors), connector)

    def insert_before(self, name_or_class: PieceRef, connector: ConnectorV2) -> None:
        """Insert a piece before another one.

        Args:
            name_or_class: Piece name, class (its first piece), or the piece itself.
            connector: The new piece.

        Raises:
            ValueError: There is no such piece; the text suggests a name.
        """
        self._insert(self.index(name_or_class), connector)

    def insert_after(self, name_or_class: PieceRef, connector: ConnectorV2) -> None:
        """Insert a piece after another one. Arguments and errors are those of `insert_before`."""
        self._insert(self.index(name_or_class) + 1, connector)

    def remove(self, name_or_class: PieceRef) -> None:
        """Remove one piece. Argument and errors are those of `insert_before`."""
        index = self.index(name_or_class)
        self._replace(self.connectors[:index] + self.connectors[index + 1 :])

    def _insert(self, index: int, connector: ConnectorV2) -> None:
        self._replace((*self.connectors[:index], _checked(connector), *self.connectors[index:]))

    def _replace(self, pieces: tuple[ConnectorV2, ...]) -> None:
        before, self.connectors = self.connectors, pieces
        try:
            self._propagate_from_outermost()
        except Exception:
            self.connectors = before
            raise

    def _propagate_from_outermost(self) -> None:
        outer = None if self._outer is None else self._outer()
        if outer is not None and any(piece is self for piece in outer.connectors):
            outer._propagate_from_outermost()
        else:
            self._recompute_output_spaces()

    def _recompute_output_spaces(self) -> None:
        if not self._is_constructed:
            return
        observation_space, action_space = self._input_observation_space, self._input_action_space
        self._adopt_pieces()
        for piece in self.connectors:
            # In a pipeline without spaces, a piece keeps its own spaces.
            piece.set_input_spaces(
                piece.input_observation_space if observation_space is None else observation_space,
                piece.input_action_space if action_space is None else action_space,
            )
            observation_space, action_space = piece.observation_space, piece.action_space
        self._observation_space, self._action_space = observation_space, action_space
        self.flat = tuple(flat_pieces(self.connectors))
        named = zip(self.piece_names, self.connectors, strict=True)
        self.learning = [(name, piece) for name, piece in named if piece.has_delta]
        self.num_edits += 1
        self._fits_rows = self._find_row_form()

    def _adopt_pieces(self) -> None:
        for piece in self.connectors:
            if isinstance(piece, ConnectorPipelineV2):
                piece._outer = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt_pieces()

    def __len__(self) -> int:
        return len(self.connectors)

    def __iter__(self) -> Iterator[ConnectorV2]:
        return iter(self.connectors)

    def __contains__(self, name_or_class: PieceRef) -> bool:
        try:
            self.index(name_or_class)
        except ValueError:
            return False
        return True

    @overload
    def __getitem__(self, key: int | str) -> ConnectorV2: ...

    @overload
    def __getitem__(self, key: slice | type[ConnectorV2]) -> list[ConnectorV2]: ...

    def __getitem__(self, key: int | str | slice | type[ConnectorV2]) -> ConnectorV2 | list[ConnectorV2]:
        """Return one piece by position or name; a list of pieces by slice or by (base) class.

        Raises:
            IndexError: There is no piece at this position.
            ValueError: There is no piece of this name; the text suggests one.
        """
        if isinstance(key, str):
            return self.connectors[self.index(key)]
        if isinstance(key, type):
            return [piece for piece in self.connectors if isinstance(piece, key)]
        return list(self.connectors[key]) if isinstance(key, slice) else self.connectors[key]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for piece in self.connectors:
            lines.extend("  " + line for line in repr(piece).splitlines())
        return "\n".join([*lines, ")"])


class EnvToModulePipeline(ConnectorPipelineV2):
    """Converts episodes to the module's input batch, in an env runner.

    Attributes:
        writers: Pieces whose results the episodes store, in order.
        readers: Pieces whose results go to the module only.
        stored_observation_space: Space of the writers' result, the obs column (multi-agent: a Dict by agent id).
        device: Device of the batch; None: CPU.
    """

    writers: tuple[ConnectorV2, ...]
    readers: tuple[ConnectorV2, ...]
    stored_observation_space: gym.Space[Any] | None
    device: Any

    def _find_row_form(self) -> bool:
        own = [piece for piece in self.flat if piece.stage <= 1]
        num_writers = next((i for i, piece in enumerate(own) if not piece.writes_episodes), len(own))
        self.writers, self.readers = tuple(own[:num_writers]), tuple(own[num_writers:])
        first = self.flat[0] if self.flat else self
        self.stored_observation_space = (
            self.writers[-1].observation_space if self.writers else first.input_observation_space
        )
        self.device = next((piece.device for piece in self.flat if isinstance(piece, NumpyToTensor)), None)
        return (
            super()._find_row_form()
            and all(piece.transforms_observations for piece in own)
            and len(self.readers) <= 1
            and not any(piece.writes_episodes for piece in self.readers)
        )

    def write(self, observations: Any, rows: RowsContext) -> Any:
        """Convert the env's observations ``[N, ...]`` to the stored ones, and update statistics."""
        for piece in self.writers:
            observations = piece.transform_observations(observations, rows)
        return observations

    def read(self, observations: Any, rows: RowsContext) -> Any:
        """Convert stored observations ``[N, ...]`` to the module's."""
        for piece in self.readers:
            observations = piece.transform_observations(observations, rows)
        return observations

    @property
    def num_own_pieces(self) -> int | None:
        """Number of pieces before those that only lay out the batch; None if they are incomplete, or timed."""
        if self.time_pieces:
            return None
        num, last = len(self.connectors), LAST_STAGE + 1
        for piece in reversed(self.connectors):
            if not (piece.has_row_form and 1 < piece.stage < last):
                break
            num, last = num - 1, piece.stage
        return num if self.connectors and self.connectors[-1].stage == LAST_STAGE else None


class ModuleToEnvPipeline(ConnectorPipelineV2):
    """Converts the module's outputs to actions for the vector env, in an env runner.

    Attributes:
        normalize: Piece that converts rows of actions to the env's; None if they are equal.
    """

    normalize: NormalizeAndClipActions | None

    def _find_row_form(self) -> bool:
        found = [piece for piece in self.flat if isinstance(piece, NormalizeAndClipActions)]
        self.normalize = next((piece for piece in found if piece.changes_rows), None)
        return super()._find_row_form() and len(found) <= 1


class LearnerConnectorPipeline(ConnectorPipelineV2):
    """Converts episodes to the train batch, in a learner.

    The pieces receive copies of the caller's episodes (which share their data until they are written to), so the
    caller's episodes do not change. Chunks of one episode get different ids, so their rows never mix.

    Raises:
        ConfigurationError: A piece handles only last observations, so it belongs in env-to-module pipelines.
    """

    def _recompute_output_spaces(self) -> None:
        for piece in flat_pieces(self.connectors):
            if piece.last_step_only:
                name = type(piece).__name__
                raise ConfigurationError(
                    f"{name} handles the last observation of each episode only, which a learner does not train "
                    "on. Put it into config.env_runners(env_to_module_connector=…), where it sees every "
                    "observation in its turn and what it writes reaches the learner too, or give it "
                    "as_learner_connector=True if it takes that (FrameStackingEnvToModule: use "
                    "FrameStackingLearner)."
                )
        super()._recompute_output_spaces()

    def __call__(
        self, *, episodes: Sequence[Any], explore: bool | None = False, **arguments: Any
    ) -> dict[str, Any]:
        """See ConnectorPipelineV2; `explore` defaults to False."""
        return super().__call__(episodes=private_copies(episodes), explore=explore, **arguments)

    def _find_row_form(self) -> bool:
        self.maps_agents: bool = any(isinstance(piece, AgentToModuleMapping) for piece in self.flat)
        names = [piece.step_columns for piece in self.flat]
        self._step_columns = None if None in names else {name for own in names for name in own or ()}
        transforming = [piece for piece in self.flat if piece.transforms_observations]
        looks_back = any(piece.required_lookback for piece in transforming)
        self._making_rows = [piece for piece in self.flat if piece.makes_train_rows]
        return super()._find_row_form() and not (looks_back and len(transforming) > 1)

    def train_columns(self, rows: TrainRows) -> dict[str, Any]:
        """Return the train batch of one module, column -> CPU tensor ``[B, ...]``. Only if `on_rows`."""
        for piece in self._making_rows:
            piece.train_rows(rows)
        return rows.columns

    @property
    def adds_next_observations(self) -> bool | None:
        """Whether single steps get next observations; None if a piece needs whole chunks instead of single steps."""
        return (
            None if self._step_columns is None or not self.on_rows else Columns.NEXT_OBS in self._step_columns
        )


def flat_pieces(pieces: Sequence[ConnectorV2]) -> list[ConnectorV2]:
    """Return the pieces, with nested pipelines expanded."""
    flat: list[ConnectorV2] = []
    for piece in pieces:
        flat.extend(flat_pieces(piece.connectors) if isinstance(piece, ConnectorPipelineV2) else [piece])
    return flat


def private_copies(episodes: Sequence[Any]) -> list[Any]:
    """Return copies of episodes that can be extended and changed without an effect on the originals.

    Arrays are shared until the first write. Further chunks of one episode get their own ids (the id followed by ``_1``,
    ``_2``, …), so that their items in the batch are kept apart.

    Args:
        episodes: SingleAgentEpisodes, MultiAgentEpisodes, batches of either, or a mixture.
    """
    num_seen: Counter[Any] = Counter()
    copies = []
    for episode in _flat(episodes):
        chunk = episode.writable_copy()
        if index := num_seen[chunk.batch_key]:
            chunk.set_id(f"{chunk.batch_key[0]}_{index}")
        num_seen[episode.batch_key] += 1
        copies.append(chunk)
    return copies


def _flat(episodes: Sequence[Any]) -> Iterator[Any]:
    for episode in episodes:
        if isinstance(episode, Sequence):
            yield from _flat(episode)
        else:
            yield episode


# Keys of a column that a description shows.
_NUM_KEYS_SHOWN = 3


def _is_ours(piece: ConnectorV2) -> bool:
    return type(piece).__module__.startswith("rlzmq.")


def _has(batch: dict[str, Any], column: object) -> bool:
    return column in batch or any(isinstance(part, dict) and column in part for part in batch.values())


def _with_column(batch: dict[str, Any], column: object, modules: Any) -> dict[str, Any]:
    """Return a batch (or each module's) with a column that has another one's values."""
    if batch and is_multi_rl_module(modules) and all(key in modules for key in batch):
        return {module_id: _with_column(columns, column, None) for module_id, columns in batch.items()}
    return {**batch, column: next(iter(batch.values()), {})}  # type: ignore[dict-item]


def _checked(piece: object) -> ConnectorV2:
    if not isinstance(piece, ConnectorV2):
        hint = " Did you forget the parentheses?" if isinstance(piece, type) else ""
        raise ValueError(f"expected a ConnectorV2 piece, got {piece!r}.{hint}")
    return piece


def _copied(leaf: Any) -> object:
    """Return a deep copy; torch copies only detached tensors."""
    return copy.deepcopy(leaf.detach() if hasattr(leaf, "detach") else leaf)


def describe_batch(data: Any, indent: int = 2) -> list[str]:
    """Return lines that show a batch's nesting, number of items, shapes and dtypes."""
    pad = " " * indent
    if isinstance(data, dict):
        if not data:
            return [pad + "{}"]
        lines = []
        for index, (key, value) in enumerate(data.items()):
            if isinstance(key, tuple) and index == _NUM_KEYS_SHOWN:
                lines.append(f"{pad}… {len(data) - index} more keys")
                break
            if isinstance(value, dict):
                lines.append(f"{pad}{key}:")
                lines.extend(describe_batch(value, indent + 2))
            else:
                lines.append(f"{pad}{key}: {_describe(value)}")
        return lines
    return [pad + _describe(data)]


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} item(s)" + (f" of {_describe(value[0])}" if value else "")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_describe(part) for part in value) + ")"
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "detach"):
        kind = "tensor" if hasattr(value, "detach") else type(value).__name__
        return f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {value!r}"[:60]
