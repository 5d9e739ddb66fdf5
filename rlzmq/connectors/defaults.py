"""Builds a config's pipelines from user and default pieces, in RLlib's order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors import common, env_to_module, learner, module_to_env
from rlzmq.connectors.common import FrameStacking
from rlzmq.connectors.common.agent_to_module_mapping import agents_of_modules
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import PrevActionsPrevRewards
from rlzmq.connectors.observation_pieces import AgentPiece
from rlzmq.connectors.pipelines import (
    ConnectorPipelineV2,
    EnvToModulePipeline,
    LearnerConnectorPipeline,
    ModuleToEnvPipeline,
    flat_pieces,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.columns import default_agent_to_module_mapping_fn

__all__ = [
    "add_estimator",
    "add_next_observations",
    "build_env_to_module",
    "build_learner",
    "build_module_to_env",
    "change_modules",
    "module_spaces",
    "users_pieces",
]

_HERE = "config.env_runners(env_to_module_connector=…)"
_PREPROCESSORS = (
    env_to_module.FlattenObservations,
    env_to_module.SingleAgentObservationPreprocessor,
    env_to_module.MultiAgentObservationPreprocessor,
)


def build_env_to_module(
    config: BaseConfig, env: Any = None, spaces: Mapping[str, Any] | None = None, device: Any = None
) -> EnvToModulePipeline:
    """Build the env-to-module pipeline: the user's pieces, then the default ones.

    If the model settings enable ``lstm_use_prev_action`` or ``lstm_use_prev_reward``, a PrevActionsPrevRewards piece is
    added between them, unless the user's pieces include one.

    Args:
        config: AlgorithmConfig.
        env: The (vector) env; passed to the user's callable.
        spaces: ``{"__env__": (obs, act), "__env_single__": (obs, act)}``; the latter are the pipeline's
            input spaces. None: the env's own.
        device: Torch device of the module's inputs.

    Raises:
        ConfigurationError: The user's callable did not return a piece or a list of pieces, or their order cannot work.
    """
    setting = "env_to_module_connector"
    observation_space, action_space = _single_spaces(env, spaces)
    pieces = users_pieces(config, setting, {"env": env, "spaces": spaces, "device": device})
    if config.add_default_connectors_to_env_to_module_pipeline:
        pieces += _previous_pieces(config, pieces)
        pieces += [
            common.AddObservationsFromEpisodesToBatch(),
            common.AddTimeDimToBatchAndZeroPad(),
            common.AddStatesFromEpisodesToBatch(),
            *_mapping_pieces(config, as_learner_connector=False),
            common.BatchIndividualItems(multi_agent=config.is_multi_agent),
            common.NumpyToTensor(device=device),
        ]
    _check_env_to_module_order(pieces)
    pipeline = EnvToModulePipeline(observation_space, action_space, connectors=pieces)
    pipeline.time_pieces = config.connector_timers
    if config.in_evaluation:
        pipeline.freeze_statistics()
    return pipeline


def build_module_to_env(
    config: BaseConfig, env: Any = None, spaces: Mapping[str, Any] | None = None
) -> ModuleToEnvPipeline:
    """Build the module-to-env pipeline: the user's pieces between the default ones.

    Arguments and errors are those of `build_env_to_module`.
    """
    setting = "module_to_env_connector"
    observation_space, action_space = _single_spaces(env, spaces)
    pieces = users_pieces(config, setting, {"env": env, "spaces": spaces})
    if config.add_default_connectors_to_module_to_env_pipeline:
        multi_agent = config.is_multi_agent
        pieces = [
            module_to_env.GetActions(),
            module_to_env.TensorToNumpy(),
            module_to_env.UnBatchToIndividualItems(),
            *([module_to_env.ModuleToAgentUnmapping()] if multi_agent else []),
            module_to_env.RemoveSingleTsTimeRankFromBatch(),
            *pieces,
            module_to_env.NormalizeAndClipActions(
                normalize_actions=config.normalize_actions, clip_actions=config.clip_actions
            ),
            module_to_env.ListifyDataForVectorEnv(),
        ]
    pipeline = ModuleToEnvPipeline(observation_space, action_space, connectors=pieces)
    pipeline.time_pieces = config.connector_timers
    return pipeline


def build_learner(
    config: BaseConfig, observation_space: Any = None, action_space: Any = None, device: Any = None
) -> LearnerConnectorPipeline:
    """Build the learner pipeline: the user's pieces, then the default ones.

    Algorithms add their own pieces; see `add_estimator` and `add_next_observations`.

    Args:
        config: AlgorithmConfig.
        observation_space: Observation space of one env (multi-agent: a Dict by agent id), or None.
        action_space: Action space of one env, likewise.
        device: Torch device of the train batch.

    Raises:
        ConfigurationError: See `build_env_to_module`.
    """
    arguments = {
        "observation_space": observation_space,
        "action_space": action_space,
        "device": device,
    }
    aliases = {"input_observation_space": "observation_space", "input_action_space": "action_space"}
    pieces = users_pieces(config, "learner_connector", arguments, aliases)
    if config.add_default_connectors_to_learner_pipeline:
        pieces += [
            common.AddObservationsFromEpisodesToBatch(as_learner_connector=True),
            learner.AddColumnsFromEpisodesToTrainBatch(),
            common.AddTimeDimToBatchAndZeroPad(as_learner_connector=True),
            common.AddStatesFromEpisodesToBatch(as_learner_connector=True),
            *_mapping_pieces(config, as_learner_connector=True),
            common.BatchIndividualItems(multi_agent=config.is_multi_agent),
            common.NumpyToTensor(as_learner_connector=True, device=device),
        ]
    _check_learner_order(pieces)
    pipeline = LearnerConnectorPipeline(observation_space, action_space, connectors=pieces)
    pipeline.time_pieces = config.connector_timers
    return pipeline


def add_estimator(pipeline: LearnerConnectorPipeline, estimator: learner.WholeBatchEstimator) -> None:
    """Add an estimator as the last piece, and as the first piece the one that gives each chunk an extra step."""
    pipeline.prepend(learner.AddOneTsToEpisodesAndTruncate())
    pipeline.append(estimator)


def add_next_observations(pipeline: LearnerConnectorPipeline) -> None:
    """Add next observations after observations to a learner pipeline, for DQN and SAC."""
    pipeline.insert_after(
        common.AddObservationsFromEpisodesToBatch, learner.AddNextObservationsFromEpisodesToTrainBatch()
    )


def change_modules(pipeline: ConnectorPipelineV2, config: BaseConfig) -> None:
    """Update a built pipeline for the current modules and agent mapping.

    The pieces keep their states; the spaces are propagated again.
    """
    for piece in pipeline.flat:
        if isinstance(piece, common.AgentToModuleMapping):
            piece.change_modules(_specs(config), _mapping_fn(config))
    pipeline.set_input_spaces(pipeline.input_observation_space, pipeline.input_action_space)


def module_spaces(
    config: BaseConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> dict[str, tuple[Any, Any]]:
    """Return (observation space, action space) by module id; modules that no agent is mapped to are left out.

    Args:
        config: AlgorithmConfig.
        observation_space: Space after the env-to-module pipeline; of several agents: by module id, or by agent id.
        action_space: Action space of one env; of several agents: by agent id.
    """
    module_ids = list(config.module_ids)
    if not config.is_multi_agent or not isinstance(action_space, gym.spaces.Dict):
        return dict.fromkeys(module_ids, (observation_space, action_space))
    by_name = getattr(observation_space, "spaces", {})
    of_agents = {agent: (by_name.get(agent), space) for agent, space in action_space.spaces.items()}
    agents = agents_of_modules(_mapping_fn(config), of_agents, module_ids)
    return {
        module_id: (by_name.get(module_id, by_name.get(agent)), action_space[agent])
        for module_id, agent in (
            (module_id, agents[module_id]) for module_id in module_ids if module_id in agents
        )
    }


def _mapping_pieces(config: BaseConfig, *, as_learner_connector: bool) -> list[ConnectorV2]:
    if not config.is_multi_agent:
        return []
    return [
        common.AgentToModuleMapping(
            rl_module_specs=_specs(config),
            agent_to_module_mapping_fn=_mapping_fn(config),
            as_learner_connector=as_learner_connector,
        )
    ]


def _mapping_fn(config: BaseConfig) -> Callable[..., Any]:
    return config.policy_mapping_fn or default_agent_to_module_mapping_fn


def _specs(config: BaseConfig) -> object:
    """Return module id -> spec (or None), from the policies or, if there are none, the MultiRLModuleSpec."""
    specs = getattr(config.rl_module_spec, "rl_module_specs", None)
    policies = config.policies
    if isinstance(specs, Mapping) and isinstance(policies, Mapping):
        return {module_id: spec or specs.get(module_id) for module_id, spec in policies.items()}
    return policies if specs is None else specs


def _previous_pieces(config: BaseConfig, pieces: Sequence[ConnectorV2]) -> list[ConnectorV2]:
    """Return a list with a PrevActionsPrevRewards piece if any module's settings need it, else an empty list."""
    num_actions, num_rewards = (
        int(any(settings.get(f"lstm_use_prev_{what}") for settings in _model_settings(config)))
        for what in ("action", "reward")
    )
    if not num_actions + num_rewards:
        return []
    if any(isinstance(piece, PrevActionsPrevRewards) for piece in flat_pieces(pieces)):
        return []
    return [
        PrevActionsPrevRewards(
            multi_agent=config.is_multi_agent, n_prev_actions=num_actions, n_prev_rewards=num_rewards
        )
    ]


