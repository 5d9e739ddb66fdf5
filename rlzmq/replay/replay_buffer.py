"""ReplayBuffer: the base class of all replay buffers, and of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

import numpy as np

__all__ = ["ReplayBuffer"]

_ANY = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


class ReplayBuffer(ABC):
    """Stores episodes, and draws what DQN, SAC, TD3 and TQC train on.

    Set your own with ``training(replay_buffer_config={"type": MyBuffer, "capacity": 100_000})``. Other keys are
    arguments of the constructor, except ``beta``, which `sample` gets. Every learner has its own buffer, and
    ``capacity`` is its share. Derive from `EpisodeReplayBuffer` if only the draws differ.
    """

    uses_priorities: ClassVar[bool] = False
    """Whether `sample` takes ``beta``, the exponent of importance weights, and `update_priorities` is called."""

    draws_sequences: ClassVar[bool] = False
    """Whether `sample` has the further arguments of `EpisodeReplayBuffer.sample`, for modules with a state."""

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
    def add(self, episodes: Any) -> None:
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

    def update_priorities(self, td_errors: Any, keys: Any = None) -> None:  # noqa: B027
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
