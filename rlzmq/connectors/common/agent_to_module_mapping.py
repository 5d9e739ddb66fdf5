"""Which module acts for whom: AgentToModuleMapping, the mapping of agents, and queries about modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import gymnasium as gym

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.connector_v2 import ConnectorV2, unchanged_on_tensors
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import place_of_code
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import as_numpy, tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns, default_agent_to_module_mapping_fn

__all__ = [
    "MAP_STRUCTURE",
    "AgentToModuleMapping",
    "agents_of_modules",
    "checked_mapping",
    "initial_state",
    "is_multi_rl_module",
    "max_seq_len",
    "module_for_key",
    "stateful_module_for_key",
]

MAP_STRUCTURE = "memorized_map_structure"
"""Key in shared_data: the owner of each batch row. Single-agent: a list of episode ids; multi-agent: module id ->
list of (episode id, agent id)."""

_LEARNER_COLUMNS = (Columns.ACTIONS, Columns.REWARDS, Columns.LOSS_MASK, Columns.TERMINATEDS)


class AgentToModuleMapping(ConnectorV2):
    """Regroups ``{column: {(episode, agent, module): [items]}}`` to ``{module: {column: [items]}}``.

    In env runners, data of done agents is dropped, since they have no next action.

    Args:
        input_observation_space, input_action_space: See ConnectorV2; Dicts by agent id.
        rl_module_specs: Module id -> RLModuleSpec, or a collection of module ids.
        agent_to_module_mapping_fn: ``fn(agent_id, episode) -> module_id``. Used for the spaces only, since every
            episode knows its agents' modules.
        as_learner_connector: Whether to keep the data of done agents. None: keep it if the batch has columns that
            only learners use (actions, rewards, …).
    """

    stage: ClassVar[int] = 5
    to_torch = unchanged_on_tensors

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        rl_module_specs: Any,
        agent_to_module_mapping_fn: Callable[..., Any],
        as_learner_connector: bool | None = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._rl_module_specs = rl_module_specs
        self._mapping_fn = agent_to_module_mapping_fn
        self._as_learner_connector = as_learner_connector

    def change_modules(self, rl_module_specs: object, agent_to_module_mapping_fn: Callable[..., Any]) -> None:
        """Update the modules and the agent mapping. The arguments are those of the class."""
        self._rl_module_specs = rl_module_specs
        self._mapping_fn = agent_to_module_mapping_fn

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        """Return a Dict by module id."""
        return self._space_by_module(input_observation_space, "observation_space")

    def recompute_output_action_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return a Dict by module id."""
        return self._space_by_module(input_action_space, "action_space")

    def _space_by_module(self, space: gym.Space[Any], which: str) -> object:
        module_ids = list(self._rl_module_specs or ())
        if not isinstance(space, gym.spaces.Dict) or any(mid in space.spaces for mid in module_ids):
            return space
        agents = agents_of_modules(self._mapping_fn, space.spaces, module_ids)
        by_module: dict[Any, Any] = {module_id: space.spaces[agent] for module_id, agent in agents.items()}
        if isinstance(self._rl_module_specs, Mapping):
            for module_id, spec in self._rl_module_specs.items():
                own = getattr(spec, which, None)
                if own is not None:
                    by_module.setdefault(module_id, own)
        return gym.spaces.Dict(by_module)

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2. Columns already grouped by module id are unchanged.

        Raises:
            ValueError: A column is not keyed by (episode, agent, module).
        """
        keeps_done = self._as_learner_connector
        if keeps_done is None:
            keeps_done = any(column in batch for column in _LEARNER_COLUMNS)
        agents = self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False)
        done = set() if keeps_done else {agent.batch_key for agent in agents if agent.is_done}
        structure: dict[Any, list[tuple[Any, Any]]] = {}
        by_module: dict[Any, dict[str, Any]] = {}
        for column, column_data in batch.items():
            if not isinstance(column_data, dict):
                raise ValueError(
                    f"column {column!r}: expected items by (episode, agent, module), got "
                    f"{type(column_data).__name__}. In multi-agent pipelines pass the episode to "
                    "add_batch_item."
                )
            if column_data and not any(isinstance(key, tuple) for key in column_data):
                by_module.setdefault(column, {}).update(column_data)  # a module's columns
                continue
            for key, items in column_data.items():
                if len(key) != 3:
                    raise ValueError(f"column {column!r}: expected keys (episode, agent, module), got {key}.")
                if key in done:
                    continue
                episode_id, agent_id, module_id = key
                by_module.setdefault(module_id, {}).setdefault(column, []).extend(items)
                if column == Columns.OBS:
                    structure.setdefault(module_id, []).extend([(episode_id, agent_id)] * len(items))
        if shared_data is not None:
            shared_data[MAP_STRUCTURE] = structure
        return by_module


# Number of calls, enough for random mapping functions: a module drawn once in 20 calls is missed 6 times in 1,000.
_MAX_ROUNDS = 100


def agents_of_modules(
    mapping_fn: Callable[..., Any],
    spaces: Mapping[Any, Any],
    module_ids: Collection[str],
) -> dict[str, Any]:
    """Return one agent of each module.

    Args:
        mapping_fn: ``fn(agent_id, episode) -> module id``; it may be random. It is called with episodes that have
            only ``id_`` and ``agent_ids``. A function that needs more of an episode is assumed to return any module.
        spaces: Agent id → the facts that distinguish agents, e.g. (observation space, action space).
        module_ids: All modules.

    Returns:
        Module id → agent id. Modules to which no agent is known to be mapped get any agent if all agents are alike,
        and are left out otherwise.
    """
    agents: dict[str, Any] = {}
    for round_ in range(_MAX_ROUNDS):
        episode = SimpleNamespace(id_=str(round_), agent_ids=list(spaces))
        for agent_id in spaces:
            for module_id in _targets(mapping_fn, agent_id, episode, module_ids):
                agents.setdefault(module_id, agent_id)
        if all(module_id in agents for module_id in module_ids):
            break
        first = next(iter(spaces), None)
        if round_ == 0 and spaces and all(space == spaces[first] for space in spaces.values()):
            for module_id in module_ids:
                agents.setdefault(module_id, first)
            break
    return agents


def _targets(
    mapping_fn: Callable[..., Any], agent_id: object, episode: object, module_ids: Collection[str]
) -> Collection[str]:
    try:
        return [str(mapping_fn(agent_id, episode))]
    except Exception:  # the function reads other attributes of the episode
        return module_ids


class _HasConfig(Protocol):
    config: BaseConfig

    @property
    def multi_rl_module(self) -> Any: ...


def checked_mapping(runner: _HasConfig) -> Callable[[Any, Any], str]:
    """Return a function that maps (agent id, episode) to a module id by the runner's ``config.policy_mapping_fn``.

    The function raises ConfigurationError for an unknown module id.
    """

    def mapping_fn(agent_id: Hashable, episode: Any) -> str:
        fn = getattr(runner.config, "policy_mapping_fn", None) or default_agent_to_module_mapping_fn
        module_id = fn(agent_id, episode)
        modules = runner.multi_rl_module
        if not isinstance(module_id, str) or module_id not in modules:
            raise ConfigurationError(
                f"policy_mapping_fn({agent_id!r}, episode) returned {module_id!r}, which is not a module"
                f"{place_of_code(fn)}.{did_you_mean(module_id, list(modules.keys()))}"
            )
        return str(module_id)

    return mapping_fn


AUTO_MAX_SEQ_LEN = 20
"""Number of steps of a training sequence if the model's settings do not define it."""


