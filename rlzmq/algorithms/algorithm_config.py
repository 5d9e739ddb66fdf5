"""AlgorithmConfig: the settings of a run, and what is built of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlzmq.algorithms.presets import apply_preset, find_preset
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import load_named
from rlzmq.core.lazy import LazyModule
from rlzmq.core.tracebacks import ShortTraceback
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

if TYPE_CHECKING:
    from rlzmq.algorithms import async_algorithm, module_specs
    from rlzmq.algorithms.algorithm import Algorithm
    from rlzmq.connectors import defaults
    from rlzmq.connectors.pipelines import EnvToModulePipeline, LearnerConnectorPipeline, ModuleToEnvPipeline
    from rlzmq.driver import learner_group
    from rlzmq.learners.learner import Learner
    from rlzmq.modules import spec
    from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
else:  # what a config builds brings torch; a config is made and checked without it
    async_algorithm = LazyModule("rlzmq.algorithms.async_algorithm")
    module_specs = LazyModule("rlzmq.algorithms.module_specs")
    defaults = LazyModule("rlzmq.connectors.defaults")
    spec = LazyModule("rlzmq.modules.spec")
    learner_group = LazyModule("rlzmq.driver.learner_group")

__all__ = ["AlgorithmConfig"]


class AlgorithmConfig(BaseConfig):
    """The settings of a run: set fluently, checked at once, frozen when an Algorithm is built.

    Every setter returns the config itself. An unknown key, a value of the wrong type or out of
    range is refused at the call, with the closest valid name. Settings read as attributes.

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

    # What an algorithm is made of, by name: it brings torch.
    _algorithm: ClassVar[str] = ""  # the public name of its Algorithm class
    _learner_class: ClassVar[str] = "rlzmq.learners.learner:TorchLearner"
    _module_class: ClassVar[str] = ""  # the default actor-critic

    @classmethod
    def preset(cls, env: str) -> Self:
        """The settings that are shipped for a well-known environment; each can be changed as always.

        Args:
            env: Its Gymnasium id; case and version may be left out. The environment is set, too.

        Raises:
            ConfigurationError: There is no preset for it; the text names those there are.

        Example:
            >>> config = PPOConfig.preset("CartPole-v1").training(lr=3e-4)
        """
        config = cls()
        algorithm = cls._algorithm.lower()
        found = find_preset(algorithm, env)
        config.environment(found)
        apply_preset(config, algorithm, found)
        return config

    # -- algorithms -----------------------------------------------------------------------------

    def build_algo(self, env: Any = None, *, use_copy: bool = True) -> Algorithm:
        """A ready Algorithm (sync face): processes started, weights in place.

        Args:
            env: Overrides `config.env`.
            use_copy: Build from a frozen copy (else this very config is frozen).

        Raises:
            ConfigurationError: Settings that do not fit together.
        """
        with ShortTraceback():
            return self._algorithm_class()(self._for_build(env, use_copy))  # type: ignore[no-any-return]

    def build(self, env: Any = None, *, use_copy: bool = True) -> Algorithm:
        """The same as `build_algo`."""
        with ShortTraceback():
            return self.build_algo(env, use_copy=use_copy)

    def build_async(self, env: Any = None, *, use_copy: bool = True) -> async_algorithm.AsyncAlgorithm:
        """An AsyncAlgorithm: use it as ``async with config.build_async() as algo``."""
        with ShortTraceback():
            return async_algorithm.AsyncAlgorithm(self._for_build(env, use_copy))

    def _default_algo_class(self) -> Any:
        """The Algorithm that this config class, or the nearest of its bases, is of."""
        public = importlib.import_module("rlzmq")  # which explains what goes wrong in the import
        return getattr(public, self._algorithm) if self._algorithm else None

    # -- connectors -----------------------------------------------------------------------------

    def build_env_to_module_connector(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, device: Any = None
    ) -> EnvToModulePipeline:
        """The EnvToModulePipeline: the user's pieces, then the default ones.

        Args:
            env: The (vector) env, passed to the user's callable.
            spaces: ``{"__env__": (obs, act), "__env_single__": (obs, act)}``; wins over `env`.
            device: Torch device of the module's inputs.
        """
        return defaults.build_env_to_module(self, env, self._all_spaces(env, spaces), device)

    def build_module_to_env_connector(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None
    ) -> ModuleToEnvPipeline:
        """The ModuleToEnvPipeline: default pieces with the user's in the middle."""
        return defaults.build_module_to_env(self, env, self._all_spaces(env, spaces))

    def build_learner_connector(
        self, observation_space: Any, action_space: Any, device: Any = None
    ) -> LearnerConnectorPipeline:
        """The LearnerConnectorPipeline of this algorithm.

        Args:
            observation_space: Of one env (multi-agent: a Dict by agent id).
            action_space: Likewise.
            device: Torch device of the train batch.
        """
        return defaults.build_learner(self, observation_space, action_space, device)

    def _all_spaces(self, env: Any, spaces: Mapping[str, Any] | None) -> dict[str, Any]:
        if spaces:
            full = dict(spaces)
            full.setdefault("__env_single__", full.get("__env__"))
            full.setdefault("__env__", full["__env_single__"])
            return full
        single = self.single_spaces(env)
        vector = getattr(env, "observation_space", None), getattr(env, "action_space", None)
        return {"__env__": vector if vector[0] is not None else single, "__env_single__": single}

    # -- modules --------------------------------------------------------------------------------

    def get_default_rl_module_spec(self) -> spec.RLModuleSpec:
        """The algorithm's own RLModuleSpec (without spaces). Algorithms override this."""
        return spec.RLModuleSpec(module_class=load_named(self._module_class) if self._module_class else None)

    def get_rl_module_spec(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool | None = None
    ) -> spec.RLModuleSpec:
        """The RLModuleSpec of the one module of a single-agent config."""
        specs = self.get_multi_rl_module_spec(env=env, spaces=spaces, inference_only=bool(inference_only))
        return specs.rl_module_specs[DEFAULT_MODULE_ID]

    def get_multi_rl_module_spec(
        self, *, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool = False
    ) -> MultiRLModuleSpec:
        """The MultiRLModuleSpec of all modules, with spaces as env-to-module leaves them.

        Args:
            env: The (vector) env to take spaces from.
            spaces: ``{module id: (obs, act)}`` as `EnvRunner.get_spaces()` gives, or as for
                `build_env_to_module_connector`.
            inference_only: Leave out what only the Learner needs, and learner-only modules.
        """
        return module_specs.multi_rl_module_spec(self, env, spaces, inference_only)

    def get_multi_agent_setup(
        self,
        *,
        policies: Any = None,
        env: Any = None,
        spaces: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], Callable[[str, Any], bool]]:
        """Who acts, and who learns.

        Args:
            policies: Other module ids or specs than `config.policies`.
            env: As for `get_multi_rl_module_spec`.
            spaces: Likewise.

        Returns:
            (``{module id: its RLModuleSpec, spaces filled in}``, ``fn(module_id, batch) -> whether it is trained``).
        """
        config = self
        if policies is not None:
            config = self.copy(copy_frozen=False)
            config.multi_agent(policies=policies)
        specs = config.get_multi_rl_module_spec(env=env, spaces=spaces).rl_module_specs
        return dict(specs), self.should_update

    # -- learners -------------------------------------------------------------------------------

    def get_default_learner_class(self) -> type[Learner]:
        """The algorithm's Learner class. Algorithms override this."""
        return load_named(self._learner_class)  # type: ignore[no-any-return]

    def build_learner(self, *, env: Any = None, spaces: Mapping[str, Any] | None = None) -> Learner:
        """A built Learner, for use on its own."""
        module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        learner: Learner = self.learner_class(config=self, module_spec=module_spec)
        learner.build()
        return learner

    def build_learner_group(
        self, *, env: Any = None, spaces: Mapping[str, Any] | None = None
    ) -> learner_group.LearnerGroup:
        """A LearnerGroup on its own, for custom loops (sync face)."""
        return learner_group.LearnerGroup(
            config=self, module_spec=self.get_multi_rl_module_spec(env=env, spaces=spaces)
        )
