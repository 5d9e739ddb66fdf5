"""ReplayBuffer: the base class of all replay buffers, and of your own; division of states among buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

import numpy as np

from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["ReplayBuffer", "divide_buffers", "divide_states"]

_ANY = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


class ReplayBuffer(ABC):
    """Stores episodes, and draws what DQN, SAC, TD3 and TQC train on.

    Set your own with ``training(replay_buffer_config={"type": MyBuffer, "capacity": 100_000})``. Other keys are
    arguments of the constructor, except ``beta``, which `sample` gets. Every learner has its own buffer, and
    ``capacity`` is its share. Derive from `EpisodeReplayBuffer` if only the draws differ.
    """

    uses_priorities: ClassVar[bool] = False
    """Whether `sample` takes ``beta``, the exponent of importance weights."""

    divides_by_module: ClassVar[bool] = False
    """Whether each module's steps are stored and drawn for themselves, so that `keep_modules` is called."""

    draws_sequences: ClassVar[bool] = False
    """Whether `sample` has the further arguments of `EpisodeReplayBuffer.sample`, for modules with a state."""

    keeps_extra_model_outputs: bool | Collection[str] = True
    """Whether extra model outputs are stored, or those of which modules."""

    @classmethod
    def from_config(cls, config: object, **arguments: Any) -> Self:
        """Return a learner's buffer.

        Args:
            config: The AlgorithmConfig.
            arguments: Arguments of the constructor.
        """
        return cls(**arguments)

    @classmethod
    def settings(cls) -> list[str]:
        """Return the names of the constructor's arguments."""
        names: dict[str, None] = {}
        for klass in cls.__mro__:
            init = vars(klass).get("__init__")
            parameters = signature(init).parameters if init else {}
            named = {name: p for name, p in parameters.items() if p.kind not in _ANY}
            names |= dict.fromkeys(name for name in named if name != "self")
            if parameters and len(named) == len(parameters):
                break
        return list(names)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of stored env steps."""

    @abstractmethod
    def add(self, episodes: object) -> None:
        """Store steps.

        Args:
            episodes: An EpisodeBatch, which is a list of chunks of episodes. The next chunk of an episode comes with a
                later call.
        """

    @abstractmethod
    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """Draw transitions.

        Args:
            num_items: Their number.
            n_step: Number of rewards in a sum, or a range from which it is drawn.
            gamma: Discount of the rewards in a sum.
            rng: Source of all randomness, which makes runs repeatable.

        Returns:
            An EpisodeBatch, or a list of SingleAgentEpisodes, of one step each. Columns that losses read if they are
            there: ``weights``, ``n_step`` (the number of rewards in the sum), ``replay_key``.
        """

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return all that is stored, as plain values and arrays, for checkpoints."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`."""

    def draw(self, module_id: str, num_items: int, *, num_samples: int = 1, **options: Any) -> Sequence[Any]:
        """Draw items of a module's steps: a sample, or up to `num_samples` if the buffer can draw them at once."""
        return [self.sample(num_items, **options)]

    def of_module(self, module_id: str) -> ReplayBuffer:
        """Return the buffer of a module's steps."""
        return self

    def get_module_ids(self) -> list[str]:
        """Return the ids of the modules with stored steps."""
        return [DEFAULT_MODULE_ID] if len(self) else []

    def keep_modules(self, module_ids: Collection[str]) -> None:  # noqa: B027
        """Remove the steps of other modules, and store only those of these modules from now on."""

    def update_priorities(self, td_errors: object, keys: object = None) -> None:  # noqa: B027
        """Take in the TD errors of drawn items, float [K], with their values of ``replay_key``; ignored by default."""

    def mark(self) -> None:  # noqa: B027
        """Make later calls of `add` undoable. By default, a repeated update adds its steps again."""

    def undo(self) -> None:  # noqa: B027
        """Remove what was added since `mark`."""

    @property
    def num_bytes(self) -> int:
        """Size of the stored steps in bytes."""
        return 0

    def get_metrics(self) -> dict[str, Any]:
        """Return counts for the results."""
        return {}


def divide_states(states: Sequence[Mapping[str, Any]], num_ranks: int) -> list[dict[str, Any]] | None:
    """Divide the states of all ranks' replay buffers among a different number of ranks.

    Args:
        states: Results of `BatchSource.get_state`, by rank.
        num_ranks: The new number of ranks.

    Returns:
        A state for each rank; None if the states are not those of rlzmq's own buffers.
    """
    if not all({"episodes", "counts", "rng"} <= state.get("buffer", {}).keys() for state in states):
        return None
    return [{"buffer": state} for state in divide_buffers([state["buffer"] for state in states], num_ranks)]


def divide_buffers(states: Sequence[Mapping[str, Any]], num_buffers: int) -> list[dict[str, Any]]:
    """Divide all stored steps among buffers. Stretches of one episode stay together; the oldest steps come first.

    Args:
        states: Results of `get_state` of single-agent or of multi-agent buffers, all with the same columns.
        num_buffers: Number of buffers, >= 1.

    Returns:
        A state per buffer, for `set_state`. Its counters start at the number of steps that it holds.
    """
    batches = [EpisodeBatch.from_wire(*state["episodes"]) for state in states]
    whole = EpisodeBatch.concat(batches)
    order = np.argsort(np.concatenate([np.arange(len(batch)) for batch in batches]), kind="stable")
    places: dict[str, int] = {}
    place = np.array(
        [places.setdefault(whole.episode_ids[c], len(places) % num_buffers) for c in order.tolist()],
        np.int64,
    )
    greatest = _greatest_priorities([state["counts"] for state in states])
    return [
        {
            "episodes": list(whole.select(order[place == number]).to_wire()),
            "counts": greatest,
            "rng": states[0]["rng"],
        }
        for number in range(num_buffers)
    ]


def _greatest_priorities(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the only counts of buffers that others inherit, of the buffer or by module."""
    modules = {module_id for of_buffer in counts for module_id in of_buffer.get("modules", ())}
    by_module = {
        module_id: _greatest_priorities([of["modules"].get(module_id, {}) for of in counts])
        for module_id in sorted(modules)
    }
    known = [of_buffer["greatest"] for of_buffer in counts if "greatest" in of_buffer]
    return ({"greatest": max(known)} if known else {}) | ({"modules": by_module} if by_module else {})