def _model_settings(config: BaseConfig) -> list[dict[str, Any]]:
    """Return the model settings of the config, of its specs, and of its modules' overrides."""
    outer, policies = config.rl_module_spec, config.policies
    specs = [outer, *(getattr(outer, "rl_module_specs", None) or {}).values()]
    specs += policies.values() if isinstance(policies, Mapping) else []
    overrides = config.algorithm_config_overrides_per_module.values()
    found = [getattr(source, "model_config", None) for source in (config, *specs)]
    found += [values.get("model_config") for values in overrides if isinstance(values, Mapping)]
    return [
        dict(settings) if isinstance(settings, Mapping) else dict(vars(settings))
        for settings in found
        if settings is not None
    ]


def _single_spaces(env: object, spaces: Mapping[str, Any] | None) -> tuple[Any, Any]:
    if spaces:
        pair = spaces.get("__env_single__") or spaces.get("__env__")
        if pair is not None:
            return pair[0], pair[1]
    observation_space = getattr(env, "single_observation_space", None)
    action_space = getattr(env, "single_action_space", None)
    if observation_space is None:
        observation_space = getattr(env, "observation_space", None)
    if action_space is None:
        action_space = getattr(env, "action_space", None)
    return observation_space, action_space


def users_pieces(
    config: BaseConfig, setting: str, arguments: dict[str, Any], aliases: Mapping[str, str] | None = None
) -> list[ConnectorV2]:
    """Return the user's pieces for one pipeline, from the config's callable (or piece)."""
    value = getattr(config, setting)
    if value is None:
        return []
    if isinstance(value, ConnectorV2):
        given: Any = value
    elif isinstance(value, type) and issubclass(value, ConnectorV2):
        given = value()
    else:
        given = _called(value, setting, arguments, aliases or {})
    if given is None:
        return []
    pieces = [given] if isinstance(given, ConnectorV2) else given
    if not isinstance(pieces, (list, tuple)) or not all(isinstance(piece, ConnectorV2) for piece in pieces):
        raise ConfigurationError(
            f"config.{setting}: expected a ConnectorV2 piece or a list of them, got {given!r} "
            f"({type(given).__name__})."
        )
    for piece in flat_pieces(pieces):
        if isinstance(piece, AgentPiece) and piece.of_agents != config.is_multi_agent:
            raise ConfigurationError(
                f"config.{setting}: {type(piece).__name__} has multi_agent={piece.of_agents}, but the config is for "
                f"{'several agents' if config.is_multi_agent else 'one agent'}. "
                f"Set multi_agent={config.is_multi_agent}."
            )
    return list(pieces)


