"""AlgorithmConfig: the settings of a run, and the objects built from them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlzmq.algorithms.registry import find_preset
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.model_config import model_config_to_dict
from rlzmq.config.settings import NotProvided as NotProvided
from rlzmq.connectors import defaults
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import LazyModule
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tracebacks import short_traceback
from rlzmq.core.trust import CALLER, find_code
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

if TYPE_CHECKING:
    import gymnasium as gym

    from rlzmq.algorithms import async_algorithm
    from rlzmq.algorithms.algorithm import Algorithm
    from rlzmq.connectors.pipelines import EnvToModulePipeline, LearnerConnectorPipeline, ModuleToEnvPipeline
    from rlzmq.driver import sync_groups
    from rlzmq.learners.learner import Learner
else:  # they import sockets, which a config does not need
    async_algorithm = LazyModule("rlzmq.algorithms.async_algorithm")
    sync_groups = LazyModule("rlzmq.driver.sync_groups")

__all__ = ["AlgorithmConfig"]

_log = logging.getLogger("rlzmq.algorithms")


class AlgorithmConfig(BaseConfig):
    """The settings of a run, with chainable setters. It is frozen when an Algorithm is built from it.

    Every setter returns the config itself. Unknown keys (with the closest valid name) and values of a wrong type or
    out of range raise an error in the call. Settings are read as attributes.

    Example:
        >>> config = (
        ...     PPOConfig()
        ...     .environment("CartPole-v1")
        ...     .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
        ...     .training(lr=3e-4, train_batch_size_per_learner=2000)
        ... )
        >>> config.lr
        0.0003
    """

    # The parts of an algorithm are named by strings, since importing them imports torch.
    _algorithm: ClassVar[str] = ""  # public name of its Algorithm class
    _learner_class: ClassVar[str] = "rlzmq.learners.learner:TorchLearner"
    _module_class: ClassVar[str] = ""  # the default actor-critic

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("rlzmq."):  # import rlzmq.algorithms.ppo as ppo; ppo.PPO
            vars(sys.modules[cls.__module__])["__getattr__"] = vars(sys.modules["rlzmq"])["__getattr__"]

    @classmethod
    def preset(cls, name: str, env: Any = None) -> Self:
        """Return a config with settings that are known to learn an environment; each can still be changed.

        Args:
            name: Name of the preset, usually the environment's id. Case is ignored, and the version may be omitted.
                ``rlzmq presets`` lists them. The environment is set, too.
            env: Another environment, or the one for a preset of several.

        Raises:
            ConfigurationError: There is no such preset; the text suggests the closest name.

        Example:
            >>> config = PPOConfig.preset("CartPole-v1").training(lr=3e-4)
        """
        config = cls()
        found = find_preset(cls._algorithm.lower(), name)
        found.apply(config, name if env is None and found.matches(name) else env)
        return config

    # -- algorithms -----------------------------------------------------------------------------

    @short_traceback
    def build_algo(self, env: Any = None, *, use_copy: bool = True) -> Algorithm:
        """Return a started Algorithm.

        Args:
            env: Overrides `config.env`.
            use_copy: Whether to build from a frozen copy; otherwise this config itself is frozen.

        Raises:
            ConfigurationError: The settings are inconsistent.
        """
        return self._algorithm_class()(self._for_build(env, use_copy))  # type: ignore[no-any-return]

    @short_traceback
    def build(self, env: Any = None, *, use_copy: bool = True) -> Algorithm:
        """Call `build_algo`."""
        return self.build_algo(env, use_copy=use_copy)

    @short_traceback
    def build_async(self, env: Any = None, *, use_copy: bool = True) -> async_algorithm.AsyncAlgorithm:
        """Return an AsyncAlgorithm, for use as ``async with config.build_async() as algo``."""
        return async_algorithm.AsyncAlgorithm(self._for_build(env, use_copy))

    def build_notes(self) -> list[str]:
        """Return what a reader of these settings might expect otherwise, a line each; logged when a run is built."""
        if self.num_learners < 2:
            return []
        batch, ranks = self.train_batch_size_per_learner, self.num_learners
        return [
            f"{ranks} learners train {batch} env steps each, so an update has {batch * ranks}; lr and minibatch_size "
            "are each learner's and do not depend on their number."
        ]

    def _for_build(self, env: object, use_copy: bool) -> Self:
        config = super()._for_build(env, use_copy)
        for note in config.build_notes():
            _log.info(note)
        return config

    def _default_algo_class(self) -> Any:
        """Return the Algorithm class of this config class or of its nearest base."""
        public = importlib.import_module("rlzmq")  # explains a failing import
        return getattr(public, self._algorithm) if self._algorithm else None

    # -- connectors -----------------------------------------------------------------------------

    def build_env_to_module_connector(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, device: Any = None
    ) -> EnvToModulePipeline:
        """Return the EnvToModulePipeline: the user's pieces, then the default ones.

        Args:
            env: The (vector) env, passed to the user's callable.
            spaces: ``{"__env__": (obs, act), "__env_single__": (obs, act)}``; takes precedence over `env`.
            device: Torch device of the module's inputs.
        """
        return defaults.build_env_to_module(self, env, self._all_spaces(env, spaces), device)

    def build_module_to_env_connector(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None
    ) -> ModuleToEnvPipeline:
        """Return the ModuleToEnvPipeline: the user's pieces between the default ones."""
        return defaults.build_module_to_env(self, env, self._all_spaces(env, spaces))

    def build_learner_connector(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], device: Any = None
    ) -> LearnerConnectorPipeline:
        """Return the LearnerConnectorPipeline of this algorithm.

        Args:
            observation_space: Observation space of one env (multi-agent: a Dict by agent id).
            action_space: Action space of one env (multi-agent: a Dict by agent id).
            device: Torch device of the train batch.
        """
        return defaults.build_learner(self, observation_space, action_space, device)

    def _all_spaces(self, env: object, spaces: Mapping[str, Any] | None) -> dict[str, Any]:
        if spaces:
            full = dict(spaces)
            full.setdefault("__env_single__", full.get("__env__"))
            full.setdefault("__env__", full["__env_single__"])
            return full
        single = self.single_spaces(env)
        vector = getattr(env, "observation_space", None), getattr(env, "action_space", None)
        return {"__env__": vector if vector[0] is not None else single, "__env_single__": single}

    # -- modules --------------------------------------------------------------------------------

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the algorithm's default RLModuleSpec (without spaces). Algorithms override this."""
        return RLModuleSpec(module_class=self._module_class or None)

    def get_rl_module_spec(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool | None = None
    ) -> RLModuleSpec:
        """Return the RLModuleSpec of a single-agent config's only module."""
        specs = self.get_multi_rl_module_spec(env=env, spaces=spaces, inference_only=bool(inference_only))
        return specs.rl_module_specs[DEFAULT_MODULE_ID]

    def get_multi_rl_module_spec(
        self, *, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool = False
    ) -> MultiRLModuleSpec:
        """Return the MultiRLModuleSpec of all modules, with the spaces that the env-to-module pipeline produces.

        Missing fields of the user's specs come from the algorithm's default spec and the config's `model_config`.

        Args:
            env: The (vector) env whose spaces are used.
            spaces: ``{module id: (obs, act)}`` from `EnvRunner.get_spaces()`, or see `build_env_to_module_connector`.
            inference_only: Whether to leave out learner-only modules and the parts that only learners need.

        Raises:
            ConfigurationError: The spaces of a module cannot be determined; the text names the module.
        """
        given = _given_specs(self)
        known = _module_spaces(self, env, spaces, list(given))
        filled = {}
        for module_id, own in given.items():
            module_config = self.get_config_for_module(module_id)
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
                    f"Module {module_id!r} has no {missing}: no agent of the env is mapped to it, or the "
                    f"env_to_module_connector's spaces lack it. Set it with RLModuleSpec({missing}=…), or check "
                    "policy_mapping_fn." + did_you_mean(module_id, known.keys() - {module_id})
                )
            spec.model_config = {**module_config.model_config, **model_config_to_dict(spec.model_config)}
            spec.inference_only = inference_only
            filled[module_id] = spec
        outer = self.rl_module_spec if isinstance(self.rl_module_spec, MultiRLModuleSpec) else None
        result = MultiRLModuleSpec(rl_module_specs=filled, inference_only=inference_only)
        if outer is not None:
            result.multi_rl_module_class = outer.given_class
            result.model_config = outer.model_config
        return result

    def get_multi_agent_setup(
        self,
        *,
        policies: Any = None,
        env: Any = None,
        spaces: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], Callable[[str, Any], bool]]:
        """Return the module specs, and the rule that selects the trained modules.

        Args:
            policies: Replaces `config.policies`.
            env: See `get_multi_rl_module_spec`.
            spaces: See `get_multi_rl_module_spec`.

        Returns:
            (``{module id: its RLModuleSpec, with spaces}``, ``fn(module_id, batch) -> whether it is trained``).
        """
        config = self
        if policies is not None:
            config = self.copy(copy_frozen=False)
            config.multi_agent(policies=policies)
        specs = config.get_multi_rl_module_spec(env=env, spaces=spaces).rl_module_specs
        return dict(specs), self.should_update

    # -- learners -------------------------------------------------------------------------------

    def get_default_learner_class(self) -> type[Learner]:
        """Return the algorithm's Learner class. Algorithms override this."""
        return find_code(self._learner_class, CALLER)  # type: ignore[no-any-return]

    def build_learner(self, *, env: Any = None, spaces: Mapping[str, Any] | None = None) -> Learner:
        """Return a built Learner, for custom loops and tests."""
        module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        learner: Learner = self.learner_class(config=self, module_spec=module_spec)
        learner.build()
        return learner

    def build_learner_group(
        self, *, env: Any = None, spaces: Mapping[str, Any] | None = None
    ) -> sync_groups.LearnerGroup:
        """Return a LearnerGroup with blocking methods, for custom loops."""
        return sync_groups.LearnerGroup(
            config=self, module_spec=self.get_multi_rl_module_spec(env=env, spaces=spaces)
        )


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
    config: BaseConfig, env: object, spaces: Mapping[str, Any] | None, module_ids: list[str]
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
    return {**defaults.module_spaces(config, pipeline.observation_space, action_space), **known}
