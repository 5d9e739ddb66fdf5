"""EnvRunnerState: gets and sets the weights and states of an env runner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlzmq.core.checkpointable import Checkpointable
from rlzmq.core.suggest import did_you_mean
from rlzmq.runners.sampling_state import get_sampling_state, set_sampling_state

__all__ = ["STATE_COMPONENTS", "EnvRunnerState"]

STATE_COMPONENTS = (
    "rl_module",
    "weights_seq_no",
    "env_to_module_connector",
    "module_to_env_connector",
    "num_env_steps_sampled_lifetime",
)


class EnvRunnerState(Checkpointable):
    """Base of EnvRunner: weights as snapshots, connector states as deltas, all other state by component."""

    checkpoint_name = "env_runner"

    multi_rl_module: Any
    env_to_module: Any
    module_to_env: Any
    weights_seq_no: int
    weights_generation: int
    _weights_layout: Any
    _synced_module_ids: list[str] | None
    _num_env_steps_lifetime_base: int
    _num_env_steps_since_base: int

    # -- weights -------------------------------------------------------------------------------

    def get_weights_layout(self) -> Any:
        """Return the byte layout of the weights that ``set_weights`` takes (a ``WeightsLayout``)."""
        if self._weights_layout is None:
            from rlzmq.modules.weights import WeightsLayout

            self._weights_layout = WeightsLayout.of(
                self.multi_rl_module, inference_only=True, module_ids=self._synced_module_ids
            )
        return self._weights_layout

    def set_weights(self, buffer: Any, version: int, generation: int = 0) -> bool:
        """Load a snapshot of the weights.

        Args:
            buffer: ``get_weights_layout().num_bytes`` bytes.
            version: Version of the snapshot, stored with each step; 0 loads it unconditionally.
            generation: Generation of the learner group.

        Returns:
            False if a newer version (or generation) is already in use and nothing was loaded.

        Raises:
            ValueError: The buffer's size does not match.
        """
        if version and (generation, version) < (self.weights_generation, self.weights_seq_no):
            return False
        self.get_weights_layout().load(self.multi_rl_module, buffer)
        self.weights_seq_no = version
        self.weights_generation = generation
        return True

    # -- connectors ----------------------------------------------------------------------------

    def get_connector_delta(self) -> dict[str, Any]:
        """Return the statistics that connector pieces accumulated since the last call, to be merged elsewhere.

        Returns:
            ``{"env_to_module_connector": {piece: delta}, "module_to_env_connector": {…}}``, without empty
            entries.
        """
        deltas = {
            "env_to_module_connector": _delta_of(self.env_to_module),
            "module_to_env_connector": _delta_of(self.module_to_env),
        }
        return {name: delta for name, delta in deltas.items() if delta}

    def set_connector_state(self, state: Mapping[str, Any]) -> None:
        """Load merged connector states into the pipelines; statistics since the last delta are kept.

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

    # -- sampling state ------------------------------------------------------------------------

    def get_sampling_state(self, *, with_episodes: bool = True) -> dict[str, Any]:
        """Return everything beside the weights that another runner needs to continue sampling exactly like this one.

        Random streams, counters, connector states, each environment's position in its episode, and the data carried to
        the next fragment, as plain values and arrays. Call it between two sample calls.

        Args:
            with_episodes: False: leave out positions and carried data; new episodes begin.
        """
        return get_sampling_state(self, with_episodes=with_episodes)

    def set_sampling_state(self, state: Mapping[str, Any]) -> int:
        """Continue from a state that `get_sampling_state` returned.

        Environments with ``get_state()`` and ``set_state(state)`` are restored with them. Others are reset with the
        random state that they had before their episode, and the episode's actions are replayed. New episodes begin if
        the last observation then differs, for more than 10,000 actions, and for environments that are not stepped one
        by one in this process.

        Returns:
            The number of environments that begin new episodes.
        """
        return set_sampling_state(self, state)

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
            ValueError: An unknown name.
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
            state: As returned by ``get_state``. Weights are loaded if ``weights_seq_no`` is missing, 0 or newer than
                the current one. ``rl_module`` may also be the state of a single-agent module.
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


def _delta_of(pipeline: Any) -> Any:
    return {} if pipeline is None else pipeline.get_delta()


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
