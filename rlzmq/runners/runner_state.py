"""EnvRunnerState: an env runner's modules and pipelines, their weights, and all its states."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.defaults import change_modules, module_spaces
from rlzmq.core.checkpoint import Checkpointable
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import derive_seed
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.output_check import check_acting_outputs
from rlzmq.modules.weights import WeightsLayout

__all__ = ["STATE_COMPONENTS", "EnvRunnerState", "own_config"]

STATE_COMPONENTS = (
    "rl_module",
    "weights_seq_no",
    "env_to_module_connector",
    "module_to_env_connector",
    "num_env_steps_sampled_lifetime",
)


class EnvRunnerState(Checkpointable, abc.ABC):
    """Base class of EnvRunner: modules, weights as snapshots, connector states as deltas, other state by component."""

    checkpoint_name = "env_runner"

    config: BaseConfig
    seed: int | None
    generator: torch.Generator
    env: Any
    module: Any
    multi_rl_module: Any
    env_to_module: Any
    module_to_env: Any
    weights_seq_no: int
    weights_generation: int
    _weights_layout: Any
    _synced_module_ids: list[str] | None
    _num_env_steps_lifetime_base: int
    _num_env_steps_since_base: int

    def _acting_module(self) -> Any:
        """Return the acting module of ``multi_rl_module``, the value of ``module``."""
        modules = self.multi_rl_module
        return modules[DEFAULT_MODULE_ID] if list(modules.keys()) == [DEFAULT_MODULE_ID] else modules

    def _module_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return (observation space, action space) by module id."""
        action_space = self._env_spaces()["__env_single__"][1]
        return module_spaces(self.config, self.env_to_module.observation_space, action_space)

    @abc.abstractmethod
    def _drop_unfinished_episodes(self) -> None:
        """Drop unfinished episodes. The next sample resets all envs; their random generators continue."""

    # -- modules and pipelines -----------------------------------------------------------------

    def make_module(self) -> None:
        """Build the pipelines and the inference-only module from the config, with fresh weights."""
        spaces = self._env_spaces()
        self.env_to_module = self.config.build_env_to_module_connector(env=self.env, spaces=spaces)
        self.module_to_env = self.config.build_module_to_env_connector(env=self.env, spaces=spaces)
        spec = self.config.get_multi_rl_module_spec(
            env=self.env, spaces=self.get_spaces(), inference_only=True
        )
        self.multi_rl_module = spec.build(seed=self.seed)
        self._prepare_to_act(self.multi_rl_module.keys())
        if hasattr(self.multi_rl_module, "eval"):
            self.multi_rl_module.eval()
        self._weights_layout = None
        self.module = self._acting_module()

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return the spaces by name.

        Returns:
            ``{"__env__": (obs, act) of the vector env, "__env_single__": (obs, act) of one env,
            module_id: (obs after the env-to-module pipeline, act)}``. Modules whose agents are not known in advance
            are left out.
        """
        return {**self._env_spaces(), **self._module_spaces()}

    def _env_spaces(self) -> dict[str, tuple[Any, Any]]:
        env = self.env
        if not hasattr(env, "single_observation_space"):  # of a runner's own
            single = self.config.single_spaces()
            return {"__env__": single, "__env_single__": single}
        return {
            "__env__": (env.observation_space, env.action_space),
            "__env_single__": (env.single_observation_space, env.single_action_space),
        }

    def _prepare_to_act(self, module_ids: Iterable[str]) -> None:
        """Give modules this runner's seed for what they draw themselves, and check their outputs."""
        modules = self.multi_rl_module
        module_ids = list(module_ids)
        for module_id in module_ids:
            seed = derive_seed(self.generator.initial_seed(), "exploration", zlib.crc32(module_id.encode()))
            modules[module_id].unwrapped().exploration_seed = seed
        shares_nothing = type(modules)._forward_exploration is MultiRLModule._forward_exploration
        if shares_nothing:
            for module_id in module_ids:
                check_acting_outputs(modules[module_id])

    def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None = None) -> None:
        """Replace the set of modules, between two samples.

        New modules get weights from the seed or their spec; remaining modules keep theirs. Ongoing episodes continue
        with the modules that their agents were mapped to. If one of those was removed, unfinished episodes are
        dropped. The envs keep the settings of the runner's own config.

        Args:
            config: The config with the new modules.
            synced_module_ids: Modules whose weights `set_weights` provides; None: all.
        """
        before, self.config = self.config, own_config(config)
        if self.config is not config:
            self.config.environment(before.env, env_config=before.env_config)
        config = self.config
        for pipeline in self._pipelines().values():
            change_modules(pipeline, config)
        spec = config.get_multi_rl_module_spec(env=self.env, spaces=self.get_spaces(), inference_only=True)
        modules = self.multi_rl_module
        gone = [module_id for module_id, _ in modules.items() if module_id not in spec]
        for module_id in gone:
            modules.remove_module(module_id)
        for module_id in spec.rl_module_specs:
            if module_id not in modules:
                module = spec.build(module_id, seed=self.seed)
                modules.add_module(module_id, module.eval() if hasattr(module, "eval") else module)
                self._prepare_to_act([module_id])
        self._synced_module_ids = synced_module_ids
        self._weights_layout = None
        if gone:
            self._drop_unfinished_episodes()

    # -- weights -------------------------------------------------------------------------------

    def get_weights_layout(self) -> Any:
        """Return the byte layout of the weights for ``set_weights`` (a ``WeightsLayout``)."""
        if self._weights_layout is None:
            self._weights_layout = WeightsLayout.of(
                self.multi_rl_module, inference_only=True, module_ids=self._synced_module_ids
            )
        return self._weights_layout

    def set_weights(
        self,
        buffer: object,
        version: int,
        generation: int = 0,
        num_env_steps: int | None = None,
        *,
        may_keep: bool = False,
    ) -> bool:
        """Load a snapshot of the weights.

        Args:
            buffer: ``get_weights_layout().num_bytes`` bytes.
            version: Version of the snapshot, stored with each step; 0 loads it unconditionally.
            generation: Generation of the learner group.
            num_env_steps: Lifetime env steps of the run so far, from which exploration schedules continue; None: they
                continue from this runner's own estimate.
            may_keep: See `WeightsLayout.load`.

        Returns:
            False if a newer version (or generation) is already in use and nothing was loaded.

        Raises:
            ValueError: The buffer's size does not match.
        """
        if version and (generation, version) < (self.weights_generation, self.weights_seq_no):
            return False
        self.get_weights_layout().load(self.multi_rl_module, buffer, may_keep=may_keep)
        self._note_weights(version, generation, num_env_steps)
        return True

    def copy_weights(self, module: object, version: int, num_env_steps: int) -> None:
        """Copy the weights of a learner's MultiRLModule in this process. The arguments are those of `set_weights`."""
        self.get_weights_layout().copy(module, self.multi_rl_module)
        self._note_weights(version, 0, num_env_steps)

    def _note_weights(self, version: int, generation: int, num_env_steps: int | None) -> None:
        self.weights_seq_no = version
        self.weights_generation = generation
        if num_env_steps is not None:
            self._num_env_steps_lifetime_base, self._num_env_steps_since_base = num_env_steps, 0

    # -- connectors ----------------------------------------------------------------------------

    def get_connector_delta(self) -> dict[str, Any]:
        """Return the statistics that connector pieces accumulated since the last call, to be merged elsewhere.

        Returns:
            ``{"env_to_module_connector": {piece: delta}, "module_to_env_connector": {…}}``, without empty
            entries.
        """
        deltas = {}
        for name, pipeline in self._pipelines().items():
            if pipeline is not None and pipeline.learning and (delta := pipeline.get_delta()):
                deltas[name] = delta
        return deltas

    def set_connector_state(self, state: Mapping[str, Any]) -> None:
        """Load merged connector states into the pipelines. Statistics since the last delta are kept.

        Args:
            state: ``{"env_to_module_connector": …, "module_to_env_connector": …}``; either may be missing.
        """
        for name, pipeline in self._pipelines().items():
            if pipeline is not None and state.get(name):
                pipeline.apply_merged_state(state[name])

    def _pipelines(self) -> dict[str, Any]:
        return {
            "env_to_module_connector": self.env_to_module,
            "module_to_env_connector": self.module_to_env,
        }

    # -- state ---------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the runner's state by component.

        Args:
            components: Names, or paths such as ``"rl_module/policy_1"``; None for all of
                rl_module, weights_seq_no, env_to_module_connector, module_to_env_connector and
                num_env_steps_sampled_lifetime.
            not_components: Names to leave out.

        Returns:
            Component -> plain state; ``rl_module`` by module id.

        Raises:
            ValueError: A name is unknown.
        """
        wanted, without = _names(components), _names(not_components) or []
        state: dict[str, Any] = {}
        if _has(wanted, without, "rl_module"):
            only = [path.split("/", 1)[1] for path in wanted or () if path.startswith("rl_module/")]
            state["rl_module"] = {
                module_id: module.get_state(inference_only=True)
                for module_id, module in self.multi_rl_module.items()
                if (not only or module_id in only) and f"rl_module/{module_id}" not in without
            }
        if _has(wanted, without, "weights_seq_no") or "rl_module" in state:
            state["weights_seq_no"] = self.weights_seq_no
        for name, pipeline in self._pipelines().items():
            if pipeline is not None and _has(wanted, without, name):
                state[name] = pipeline.get_state()
        if _has(wanted, without, "num_env_steps_sampled_lifetime"):
            state["num_env_steps_sampled_lifetime"] = (
                self._num_env_steps_lifetime_base + self._num_env_steps_since_base
            )
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the components in ``state``; missing components keep their values.

        Args:
            state: From ``get_state``. Weights are loaded if ``weights_seq_no`` is missing, 0, or newer than the
                current one. ``rl_module`` may also be the state of a single-agent module.
        """
        for key in state:
            if key not in STATE_COMPONENTS:
                raise ValueError(
                    f"set_state: unknown component {key!r}.{did_you_mean(key, STATE_COMPONENTS)}"
                )
        for name, pipeline in self._pipelines().items():
            if pipeline is not None and name in state:
                pipeline.set_state(state[name])
        if "rl_module" in state:
            version = int(state.get("weights_seq_no", 0))
            if version == 0 or version > self.weights_seq_no:
                self._load_modules(state["rl_module"])
                if version:
                    self.weights_seq_no = version
        if "num_env_steps_sampled_lifetime" in state:
            self._num_env_steps_lifetime_base = int(state["num_env_steps_sampled_lifetime"])
            self._num_env_steps_since_base = 0

    def _load_modules(self, states: Mapping[str, Any]) -> None:
        modules = dict(self.multi_rl_module.items())
        if not any(module_id in modules for module_id in states) and len(modules) == 1:
            states = {next(iter(modules)): states}
        for module_id, module_state in states.items():
            if module_id in modules:
                modules[module_id].set_state(module_state)


def own_config(config: BaseConfig) -> Any:
    """Return a copy that may be changed; a config that cannot be copied is returned itself."""
    copy = getattr(config, "copy", None)
    return config if copy is None else copy(copy_frozen=False)


def _names(names: str | Collection[str] | None) -> list[str] | None:
    if names is None:
        return None
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name.split("/", 1)[0] not in STATE_COMPONENTS:
            raise ValueError(f"Unknown state component {name!r}.{did_you_mean(name, STATE_COMPONENTS)}")
    return listed


def _has(wanted: list[str] | None, without: list[str], name: str) -> bool:
    if name in without:
        return False
    return wanted is None or any(path.split("/", 1)[0] == name for path in wanted)
