"""BaseConfig: all settings of a run with their setters, as seen by the layers below the algorithms."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, Unpack

import gymnasium as gym

from rlzmq.config import groups
from rlzmq.config.checks import DerivedValues, check
from rlzmq.config.search_space import find_search_objects
from rlzmq.config.settings import NotProvided, takes
from rlzmq.core.callbacks import HOOKS, Hooks, check_hook, check_hooks
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tracebacks import short_traceback
from rlzmq.envs.multi_agent_env import MultiAgentEnv, agent_spaces, clip_rewards
from rlzmq.envs.registry import EnvEntry, make_env, resolve_env
from rlzmq.envs.vector import check_space

__all__ = ["BaseConfig", "single_spaces_of"]


class BaseConfig(DerivedValues):
    """All settings with their setters. This is the config type of the layers below the algorithms.

    `AlgorithmConfig` implements the `build_…` methods.
    """

    @takes(groups.EnvironmentSettings)
    def environment(self) -> Self:
        """Set the environment; see `EnvironmentSettings`."""
        return self

    @takes(groups.EnvRunnersSettings)
    def env_runners(self) -> Self:
        """Set up sampling; see `EnvRunnersSettings`."""
        return self

    @takes(groups.LearnersSettings)
    def learners(self) -> Self:
        """Set up the learner processes; see `LearnersSettings`."""
        return self

    @takes(groups.TrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `TrainingSettings`. Each algorithm adds its own."""
        return self

    @takes(groups.OfflineDataSettings)
    def offline_data(self) -> Self:
        """Set the recorded data to read and write; see `OfflineDataSettings`."""
        return self

    @takes(groups.EvaluationSettings)
    def evaluation(self) -> Self:
        """Set when and how the current weights are evaluated; see `EvaluationSettings`."""
        return self

    @takes(groups.ReportingSettings)
    def reporting(self) -> Self:
        """Set the length of an iteration and the contents of its result; see `ReportingSettings`."""
        return self

    @takes(groups.MultiAgentSettings)
    def multi_agent(self) -> Self:
        """Set which module acts for which agent; see `MultiAgentSettings`."""
        return self

    @takes(groups.RLModuleSettings)
    def rl_module(self) -> Self:
        """Set the neural networks; see `RLModuleSettings`."""
        return self

    @takes(groups.FaultToleranceSettings)
    def fault_tolerance(self) -> Self:
        """Set how failures are handled; see `FaultToleranceSettings`."""
        return self

    @takes(groups.NetworkingSettings)
    def networking(self) -> Self:
        """Set how processes on other machines join; see `NetworkingSettings`."""
        return self

    @takes(groups.CheckpointingSettings)
    def checkpointing(self) -> Self:
        """Set when checkpoints are written; see `CheckpointingSettings`."""
        return self

    @takes(groups.DebuggingSettings)
    def debugging(self) -> Self:
        """Set seed and logging; see `DebuggingSettings`."""
        return self

    @takes(groups.FrameworkSettings)
    def framework(self) -> Self:  # type: ignore[override]
        """Set the torch options; see `FrameworkSettings`."""
        return self

    @takes(groups.RaySettings)
    def resources(self) -> Self:
        """Take Ray's resources; see `learners()` and `env_runners()` for those of processes."""
        return self

    @takes(groups.RaySettings)
    def python_environment(self) -> Self:
        """Take Ray's environment variables: every process inherits the driver's."""
        return self

    @takes(groups.ExperimentalSettings)
    def experimental(self) -> Self:
        """Set RLlib's experimental options; see `ExperimentalSettings`."""
        return self

    @short_traceback
    def callbacks(self, callbacks_class: object = NotProvided, **hooks: Unpack[Hooks]) -> Self:
        """Set the user code that is called at the events of the run.

        Args:
            callbacks_class: A `Callback` subclass, or a list of them; called before the functions.
            hooks: ``on_train_result=fn`` (or a list of functions) for any hook of `Callback`.
        """
        for name, functions in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"callbacks() has no hook {name!r}.{did_you_mean(name, HOOKS)}")
            listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
            if not all(callable(fn) for fn in listed):
                raise ConfigurationError(f"callbacks({name}=…): expected callables, got {functions!r}.")
            for function in listed:
                check_hook(name, function, f"callbacks({name}=…)")
            self.callbacks_hooks: dict[str, Any] = {**self.callbacks_hooks, name: listed}
        if callbacks_class is not NotProvided:
            given = callbacks_class if isinstance(callbacks_class, list | tuple) else [callbacks_class]
            for item in given:
                check_hooks(item)
            self.callbacks_class = callbacks_class
        return self

    def api_stack(
        self, enable_rl_module_and_learner: bool = True, enable_env_runner_and_connector_v2: bool = True
    ) -> Self:
        """Accept RLlib's arguments; only the new API stack exists."""
        if not (enable_rl_module_and_learner and enable_env_runner_and_connector_v2):
            raise ConfigurationError("api_stack(): only the new API stack exists here; leave both True.")
        return self

    def validate(self) -> None:
        """Check that the settings are consistent with each other. An override raises ConfigurationError, too.

        Raises:
            ConfigurationError: They are not; the text names the settings, the expected and the actual values.
        """
        self._check_is_resolved()
        if self._validate_config:
            check(self)
            self._check_own_settings()

    def _value_error(self, text: str) -> NoReturn:
        """Raise ConfigurationError, as `validate` of a config written for RLlib does."""
        raise ConfigurationError(text)

    def _check_own_settings(self) -> None:
        """Raise ConfigurationError if the settings that an algorithm adds are inconsistent."""

    def _check_is_resolved(self) -> None:
        """Raise an error if a value of the config is a search object."""
        found = find_search_objects(self)
        if found:
            path, search_object = next(iter(found.items()))
            raise ConfigurationError(
                f"config.{path} is the search object {search_object!r}, for which a Tuner chooses a value in each "
                f"trial. Set one value, or run tune.Tuner({self._algorithm_name!r}, param_space=config, …).fit(), "
                f"on the command line `rlzmq tune {self._algorithm_name.lower()}`."
            )

    @property
    def _algorithm_name(self) -> str:
        return type(self).__name__.removesuffix("Config")

    # -- environments and spaces ----------------------------------------------------------------

    def env_entry(self, env: object = None) -> EnvEntry:
        """Return the entry from which environments are made: `env` (None: the config's), with the config's wrappers.

        Raises:
            ConfigurationError: There is no such env.
        """
        entry = resolve_env(self.env if env is None else env)
        wrappers = list(self.wrappers)
        if self.clip_rewards:
            wrappers.append(partial(clip_rewards, most=float(self.clip_rewards)))
        return replace(entry, is_atari=bool(self.is_atari), wrappers=tuple(wrappers))

    def make_env(self, env: object = None) -> Any:
        """Return an environment that is not yet reset: `env` (None: the config's), with the config's settings."""
        return make_env(self.env_entry(env), self.env_config)

    def single_spaces(self, env: object = None, spaces: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Return (observation space, action space) of one env: the given ones, or else the env's."""
        if spaces and "__env_single__" in spaces:
            observation_space, action_space = spaces["__env_single__"]
            return observation_space, action_space
        if env is not None and not isinstance(env, str):
            return single_spaces_of(env)
        if self.observation_space is not None and self.action_space is not None:
            return self.observation_space, self.action_space
        made = self.make_env(env)
        try:
            self._check_agents(made)
            observation_space, action_space = single_spaces_of(made)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                made.close()
            raise
        made.close()
        return self.observation_space or observation_space, self.action_space or action_space

    def _check_agents(self, env: object) -> None:
        """Raise an error if a multi-agent env has no `multi_agent` settings, or a single-agent env has some."""
        name = type(env).__name__
        agents = list(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or ())
        if isinstance(env, MultiAgentEnv) and not self.is_multi_agent:
            modules = ",".join(agent if isinstance(agent, str) else f"p{agent}" for agent in agents[:8])
            raise ConfigurationError(
                f"config.env: {name} has several agents ({', '.join(map(repr, agents[:8]))}), but the config is for a "
                "single one. Set which module acts for which agent: .multi_agent(policies={'shared'}, "
                "policy_mapping_fn=lambda agent_id, episode: 'shared'), or a module each: "
                f"--policies {modules} --policy-mapping-fn rlzmq.envs.examples:module_of_agent."
            )
        if not isinstance(env, MultiAgentEnv) and (agents or self.is_multi_agent):
            wrapper = "PettingZooEnv" if hasattr(env, "agent_iter") else "ParallelPettingZooEnv"
            raise ConfigurationError(
                f"config.env: {name} has several agents, but is no MultiAgentEnv. Wrap a PettingZoo env: "
                f"register_env('mine', lambda config: {wrapper}(make_it())), with .environment('mine')."
                if agents
                else f"config.env: {name} has a single agent, but the config has multi_agent() settings (modules "
                f"{self.module_ids}). Leave them out, or use a MultiAgentEnv (make_multi_agent makes one)."
            )

    # -- what a config builds: implemented by AlgorithmConfig -----------------------------------

    def _default_algo_class(self) -> Any:
        """Return the Algorithm class of this config class, or None."""
        raise NotImplementedError

    def build_env_to_module_connector(
        self, env: object = None, spaces: Mapping[str, Any] | None = None, device: object = None
    ) -> Any:
        """Return the EnvToModulePipeline."""
        raise NotImplementedError

    def build_module_to_env_connector(
        self, env: object = None, spaces: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the ModuleToEnvPipeline."""
        raise NotImplementedError

    def build_learner_connector(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], device: object = None
    ) -> Any:
        """Return the LearnerConnectorPipeline."""
        raise NotImplementedError

    def get_multi_rl_module_spec(
        self, *, env: object = None, spaces: Mapping[str, Any] | None = None, inference_only: bool = False
    ) -> Any:
        """Return the MultiRLModuleSpec of all modules."""
        raise NotImplementedError

    def _algorithm_class(self) -> Any:
        algo_class = self._algo_class or self._default_algo_class()
        if algo_class is None:
            raise ConfigurationError(
                f"{type(self).__name__} names no algorithm: use an algorithm's own config, e.g. PPOConfig(), "
                "or AlgorithmConfig(algo_class=YourAlgorithm)."
            )
        return algo_class

    @property
    def algo_class(self) -> Any:
        """The Algorithm class that `build` uses.

        Raises:
            ConfigurationError: The config does not name one.
        """
        return self._algorithm_class()

    def _for_build(self, env: object, use_copy: bool) -> Self:
        config = self.copy(copy_frozen=False) if use_copy else self
        if env is not None:
            config.environment(env)
        config.validate()
        if config.seed is None:
            config.seed = secrets.randbits(31)
        config.freeze()
        return config


def single_spaces_of(env: Any) -> tuple[Any, Any]:
    """Return (observation space, action space) of a plain env, or of one env of a vector env."""
    if not hasattr(env, "step"):
        raise ConfigurationError(
            f"config.env: what makes the environment returned {env!r} ({type(env).__name__}); expected a gymnasium.Env "
            "or a MultiAgentEnv."
        )
    if hasattr(env, "single_observation_spaces"):
        return env.single_observation_spaces, env.single_action_spaces
    if isinstance(env, MultiAgentEnv):
        return agent_spaces(env)
    observation_space = getattr(env, "single_observation_space", None) or getattr(
        env, "observation_space", None
    )
    action_space = getattr(env, "single_action_space", None) or getattr(env, "action_space", None)
    where = type(env).__name__
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if space is None:
            check_space(None, name, where=where)
    return observation_space, action_space
