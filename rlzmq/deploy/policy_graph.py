"""PolicyGraph: a policy with its connectors as one function of tensors, without hidden state.

observations, rewards ─► env-to-module pieces ─► module ─► module-to-env pieces ─► the env's actions
               state ─►  (previous frames, module state, previous actions)  ─► next state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import optree
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.connectors.connector_v2 import Batch, ConnectorV2, TorchPiece
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.tree import tree_flatten, tree_leaves, tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["FlatPolicyGraph", "GraphOutputs", "PolicyGraph", "Port", "StatelessGraph", "zeros_of"]

# A class that overrides one of these, but not `to_torch`, behaves differently from its inherited `to_torch`.
_BEHAVIOR = ("__call__", "transform_observations", "preprocess", "apply_vectorized")


@dataclass(frozen=True)
class GraphOutputs:
    """The outputs of a PolicyGraph.

    Attributes:
        actions: The env's actions, a tree of tensors ``[B, ...]``.
        state: The next state, with the structure of the given one.
        dist_inputs: The module's ``action_dist_inputs``, float32 ``[B, K]``; None if it returned none.
    """

    actions: Any
    state: dict[str, Any]
    dist_inputs: torch.Tensor | None


class PolicyGraph(torch.nn.Module):
    """A policy of one agent as a function of tensors, with frozen statistics and explicit state.

    Each of the B rows is a step of a different episode.

    Args:
        policy: The policy; later changes of its weights take effect.

    Attributes:
        observation_space, action_space: The agent's spaces in the env.
        initial_state: The policy's memory at the beginning of an episode: name -> tree of arrays without batch axis;
            {} for stateless policies.
        reads_rewards: Whether it needs the reward of the previous action.
        module_id, agent_id: See `Policy.acting_module`.

    Raises:
        ConfigurationError: A connector piece has no `to_torch`, or the policy plays several agents.
    """

    agent_id: Any
    module: Any
    module_id: str

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.module_id, self.module, self.agent_id = policy.acting_module()
        self.observation_space: gym.Space[Any] = policy.observation_space
        self.action_space: gym.Space[Any] = policy.action_space
        self._num_env_steps = policy.num_env_steps_sampled
        pipelines = policy.pipelines()
        self._before = self._pieces_of(pipelines["env_to_module_connector"])
        self._after = self._pieces_of(pipelines["module_to_env_connector"])
        # For each piece: (the piece's name of a part of its memory, the name in the state).
        self._names: list[list[tuple[str, str]]] = []
        self.initial_state: dict[str, Any] = {}
        for piece in (*self._before, *self._after):
            names = [(name, self._free_name(name)) for name in piece.initial_memory]
            for name, unique in names:
                self.initial_state[unique] = tree_map(np.asarray, piece.initial_memory[name])
            self._names.append(names)
        self.reads_rewards: bool = any(piece.reads_rewards for piece in (*self._before, *self._after))

    def _free_name(self, name: str) -> str:
        number, unique = 1, name
        while unique in self.initial_state:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def _pieces_of(self, pipeline: Any) -> list[TorchPiece]:
        pieces = pipeline.flat
        found = []
        for index, piece in enumerate(pieces):
            try:
                if not _is_current(piece):
                    return [ConnectorV2.to_torch(piece, rl_module=self.module, agent_id=self.agent_id)]
                found.append(piece.to_torch(rl_module=self.module, agent_id=self.agent_id))
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"connector piece {type(piece).__name__!r} (number {index + 1} of {len(pieces)} in "
                    f"{type(pipeline).__name__}): {error}"
                ) from None
        return found

    def forward(
        self,
        observations: Any,
        state: dict[str, Any],
        rewards: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GraphOutputs:
        """Compute the actions of B episodes for one step.

        Args:
            observations: Tree of tensors ``[B, ...]`` of the observation space's dtypes.
            state: `initial_state` as B rows, or the state after the previous step.
            rewards: float32 ``[B]``, the reward of the previous action, 0 at the beginning of an episode; None
                unless `reads_rewards`.
            generator: Samples the actions from the exploration distribution; None: greedy actions.
        """
        batch: Batch = {Columns.OBS: observations}
        if rewards is not None:
            batch[Columns.REWARDS] = rewards
        memories = [{name: state[unique] for name, unique in names} for names in self._names]
        batch = self._run(self._before, 0, batch, memories, generator)
        batch.pop(Columns.REWARDS, None)
        if generator is None:
            batch = dict(self.module._forward_inference(batch))
        else:
            batch = dict(self.module._forward_exploration(batch, t=self._num_env_steps))
        batch = self._run(self._after, len(self._before), batch, memories, generator)
        next_state = {}
        for piece, names, memory in zip((*self._before, *self._after), self._names, memories, strict=True):
            remembered = piece.remember(batch, memory)
            next_state.update({unique: remembered[name] for name, unique in names})
        actions = batch.get(Columns.ACTIONS_FOR_ENV, batch[Columns.ACTIONS])
        return GraphOutputs(actions, next_state, batch.get(Columns.ACTION_DIST_INPUTS))

    @staticmethod
    def _run(
        pieces: Sequence[TorchPiece],
        first: int,
        batch: Batch,
        memories: list[Any],
        generator: torch.Generator | None,
    ) -> Batch:
        for index, piece in enumerate(pieces, first):
            if generator is not None and piece.forward_exploration is not None:
                batch, memories[index] = piece.forward_exploration(batch, memories[index], generator)
            else:
                batch, memories[index] = piece.forward(batch, memories[index])
        return dict(batch)


def _is_current(piece: ConnectorV2) -> bool:
    """Return whether `to_torch` is defined in the same class as the piece's behavior, or in a subclass of it."""
    for cls in type(piece).__mro__:
        if "to_torch" in vars(cls):
            return True
        if any(name in vars(cls) for name in _BEHAVIOR):
            return False
    return False