def is_multi_rl_module(rl_module: Any) -> bool:
    """Return whether `rl_module` maps module ids to modules (MultiRLModule, or a plain dict)."""
    return hasattr(rl_module, "foreach_module") or isinstance(rl_module, Mapping)


def module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Return the module for the items under a batch key; None if it does not exist."""
    if not is_multi_rl_module(rl_module):
        return rl_module
    module_id = key[2] if key is not None and len(key) == 3 else DEFAULT_MODULE_ID
    return rl_module.get(module_id)


def stateful_module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Return the result of `module_for_key` if that module is stateful, else None."""
    module = module_for_key(rl_module, key)
    return module if module is not None and module.is_stateful() else None


def is_stateful(rl_module: Any) -> bool:
    """Return whether any module has a state; False for None."""
    if rl_module is None:
        return False
    if isinstance(rl_module, Mapping):
        return any(module.is_stateful() for module in rl_module.values())
    return bool(rl_module.is_stateful())


def initial_state(module: Any) -> Any:
    """Return the state at the beginning of an episode: a tree of numpy arrays without batch axis."""
    return tree_map(as_numpy, module.get_initial_state())


def max_seq_len(module: Any, key: tuple[Any, ...] | None = None) -> int:
    """Return the length of a stateful module's training sequences.

    It is ``model_config["max_seq_len"]``. "auto", and a missing value with ``use_lstm``, mean 20 steps.

    Raises:
        ValueError: The module's model_config has none.
    """
    config = module.model_config
    value = config.get("max_seq_len") if isinstance(config, Mapping) else getattr(config, "max_seq_len", None)
    if value == "auto" or (value is None and isinstance(config, Mapping) and config.get("use_lstm")):
        return AUTO_MAX_SEQ_LEN
    if not value:
        raise ValueError(
            f"module {key[2] if key and len(key) == 3 else DEFAULT_MODULE_ID!r} is stateful (it has an initial state) "
            'but its model_config has no "max_seq_len": set it to the length of its training sequences, e.g. '
            'model_config={"max_seq_len": 20}.'
        )
    return int(value)