def _called(func: Any, setting: str, arguments: dict[str, Any], aliases: Mapping[str, str]) -> object:
    """Call the user's function with those arguments that it accepts, by name or else by position."""
    given = list(arguments.values())
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return func(*given)
    known = {**arguments, **{alias: arguments[name] for alias, name in aliases.items()}}
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    by_name = dict(arguments) if inspect.Parameter.VAR_KEYWORD in kinds else {}
    by_name |= {name: known[name] for name in signature.parameters if name in known}
    ways: list[tuple[list[Any], dict[str, Any]]] = [([], by_name)]
    ways += [(given[:num], {}) for num in range(1, len(given) + 1)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        ways = [(given, {})]
    for args, kwargs in ways:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return func(*args, **kwargs)
    raise ConfigurationError(
        f"config.{setting}: expected a function of ({', '.join(arguments)}), or of fewer of them, got "
        f"{getattr(func, '__qualname__', func)}{signature}."
    )


def _check_env_to_module_order(pieces: Sequence[ConnectorV2]) -> None:
    """Check the order of an env-to-module pipeline's pieces. What custom pieces add is unknown."""
    adder: ConnectorV2 | None = None  # the piece that has added observations to the batch
    may_be_added = False
    for piece in flat_pieces(pieces):
        name = type(piece).__name__
        if isinstance(piece, FrameStacking):
            if isinstance(adder, FrameStacking):
                raise ConfigurationError(
                    f"{_HERE}: {name} is there twice, and both stack the episodes' single frames. Keep one, with a "
                    "larger num_frames."
                )
            if adder is not None:
                raise ConfigurationError(
                    f"{_HERE}: {name} comes after {type(adder).__name__}, which has added the single frames already. "
                    "Put it before."
                )
            adder = piece
        elif isinstance(piece, common.AddObservationsFromEpisodesToBatch):
            adder = adder or piece
        elif isinstance(piece, env_to_module.WriteObservationsToEpisodes):
            if isinstance(adder, FrameStacking):
                raise ConfigurationError(
                    f"{_HERE}: {name} after {type(adder).__name__} would store stacked observations, which are "
                    "stacked again at the next step. Episodes keep single frames: leave it out."
                )
            if adder is None and not may_be_added:
                raise ConfigurationError(
                    f"{_HERE}: {name} copies observations from the batch, and no piece before it adds any. Put it "
                    "after your piece that does."
                )
        elif piece.writes_episodes or (isinstance(piece, _PREPROCESSORS) and piece.last_step_only):
            if adder is not None:
                raise ConfigurationError(
                    f"{_HERE}: {name} comes after {type(adder).__name__}, which has added the observations to the "
                    f"batch already, so the module would not get what {name} makes of them. Put it before."
                )
        else:
            may_be_added = True


def _check_learner_order(pieces: Sequence[ConnectorV2]) -> None:
    """Check the pieces of a learner pipeline."""
    flat = flat_pieces(pieces)
    stacking = [piece for piece in flat if isinstance(piece, FrameStacking)]
    where = "config.training(learner_connector=…)"
    if len(stacking) > 1:
        raise ConfigurationError(
            f"{where}: {type(stacking[1]).__name__} is there twice, and both stack the episodes' single frames. Keep "
            "one, with the num_frames of the env runners."
        )
    if stacking and any(isinstance(piece, env_to_module.FlattenObservations) for piece in flat):
        raise ConfigurationError(
            f"{where}: FlattenObservations and {type(stacking[0]).__name__} cannot both be in a learner pipeline. "
            "Flatten in config.env_runners(env_to_module_connector=…), before frames are stacked: episodes then hold "
            "flat observations, which the learner gets."
        )