@dataclass(frozen=True)
class Port:
    """An input or output of an exported policy.

    Attributes:
        name: Its name, e.g. ``"obs"``, ``"obs.door"``, ``"state.module.h"``, ``"actions"``.
        dtype: Its numpy dtype.
        shape: Its shape without the batch axis.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class StatelessGraph(Protocol):
    """A policy of one agent as a function of tensors, with explicit state; see `PolicyGraph`."""

    agent_id: Any
    module_id: str
    action_space: gym.Space[Any]
    observation_space: gym.Space[Any]
    initial_state: dict[str, Any]
    reads_rewards: bool

    def __call__(
        self,
        observations: Any,
        state: dict[str, Any],
        rewards: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GraphOutputs:
        """Compute the actions of B episodes for one step."""


class FlatPolicyGraph(torch.nn.Module):
    """A graph that maps a list of tensors to a tuple of tensors, in the order of `inputs` and `outputs`.

    Inputs are ``obs…``, ``rewards`` (if the graph reads them) and ``state…``; outputs ``action_dist_inputs`` (if
    the module has them), ``actions…`` and ``next_state…``, with one next state per state.

    Args:
        graph: The graph. It is called once.

    Attributes:
        policy: The graph.
        inputs, outputs: The name, dtype and shape of each tensor.
    """

    def __init__(self, graph: StatelessGraph) -> None:
        super().__init__()
        self.policy = graph
        tree: dict[str, Any] = {
            "obs": zeros_of(graph.observation_space, 1),
            "state": self.initial_rows(1),
        }
        if graph.reads_rewards:
            tree["rewards"] = np.zeros(1, np.float32)
        leaves, self._spec = tree_flatten(tree)
        self.inputs: list[Port] = _ports(tree)
        with torch.inference_mode():
            self.outputs: list[Port] = _ports(self._run([torch.from_numpy(leaf) for leaf in leaves]))

    def initial_rows(self, num_rows: int) -> dict[str, Any]:
        """Return the state of `num_rows` new episodes, a tree of arrays ``[num_rows, ...]``."""
        rows: dict[str, Any] = tree_map(
            lambda leaf: np.repeat(leaf[None], num_rows, axis=0), self.policy.initial_state
        )
        return rows

    def _run(
        self, tensors: Sequence[torch.Tensor], generator: torch.Generator | None = None
    ) -> dict[str, Any]:
        tree = self._spec.unflatten(tensors)
        outputs = self.policy(tree["obs"], tree["state"], tree.get("rewards"), generator)
        named = {"actions": outputs.actions, "next_state": outputs.state}
        if outputs.dist_inputs is not None:
            named["action_dist_inputs"] = outputs.dist_inputs
        return named

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute greedy actions and the next state; see the class."""
        return tuple(tree_leaves(self._run(tensors)))

    def explore(self, generator: torch.Generator, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sample actions from the exploration distribution and compute the next state; see the class."""
        return tuple(tree_leaves(self._run(tensors, generator)))

    def flat_inputs(self, observations: Any, rewards: Any, state: object) -> list[np.ndarray]:
        """Return the inputs as a list of arrays, from trees of arrays ``[B, ...]``."""
        tree = {"obs": observations, "state": state}
        if self.policy.reads_rewards:
            tree["rewards"] = rewards
        return [np.ascontiguousarray(leaf) for leaf in tree_leaves(tree)]

    def nested_outputs(self, arrays: Sequence[np.ndarray]) -> tuple[Any, dict[str, Any], Any]:
        """Return (actions, next state, ``action_dist_inputs`` or None) as trees, from the list of outputs."""
        by_kind: dict[str, list[np.ndarray]] = {}
        for port, array in zip(self.outputs, arrays, strict=True):
            by_kind.setdefault(port.name.partition(".")[0], []).append(array)
        actions = tree_flatten(zeros_of(self.policy.action_space, 1))[1].unflatten(by_kind["actions"])
        state = tree_flatten(self.policy.initial_state)[1].unflatten(by_kind.get("next_state", []))
        return actions, state, by_kind.get("action_dist_inputs", [None])[0]


def zeros_of(space: gym.Space[Any], num_rows: int) -> Any:
    """Return zeros in the shape of `num_rows` values of a space, as a tree of arrays.

    Raises:
        UnsupportedSpaceError: A part of the space does not hold numbers of a fixed shape.
    """
    if isinstance(space, gym.spaces.Dict):
        return {key: zeros_of(part, num_rows) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(zeros_of(part, num_rows) for part in space.spaces)
    if space.shape is None or space.dtype is None or space.dtype.kind not in "biuf":
        raise UnsupportedSpaceError(
            f"expected a space of numbers (Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them), "
            f"got {space}: its values are not tensors."
        )
    return np.zeros((num_rows, *space.shape), space.dtype)


def _ports(tree: Any) -> list[Port]:
    paths = optree.tree_paths(tree, none_is_leaf=True)
    leaves = [np.asarray(leaf) for leaf in tree_leaves(tree)]
    return [
        Port(".".join(map(str, path)), leaf.dtype, leaf.shape[1:])
        for path, leaf in zip(paths, leaves, strict=True)
    ]
