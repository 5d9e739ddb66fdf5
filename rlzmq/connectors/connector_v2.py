"""ConnectorV2: one step in the conversion of episodes to a module's batch, or of its outputs to actions.

**Protocol.** ``piece(rl_module=, batch=, episodes=, explore=, shared_data=, metrics=) -> batch``.
The batch is a dict that passes through these phases (infos are neither batched nor padded):

1. ``{}``
2. ``{column: {(episode_id,): [items]}}``, multi-agent ``{(episode_id, agent_id, module_id): [items]}``;
   a plain ``{column: [items]}`` is allowed too
3. multi-agent: ``{module_id: {column: [items]}}``
4. ``{column: array}``, for a MultiRLModule ``{module_id: {column: array}}``
5. the same with tensors

**State.** A stateful piece has a full state (`get_state`/`set_state`: an exact copy, for checkpoints) and, if its
state is learned from samples, the delta since the last synchronization. The driver synchronizes the runners as
follows::

    deltas = [runner.env_to_module.get_delta() for runner in runners]   # starts new deltas
    driver.env_to_module.merge_deltas(deltas)                           # folds all into the driver's
    merged = driver.env_to_module.get_state()
    for runner in runners:
        runner.env_to_module.apply_merged_state(merged)   # keeps samples after its last delta

By default, the delta is the whole state, and `merge_states(states)` (RLlib's) makes one of those of all runners.

**Rows.** `rlzmq.connectors.rows` documents how a piece works on whole columns, without the cost of episodes: implement
`transform_observations` (and declare ``writes_episodes``) or `compute_columns`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rlzmq.connectors.batching import BatchedNdArray, BatchItemMethods
from rlzmq.connectors.rows import RowsContext, TrainRows
from rlzmq.core.checkpoint import Checkpointable
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import SignatureOfInit
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    import gymnasium as gym


__all__ = [
    "Batch",
    "BatchedNdArray",
    "ConnectorV2",
    "Memory",
    "RowsContext",
    "TorchPiece",
    "name_set",
    "recorded_arguments",
    "unchanged_on_tensors",
]

LAST_STAGE = 7
"""Stage of the default piece that completes a pipeline."""

# What a class states besides its `__call__` if it works on rows; a default piece that only changes the layout of
# episodes' data has nothing to do on rows and states its stage.
_ROW_FORMS = ("transform_observations", "compute_columns", "train_rows", "stage")

_Made = dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]
_recorded: ContextVar[_Made | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recorded_arguments() -> Iterator[_Made]:
    """Record the pieces that the block creates, by `id`, with the arguments of their constructors."""
    made: _Made = {}
    token = _recorded.set(made)
    try:
        yield made
    finally:
        _recorded.reset(token)


_ARGUMENTS = ("rl_module", "batch", "episodes", "explore", "shared_data", "metrics")


Batch: TypeAlias = dict[str, Any]
"""Column -> tree of tensors ``[B, ...]``."""

Memory: TypeAlias = Mapping[str, Any]
"""Name -> tree of tensors ``[B, ...]``."""


def _unchanged(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
    return batch, memory


def _kept(batch: Batch, memory: Memory) -> Memory:
    return memory


@dataclass(frozen=True, kw_only=True)
class TorchPiece:
    """A connector piece as functions on a batch of rows, each of a different episode, without statistics to learn.

    The functions use torch operations that `torch.export` can trace. The number of rows B may differ from call to call.
    They return new dicts and tensors and do not modify their arguments. A piece that only changes the layout of data
    (e.g. from arrays to tensors) is ``TorchPiece()``.

    Example::

        class Negate(SingleAgentObservationPreprocessor):
            def preprocess(self, observation, episode):
                return -observation

            def to_torch(self, *, rl_module, agent_id):
                return TorchPiece(forward=lambda batch, memory: ({**batch, "obs": -batch["obs"]}, memory))

    Attributes:
        forward: ``(batch, memory) -> (batch, memory)``. In env-to-module pipelines the batch has ``obs`` (and
            ``rewards``, see below); in module-to-env pipelines it has the module's outputs.
        initial_memory: The piece's memory at the beginning of an episode: name -> tree of arrays without batch axis.
            Its keys name the inputs and outputs of the exported file.
        remember: ``(batch, memory) -> memory``, called once the actions are known, with ``batch["actions"]``.
        reads_rewards: Whether ``batch["rewards"]`` is needed: float32 ``[B]``, the reward of each row's
            previous action, 0 at the beginning of an episode.
        forward_exploration: ``(batch, memory, generator) -> (batch, memory)``, replaces `forward` while the policy
            explores; None: `forward` is used. Exported files do not explore.
    """

    forward: Callable[[Batch, Memory], tuple[Batch, Memory]] = _unchanged
    initial_memory: Memory = field(default_factory=dict)
    remember: Callable[[Batch, Memory], Memory] = _kept
    reads_rewards: bool = False
    forward_exploration: Callable[[Batch, Memory, Any], tuple[Batch, Memory]] | None = None


class _RecomputesAfterInit(SignatureOfInit, abc.ABCMeta):
    """Metaclass that computes a piece's output spaces after its ``__init__``.

    This allows a subclass to set its attributes before or after ``super().__init__(...)``.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        piece = super().__call__(*args, **kwargs)
        if (made := _recorded.get()) is not None:
            made[id(piece)] = (piece, args, kwargs)
        piece.check_signatures()
        piece._is_constructed = True
        piece._recompute_output_spaces()
        return piece


