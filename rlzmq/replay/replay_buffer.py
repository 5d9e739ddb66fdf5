"""ReplayBuffer: the base class of all replay buffers, and of your own; division of states among buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

__all__ = ["ReplayBuffer", "divide_buffers", "divide_states"]

_ANY = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


class ReplayBuffer(ABC):
    """Stores episodes, and draws what DQN, SAC, TD3 and TQC train on.

    Set your own with ``training(replay_buffer_config={"type": MyBuffer, "capacity": 100_000})``. Other keys are
    arguments of the constructor, except ``beta``, which `sample` gets. Every learner has its own buffer, and
    ``capacity`` is its share. Derive from `EpisodeReplayBuffer` if only the draws differ.
    """

    uses_priorities: ClassVar[bool] = False
    """Whether `sample` takes ``beta``, the exponent of importance weights, and `update_priorities` is called."""

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

    @property
    def num_agent_steps_not_kept(self) -> int:
        """Number of agent steps, over the lifetime, that were left out or removed by `keep_modules`."""
        return 0

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


_PER_STRETCH = ("episode_ids", "t_started", "length", "initial_state")
_FLAGS = ("terminated", "truncated")


def divide_states(states: Sequence[Mapping[str, Any]], num_ranks: int) -> list[dict[str, Any]] | None:
    """Divide the states of all ranks' replay buffers among a different number of ranks.

    Args:
        states: Results of `BatchSource.get_state`, by rank.
        num_ranks: The new number of ranks.

    Returns:
        A state for each rank; None if the states are not those of rlzmq's own buffers.
    """
    if not all({"columns", "modules"} & state.get("buffer", {}).keys() for state in states):
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
    places: dict[str, int] = {}
    if not any("modules" in state for state in states):
        return _divided(states, num_buffers, places)
    # Each buffer numbers its own env steps.
    offsets = np.cumsum([0, *(int(state["env_steps"]["num_added"]) for state in states)])
    modules: list[dict[str, Any]] = [{} for _ in range(num_buffers)]
    for module_id in sorted({module_id for state in states for module_id in state["modules"]}):
        own = [
            {**mine, "env_steps": np.asarray(mine["env_steps"]) + offset}
            for state, offset in zip(states, offsets[:-1], strict=True)
            if (mine := state["modules"].get(module_id)) is not None
        ]
        for by_module, part in zip(modules, _divided(own, num_buffers, places), strict=True):
            by_module[module_id] = part
    return [_of_modules(by_module, states[0]) for by_module in modules]


def _of_modules(modules: dict[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a multi-agent buffer's state with these modules' states; env steps are numbered from 0."""
    numbers = np.unique(np.concatenate([state["env_steps"] for state in modules.values()]))
    for state in modules.values():
        state["env_steps"] = np.searchsorted(numbers, state["env_steps"])
    episodes = {_episode_of(chunk) for state in modules.values() for chunk in state["episode_ids"]}
    return {
        "modules": modules,
        "env_steps": {"chunks": {}, "num_added": len(numbers), "first": 0},
        "agents": {},
        "num_episodes_added": len(episodes),
        "rng": like["rng"],
    }


def _divided(
    states: Sequence[Mapping[str, Any]], num_buffers: int, places: dict[str, int]
) -> list[dict[str, Any]]:
    """Divide the steps of single-agent states; `places` maps each known episode to its buffer."""
    dealt = [_stretches(state) for state in states]
    parts: list[list[_Stretch]] = [[] for _ in range(num_buffers)]
    for position in range(max(map(len, dealt), default=0)):
        for mine in dealt:
            if position < len(mine):
                stretch = mine[position]
                episode_id = (
                    _episode_of(stretch.episode_id) if "env_steps" in states[0] else stretch.episode_id
                )
                place = places.setdefault(episode_id, len(places) % num_buffers)
                parts[place].append(stretch)
    return [_joined(part, states[0]) for part in parts]


def _episode_of(agent_episode_id: str) -> str:
    """Return the id of the multi-agent episode that contains an agent's episode of a multi-agent buffer."""
    return agent_episode_id.partition("/")[0]


class _Stretch:
    """Consecutive steps of one episode in a state: rows ``first … first + length``; the last row has no step."""

    def __init__(self, state: Mapping[str, Any], index: int, first_row: int, first_step: int) -> None:
        self.state = state
        self.index = index
        self.length = int(state["length"][index])
        self.rows: NDArray[np.int64] = np.arange(first_row, first_row + self.length + 1)
        self.steps = slice(first_step, first_step + self.length)
        self.episode_id = str(state["episode_ids"][index])


def _stretches(state: Mapping[str, Any]) -> list[_Stretch]:
    stretches, row, step = [], 0, 0
    for index, length in enumerate(state["length"]):
        stretches.append(_Stretch(state, index, row, step))
        row, step = row + int(length) + 1, step + int(length)
    return stretches


def _joined(stretches: Sequence[_Stretch], like: Mapping[str, Any]) -> dict[str, Any]:
    num_steps = sum(stretch.length for stretch in stretches)
    joined: dict[str, Any] = {"columns": {}, "infos": {}, "rng": like["rng"]}
    if stretches:
        for name in like["columns"]:
            taken = [
                tree_map(lambda leaf, rows=stretch.rows: leaf[rows], stretch.state["columns"][name])
                for stretch in stretches
            ]
            joined["columns"][name] = tree_map(lambda *leaves: np.concatenate(leaves), *taken)
    row = 0
    for stretch in stretches:
        infos = stretch.state["infos"]
        joined["infos"] |= {
            row + offset: infos[at] for offset, at in enumerate(stretch.rows.tolist()) if at in infos
        }
        row += len(stretch.rows)
    for name in _PER_STRETCH:
        joined[name] = [stretch.state[name][stretch.index] for stretch in stretches]
    for name in _FLAGS:
        joined[name] = np.array([bool(stretch.state[name][stretch.index]) for stretch in stretches], bool)
    num_episodes = len(set(joined["episode_ids"]))
    joined["counters"] = dict.fromkeys(like["counters"], 0) | {
        "added": num_steps,
        "episodes_added": num_episodes,
    }
    for name in ("priorities", "env_steps"):
        if name in like:
            parts = [np.asarray(stretch.state[name])[stretch.steps] for stretch in stretches]
            joined[name] = np.concatenate([np.asarray(like[name])[:0], *parts])
    if "priorities" in like:
        joined["greatest_priority"] = max(
            [float(stretch.state["greatest_priority"]) for stretch in stretches],
            default=float(like["greatest_priority"]),
        )
    return joined
