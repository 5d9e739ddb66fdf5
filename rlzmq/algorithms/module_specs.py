"""The module specs of a config, with the spaces of each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Dict as DictSpace

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.common.agent_to_module_mapping import module_spaces
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, default_agent_to_module_mapping_fn
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

__all__ = ["multi_rl_module_spec"]


def multi_rl_module_spec(
    config: BaseConfig, env: Any, spaces: Mapping[str, Any] | None, inference_only: bool
) -> MultiRLModuleSpec:
    """Return the specs of all modules of `config`, with spaces, classes and model settings filled in.

    Missing fields of the user's specs come from the algorithm's default spec, the config's `model_config`, and the
    spaces that the env-to-module pipeline produces.

    Raises:
        ConfigurationError: The spaces of a module cannot be determined; the text names the module.
    """
    given = _given_specs(config)
    known = _module_spaces(config, env, spaces, list(given))
    filled = {}
    for module_id, own in given.items():
        module_config = config.get_config_for_module(module_id)
        spec = module_config.get_default_rl_module_spec()
        if own is not None:
            if own.learner_only and inference_only:
                continue
            spec.update(own, override=True)
        observation_space, action_space = known.get(module_id, (None, None))
        if spec.observation_space is None:
            spec.observation_space = observation_space
        if spec.action_space is None:
            spec.action_space = action_space
        if spec.observation_space is None or spec.action_space is None:
            missing = "observation_space" if spec.observation_space is None else "action_space"
            raise ConfigurationError(
                f"Module {module_id!r} has no {missing}: no agent of the env is mapped to it. Set it with "
                f"RLModuleSpec({missing}=…), or check policy_mapping_fn." + did_you_mean(module_id, known)
            )
        spec.model_config = _merged(module_config.model_config, spec.model_config)
        spec.inference_only = inference_only
        filled[module_id] = spec
    outer = config.rl_module_spec if isinstance(config.rl_module_spec, MultiRLModuleSpec) else None
    result = MultiRLModuleSpec(rl_module_specs=filled, inference_only=inference_only)
    if outer is not None:
        result.multi_rl_module_class = outer.given_class
        result.model_config = outer.model_config
    return result


def _given_specs(config: BaseConfig) -> dict[str, RLModuleSpec | None]:
    specs: dict[str, RLModuleSpec | None] = dict.fromkeys(config.module_ids)
    outer = config.rl_module_spec
    if isinstance(outer, MultiRLModuleSpec):
        specs.update(dict(outer.rl_module_specs))
    elif isinstance(outer, RLModuleSpec):
        specs = dict.fromkeys(specs, outer)
    elif outer is not None:
        raise ConfigurationError(
            f"config.rl_module_spec: expected an RLModuleSpec or MultiRLModuleSpec, got {type(outer).__name__}."
        )
    if isinstance(config.policies, Mapping):
        specs.update({mid: s for mid, s in config.policies.items() if isinstance(s, RLModuleSpec)})
    return specs


def _module_spaces(
    config: BaseConfig, env: Any, spaces: Mapping[str, Any] | None, module_ids: list[str]
) -> dict[str, tuple[Any, Any]]:
    spaces = dict(spaces or {})
    known = {mid: tuple(spaces[mid]) for mid in module_ids if mid in spaces}
    if len(known) == len(module_ids):
        return known
    if not config.is_multi_agent and DEFAULT_MODULE_ID in known:
        return {**dict.fromkeys(module_ids, known[DEFAULT_MODULE_ID]), **known}
    observation_space, action_space = config.single_spaces(env, spaces)
    pipeline = config.build_env_to_module_connector(
        env=env, spaces={"__env_single__": (observation_space, action_space)}
    )
    observation_space = pipeline.observation_space
    if not config.is_multi_agent:
        return {**dict.fromkeys(module_ids, (observation_space, action_space)), **known}
    if not isinstance(observation_space, DictSpace) or not isinstance(action_space, DictSpace):
        return {mid: known.get(mid, (observation_space, action_space)) for mid in module_ids}
    mapping_fn = config.policy_mapping_fn or default_agent_to_module_mapping_fn
    told = module_spaces(module_ids, mapping_fn, observation_space, action_space)
    return {**told, **known}


def _merged(base: Mapping[str, Any], own: Any) -> dict[str, Any]:
    if own is None:
        return dict(base)
    return {**base, **(own if isinstance(own, Mapping) else own.to_dict())}