class ConnectorV2(BatchItemMethods, Checkpointable, metaclass=_RecomputesAfterInit):
    """Base class of all connector pieces and pipelines.

    Subclasses implement `__call__`. Those that change spaces also override
    `recompute_output_observation_space` and/or `recompute_output_action_space`.

    Example::

        class RewardSign(ConnectorV2):
            def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):
                for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
                    episode.set_rewards(new_data=np.sign(episode.get_rewards()))
                return batch

    Args:
        input_observation_space: Observation space of one env (multi-agent: a Dict by agent id); usually set by the
            pipeline that contains the piece.
        input_action_space: Action space of one env, likewise.
        kwargs: Ignored here, so that subclasses may pass on all their arguments.
    """

    checkpoint_name = "connector"

    stage: ClassVar[int] = 1
    """Place of the piece in a pipeline that runs on rows: stages rise, and the last piece is of `LAST_STAGE` or later.

    Pieces of the default stage come first and see the episodes' columns. Default pieces lay out their results.
    """

    step_columns: ClassVar[tuple[str, ...] | None] = None
    """Columns that a learner piece adds to single steps of a stateless module; None: it needs whole chunks."""

    writes_episodes: ClassVar[bool] = False
    """Whether episodes store the observations that this piece returns."""

    agent_by_agent: ClassVar[bool] = True
    """Whether `transform_observations` depends on the agent (``rows.agent_id``, spaces, statistics).

    If not, it gets the rows of all agents of a module in one call, with agent_id None.
    """

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: object,
    ) -> None:
        self._input_observation_space = input_observation_space
        self._input_action_space = input_action_space

    # Here, so that a subclass need not call `__init__`.
    _input_observation_space: gym.Space[Any] | None = None
    _input_action_space: gym.Space[Any] | None = None
    _observation_space: gym.Space[Any] | None = None
    _action_space: gym.Space[Any] | None = None
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
        **kwargs: object,
    ) -> dict[str, Any]:
        """Change or extend the batch (in place or not) and return it.

        Args:
            rl_module: The RLModule or MultiRLModule; None if a piece needs none.
            batch: In one of the phases above.
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, or an EpisodeBatch.
            explore: Whether actions are exploratory. False in learner pipelines.
            shared_data: Scratch dict shared by the pieces of one call. Env-to-module and module-to-env pipelines
                share one between two full resets.
            metrics: MetricsLogger or None.
        """

    def check_signatures(self) -> None:
        """Check that the methods a subclass writes take the arguments that they get.

        Raises:
            ConfigurationError: One does not.
        """
        check_takes(self.__call__, f"{type(self).__name__}.__call__", by_name=_ARGUMENTS)

    # -- spaces ---------------------------------------------------------------------------------

    def recompute_output_observation_space(
        self,
        input_observation_space: gym.Space[Any] | None,
        input_action_space: gym.Space[Any] | None,
    ) -> gym.Space[Any] | None:
        """Return the observation space after this piece. The default is the input space."""
        return input_observation_space

    def recompute_output_action_space(
        self,
        input_observation_space: gym.Space[Any] | None,
        input_action_space: gym.Space[Any] | None,
    ) -> gym.Space[Any] | None:
        """Return the action space after this piece. The default is the input space."""
        return input_action_space

    @property
    def input_observation_space(self) -> gym.Space[Any] | None:
        """Observation space before this piece. Setting it recomputes the output spaces."""
        return self._input_observation_space

    @input_observation_space.setter
    def input_observation_space(self, space: gym.Space[Any] | None) -> None:
        self.set_input_spaces(space, self._input_action_space)

    @property
    def input_action_space(self) -> gym.Space[Any] | None:
        """Action space before this piece. Setting it recomputes the output spaces."""
        return self._input_action_space

    @input_action_space.setter
    def input_action_space(self, space: gym.Space[Any] | None) -> None:
        self.set_input_spaces(self._input_observation_space, space)

    def set_input_spaces(
        self, observation_space: gym.Space[Any] | None, action_space: gym.Space[Any] | None
    ) -> None:
        """Set both input spaces at once and recompute both output spaces."""
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
        """Observation space after this piece; None while the input space is unknown."""
        return self._observation_space

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """Action space after this piece; None while the input space is unknown."""
        return self._action_space

    # -- state ----------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Return the full state as plain dicts, numbers, strings and arrays; ``{}`` for stateless pieces."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state` exactly."""

    def reset_state(self) -> None:
        """Reset to the state after construction."""

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of several copies of this piece into one. By default, return the first one."""
        return dict(states[0]) if states else {}

    @property
    def has_delta(self) -> bool:
        """Whether `get_delta` may return anything."""
        return any(
            getattr(type(self), name) is not getattr(ConnectorV2, name) for name in ("get_state", "get_delta")
        )

    def get_delta(self) -> dict[str, Any]:
        """Return and reset the delta since the last call (plain data); by default, return the state. ``{}``: none."""
        return self.get_state()

    def merge_deltas(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Merge the deltas of other copies of this piece into this one's state. By default, with `merge_states`."""
        if merged := self.merge_states(deltas):
            self.set_state(merged)

    def apply_merged_state(self, state: dict[str, Any]) -> None:
        """Load the merged state of all copies, and keep this piece's unsent delta."""
        self.set_state(state)

    def freeze_statistics(self) -> None:
        """Stop learning from samples, for evaluation. By default, do nothing."""

    # -- rows (see rlzmq.connectors.rows) -------------------------------------------------------

    @property
    def has_row_form(self) -> bool:
        """Whether the piece works on rows: no subclass overrides only `__call__`, the form for episodes."""
        mro = type(self).__mro__
        called = next(i for i, cls in enumerate(mro) if "__call__" in vars(cls))
        return any(name in vars(cls) for cls in mro[: called + 1] for name in _ROW_FORMS)

    @property
    def makes_train_rows(self) -> bool:
        """Whether `train_rows` does anything."""
        names = ("train_rows", "transform_observations", "compute_columns")
        return any(getattr(type(self), name) is not getattr(ConnectorV2, name) for name in names)

    @property
    def transforms_observations(self) -> bool:
        """Whether the piece has its own `transform_observations`."""
        return type(self).transform_observations is not ConnectorV2.transform_observations

    @property
    def last_step_only(self) -> bool:
        """Whether a call handles only each episode's last observation. Learner pipelines reject such pieces."""
        return self.writes_episodes

    @property
    def required_lookback(self) -> int:
        """Number of earlier steps of an episode that the piece needs (frame stacking: frames - 1)."""
        return 0

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """Transform many observations, the row form of `__call__`.

        Args:
            observations: Tree of arrays ``[N, ...]``. Do not modify them in place.
            rows: The facts about each row, and the values before it.

        Returns:
            A new tree of arrays ``[N, ...]`` that fits `observation_space`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not transform rows of observations.")

    def compute_columns(self, episodes: EpisodeBatch) -> dict[str, Any]:
        """Compute the columns that a learner piece adds, a row form of `__call__`.

        Returns:
            Column name -> array ``[num_env_steps, ...]``, with rows in the order of
            ``episodes.step_slots()``.
        """
        return {}

    def train_rows(self, rows: TrainRows) -> None:
        """Add the piece's part to a train batch, the row form of `__call__` in a learner pipeline.

        By default, observations go through `transform_observations`, and the columns of `compute_columns` are added.
        """
        if self.transforms_observations:
            rows.observation_pieces.append(self)
        rows.add_step_columns(self.compute_columns(rows.episodes))

    # -- tensors (see TorchPiece) ---------------------------------------------------------------

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """Return the piece as operations on tensors, for ``rlzmq export`` and ``rlzmq serve``.

        Statistics become constants. A subclass that changes `__call__` needs its own method.

        Args:
            rl_module: The acting RLModule.
            agent_id: The agent that it acts for; None in single-agent use.

        Raises:
            ConfigurationError: The piece has no form in torch operations.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no form in torch operations: write {type(self).__name__}.to_torch(self, *, "
            "rl_module, agent_id), which returns a TorchPiece (see docs/deploy.md)."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def unchanged_on_tensors(self: ConnectorV2, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
    """Return the `to_torch` of a piece that only changes a batch's layout, which tensors have already."""
    return TorchPiece()


def name_set(names: Any) -> set[Any] | None:
    """Return one name or several as a set of names, or None."""
    if names is None:
        return None
    return {names} if isinstance(names, str) else set(names)
