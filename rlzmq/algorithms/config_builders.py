"""What a config builds: connector pipelines, module specs, learners, algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tracebacks import ShortTraceback
from rlzmq.envs.multi_agent_env import MultiAgentEnv, agent_spaces
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm
    from rlzmq.algorithms.async_algorithm import AsyncAlgorithm

__all__ = ["ConfigBuilders"]


class ConfigBuilders:
    """The part of AlgorithmConfig that makes things out of the settings."""

    _values: dict[str, Any]
    _algo_class: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

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
        from rlzmq.algorithms.presets import apply_preset, find_preset
        from rlzmq.algorithms.registry import algorithm_of

        config: Any = cls()
        algorithm = algorithm_of(cls)
        found = find_preset(algorithm, env)
        config.environment(found)
        apply_preset(config, algorithm, found)
        return config  # type: ignore[no-any-return]

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

    def build_async(self, env: Any = None, *, use_copy: bool = True) -> AsyncAlgorithm:
        """An AsyncAlgorithm: use it as ``async with config.build_async() as algo``."""
        from rlzmq.algorithms.async_algorithm import AsyncAlgorithm

        with ShortTraceback():
            return AsyncAlgorithm(self._for_build(env, use_copy))

    def _for_build(self, env: Any, use_copy: bool) -> Any:
        config: Any = self.copy(copy_frozen=False) if use_copy else self
        if env is not None:
            config.environment(env)
        config.validate()
        if config.seed is None:
            import secrets

            config.seed = secrets.randbits(31)
        config.freeze()
        return config

    def _algorithm_class(self) -> Any:
        algo_class = self._algo_class or self._default_algo_class()
        if algo_class is None:
            raise ConfigurationError(
                f"{type(self).__name__} names no algorithm: use an algorithm's own config, e.g. PPOConfig(), "
                "or AlgorithmConfig(algo_class=YourAlgorithm)."
            )
        return algo_class

    def _default_algo_class(self) -> Any:
        """The Algorithm that this config class is of. Algorithms override this."""
        return None

    # -- environments and spaces ----------------------------------------------------------------

    def single_spaces(self, env: Any = None, spaces: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """(observation space, action space) of one env: given, the env's, or by making one env."""
        if spaces and "__env_single__" in spaces:
            observation_space, action_space = spaces["__env_single__"]
            return observation_space, action_space
        if env is not None and not isinstance(env, str):
            return single_spaces_of(env)
        if self.observation_space is not None and self.action_space is not None:
            return self.observation_space, self.action_space
        from rlzmq.envs.registry import make_env

        made = make_env(env if env is not None else self.env, self.env_config)
        try:
            self._check_agents(made)
            observation_space, action_space = single_spaces_of(made)
        finally:
            made.close()
        return self.observation_space or observation_space, self.action_space or action_space

    def _check_agents(self, env: Any) -> None:
        """Refuse an env of several agents without, and one of a single agent with, `multi_agent` settings."""
        name = type(env).__name__
        agents = list(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or ())
        if isinstance(env, MultiAgentEnv) and not self.is_multi_agent:
            raise ConfigurationError(
                f"config.env: {name} has several agents ({', '.join(map(repr, agents[:8]))}), but the config is for a "
                "single one. Say which module acts for which agent: .multi_agent(policies={'shared'}, "
                "policy_mapping_fn=lambda agent_id, episode: 'shared')."
            )
        if not isinstance(env, MultiAgentEnv) and (agents or self.is_multi_agent):
            wrapper = "PettingZooEnv" if hasattr(env, "agent_iter") else "ParallelPettingZooEnv"
            raise ConfigurationError(
                f"config.env: {name} has several agents, but is no MultiAgentEnv. Wrap a PettingZoo env: "
                f"register_env('mine', lambda config: {wrapper}(make_it())), with .environment('mine')."
                if agents
                else f"config.env: {name} has a single agent, but the config has multi_agent() settings (modules "
                f"{self.module_ids}). Leave them out, or give a MultiAgentEnv (make_multi_agent makes one)."
            )

    # -- connectors -----------------------------------------------------------------------------

    def build_env_to_module_connector(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, device: Any = None
    ) -> Any:
        """The EnvToModulePipeline: the user's pieces, then the default ones.

        Args:
            env: The (vector) env, passed to the user's callable.
            spaces: ``{"__env__": (obs, act), "__env_single__": (obs, act)}``; wins over `env`.
            device: Torch device of the module's inputs.
        """
        from rlzmq.connectors.defaults import build_env_to_module

        return build_env_to_module(self, env, self._all_spaces(env, spaces), device)

    def build_module_to_env_connector(self, env: Any = None, spaces: Mapping[str, Any] | None = None) -> Any:
        """The ModuleToEnvPipeline: default pieces with the user's in the middle."""
        from rlzmq.connectors.defaults import build_module_to_env

        return build_module_to_env(self, env, self._all_spaces(env, spaces))

    def build_learner_connector(self, observation_space: Any, action_space: Any, device: Any = None) -> Any:
        """The LearnerConnectorPipeline of this algorithm.

        Args:
            observation_space: Of one env (multi-agent: a Dict by agent id).
            action_space: Likewise.
            device: Torch device of the train batch.
        """
        from rlzmq.connectors.defaults import build_learner

        return build_learner(self, observation_space, action_space, device)

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

    def get_default_rl_module_spec(self) -> Any:
        """The algorithm's own RLModuleSpec (without spaces). Algorithms override this."""
        from rlzmq.modules.spec import RLModuleSpec

        return RLModuleSpec()

    @property
    def rl_module_spec(self) -> Any:
        """The spec that was set, or the algorithm's own."""
        given = self._values["rl_module_spec"]
        return self.get_default_rl_module_spec() if given is None else given

    @property
    def _default_model_config(self) -> dict[str, Any]:
        """The algorithm's own model settings, under the user's. Algorithms override this."""
        return {}

    @property
    def model_config(self) -> dict[str, Any]:
        """The model settings: the algorithm's own with the user's over them."""
        return {**self._default_model_config, **_as_dict(self._values["model_config"])}

    def get_rl_module_spec(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool | None = None
    ) -> Any:
        """The RLModuleSpec of the one module of a single-agent config."""
        specs = self.get_multi_rl_module_spec(env=env, spaces=spaces, inference_only=bool(inference_only))
        return specs.rl_module_specs[DEFAULT_MODULE_ID]

    def get_multi_rl_module_spec(
        self, *, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool = False
    ) -> Any:
        """The MultiRLModuleSpec of all modules, with spaces as env-to-module leaves them.

        Args:
            env: The (vector) env to take spaces from.
            spaces: ``{module id: (obs, act)}`` as `EnvRunner.get_spaces()` gives, or as for
                `build_env_to_module_connector`.
            inference_only: Leave out what only the Learner needs, and learner-only modules.
        """
        from rlzmq.algorithms.module_specs import multi_rl_module_spec

        return multi_rl_module_spec(self, env, spaces, inference_only)

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
        config: Any = self
        if policies is not None:
            config = self.copy(copy_frozen=False)
            config.multi_agent(policies=policies)
        specs = config.get_multi_rl_module_spec(env=env, spaces=spaces).rl_module_specs
        return dict(specs), self.should_update

    # -- learners -------------------------------------------------------------------------------

    def get_default_learner_class(self) -> Any:
        """The algorithm's Learner class. Algorithms override this."""
        from rlzmq.learners.learner import TorchLearner

        return TorchLearner

    @property
    def learner_class(self) -> Any:
        """The Learner class: the one that was set, or the algorithm's own."""
        return self._values["learner_class"] or self.get_default_learner_class()

    def build_learner(self, *, env: Any = None, spaces: Mapping[str, Any] | None = None) -> Any:
        """A built Learner, for use on its own."""
        module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        learner = self.learner_class(config=self, module_spec=module_spec)
        learner.build()
        return learner

    def build_learner_group(self, *, env: Any = None, spaces: Mapping[str, Any] | None = None) -> Any:
        """A LearnerGroup on its own, for custom loops (sync face)."""
        from rlzmq.runtime.learner_group import LearnerGroup

        return LearnerGroup(config=self, module_spec=self.get_multi_rl_module_spec(env=env, spaces=spaces))


def single_spaces_of(env: Any) -> tuple[Any, Any]:
    """(observation space, action space) of one of a vector env's envs, or of a plain env."""
    if hasattr(env, "single_observation_spaces"):
        return env.single_observation_spaces, env.single_action_spaces
    if isinstance(env, MultiAgentEnv):
        return agent_spaces(env)
    observation_space = getattr(env, "single_observation_space", None) or env.observation_space
    action_space = getattr(env, "single_action_space", None) or env.action_space
    return observation_space, action_space


def _as_dict(model_config: Any) -> dict[str, Any]:
    if model_config is None:
        return {}
    if isinstance(model_config, Mapping):
        return dict(model_config)
    if hasattr(model_config, "to_dict"):
        return dict(model_config.to_dict())
    raise ConfigurationError(
        f"config.model_config: expected a dict or DefaultModelConfig, got {type(model_config).__name__}."
    )
