"""Pipelines, which call connector pieces in order and propagate their spaces."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.explain import explain_pipeline
from rlzmq.connectors.pieces_by_name import PieceRef, PiecesByName
from rlzmq.connectors.plans import (
    EnvToModulePlan,
    LearnerPlan,
    ModuleToEnvPlan,
    env_to_module_plan,
    flat_pieces,
    learner_plan,
    module_to_env_plan,
)
from rlzmq.connectors.private_episodes import private_copies
from rlzmq.core.checkpoint import find_inside
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.trust import CALLER, find_code

__all__ = [
    "ConnectorPipelineV2",
    "EnvToModulePipeline",
    "LearnerConnectorPipeline",
    "ModuleToEnvPipeline",
]

# Named by a string, not imported: it is above the connectors, and only a pipeline of a checkpoint needs it.
_POLICY = "rlzmq.algorithms.policy:Policy"


class ConnectorPipelineV2(PiecesByName):
    """Calls its pieces in order. A pipeline is itself a piece, so pipelines can be nested.

    Every piece has a unique name: its class name, with ``_2``, ``_3``, … for further pieces of the same class. States,
    timers and error texts use it. After every edit, including edits of a nested pipeline, the spaces are propagated
    again.

    Args:
        input_observation_space: Observation space of one env (multi-agent: a Dict by agent id).
        input_action_space: Action space of one env, likewise.
        connectors: The pieces.

    Attributes:
        connectors: The pieces, in order. Edit them through the methods, which also update the spaces.
        time_pieces: Whether every piece is really called, to be timed. Off by default, because it prevents the fused
            path and so reduces the sampling speed.
        after_piece: Called with each piece's name and the batch that it returned, for debugging; None: off.
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
        self.connectors: list[ConnectorV2] = [_checked(piece) for piece in connectors or ()]
        self.time_pieces = False
        # By the piece's id, which is faster to look up than its name.
        self._timers: dict[int, list[float]] = {}
        self.after_piece: Callable[[str, dict[str, Any]], None] | None = None
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
            ValueError: A piece returned something that is not a dict; the text names the piece.
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
        for index in range(begin, end):
            piece = self.connectors[index]
            start_s = time.perf_counter()
            try:
                batch = piece(batch=batch, shared_data=shared_data, **arguments)
            except Exception as error:
                error.add_note(f"in {self._where(index)}")
                raise
            if not isinstance(batch, dict):
                raise ValueError(
                    f"{self._where(index)} must return the batch, a dict, but returned "
                    f"{type(batch).__name__}. Does its __call__ end with `return batch`?"
                )
            timer = self._timers.setdefault(id(piece), [0, 0.0])
            timer[0] += 1
            timer[1] += time.perf_counter() - start_s
            if self.after_piece is not None:
                self.after_piece(self.piece_names[index], batch)
        return batch

    def _where(self, index: int) -> str:
        return (
            f"connector piece {self.piece_names[index]!r} (number {index + 1} of {len(self.connectors)} "
            f"in {type(self).__name__})"
        )

    @property
    def piece_timers(self) -> dict[str, list[float]]:
        """Piece name -> [number of calls, total seconds], for the pieces that were called.

        Fused paths call no pieces. Runners and learners include these timers in their results.
        """
        named = zip(self.piece_names, self.connectors, strict=True)
        return {name: list(self._timers[id(piece)]) for name, piece in named if id(piece) in self._timers}

    def take_piece_timers(self) -> dict[str, list[float]]:
        """Return `piece_timers` and reset them."""
        if not self._timers:
            return {}
        timers = self.piece_timers
        self._timers.clear()
        return timers

    @property
    def watches_pieces(self) -> bool:
        """Whether pieces must really be called one by one."""
        return self.time_pieces or self.after_piece is not None

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
        text = explain_pipeline(
            self,
            rl_module=rl_module,
            batch=batch,
            episodes=episodes,
            explore=explore,
            shared_data=shared_data,
            **kwargs,
        )
        if print_it:
            print(text)
        return text

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
        del self.connectors[self.index(name_or_class)]
        self._propagate_from_outermost()

    def _insert(self, index: int, connector: ConnectorV2) -> None:
        self.connectors.insert(index, _checked(connector))
        try:
            self._propagate_from_outermost()
        except Exception:
            del self.connectors[index]
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
        return self.connectors[key]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for piece in self.connectors:
            lines.extend("  " + line for line in repr(piece).splitlines())
        return "\n".join([*lines, ")"])


class EnvToModulePipeline(ConnectorPipelineV2):
    """Converts episodes to the module's input batch, in an env runner."""

    def columnar_plan(self) -> EnvToModulePlan | None:
        """Return the plan for whole columns; None if a piece needs the per-episode protocol."""
        return None if self.watches_pieces else env_to_module_plan(self.connectors)


class ModuleToEnvPipeline(ConnectorPipelineV2):
    """Converts the module's outputs to actions for the vector env, in an env runner."""

    def columnar_plan(self) -> ModuleToEnvPlan | None:
        """Return the plan for whole columns; None if a piece needs the per-episode protocol."""
        return None if self.watches_pieces else module_to_env_plan(self.connectors)


class LearnerConnectorPipeline(ConnectorPipelineV2):
    """Converts episodes to the train batch, in a learner.

    The pieces receive copies of the caller's episodes (which share their data until they are written to), so the
    caller's episodes do not change. Chunks of one episode get different ids, so their rows never mix.

    Raises:
        ConfigurationError: A piece handles only last observations, so it belongs into env-to-module pipelines.
    """

    # The pipeline's pieces, the same with nested pipelines expanded, and their plan.
    _planned: tuple[list[ConnectorV2], list[ConnectorV2], LearnerPlan | None] | None = None

    def _recompute_output_spaces(self) -> None:
        self._planned = None
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
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any] | None = None,
        episodes: Sequence[Any],
        explore: bool | None = False,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorPipelineV2; `explore` defaults to False."""
        return super().__call__(
            rl_module=rl_module,
            batch=batch,
            episodes=private_copies(episodes),
            explore=explore,
            shared_data=shared_data,
            metrics=metrics,
            **kwargs,
        )

    def columnar_plan(self) -> LearnerPlan | None:
        """Return the plan for whole columns; None if a piece needs the per-episode protocol."""
        if self.watches_pieces:
            return None
        known = self._planned
        if known is None or not known[0] == known[1] == self.connectors:  # pieces are compared by identity
            pieces = flat_pieces(self.connectors)
            if known is None or pieces != known[1]:
                known = self._planned = [*self.connectors], pieces, learner_plan(pieces)
        return known[2]


def _checked(piece: Any) -> ConnectorV2:
    if not isinstance(piece, ConnectorV2):
        hint = " Did you forget the parentheses?" if isinstance(piece, type) else ""
        raise ValueError(f"expected a ConnectorV2 piece, got {piece!r}.{hint}")
    return piece
