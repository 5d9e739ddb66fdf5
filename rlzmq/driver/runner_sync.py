"""RunnerSync: explicit synchronization of the weights and connector states of a group's env runners.

A run does this by itself. Custom training steps and standalone groups call these methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.suggest import did_you_mean
from rlzmq.driver.connector_sync import ConnectorSync

__all__ = ["RunnerSync"]


class RunnerSync:
    """The synchronization methods of AsyncEnvRunnerGroup.

    Attributes:
        learner_group: The learners of the run; None for a standalone group.
        sync_with_run: Sends the learners' weights to all runners.
        connector_sync: Merges connector states. It is the run's, or created on first use.
    """

    config: BaseConfig
    _on_all: Callable[[Callable[[Any], Any]], Awaitable[list[Any]]]
    get_connector_deltas: Callable[[], Awaitable[list[Any]]]
    set_connector_state: Callable[[Mapping[str, Any]], Awaitable[None]]

    def __init__(self) -> None:
        self.learner_group: Any = None
        self.sync_with_run: Callable[[], Awaitable[None]] | None = None
        self.connector_sync: ConnectorSync | None = None

    async def sync_weights(
        self,
        policies: Collection[str] | None = None,
        from_worker_or_learner_group: Any = None,
        *,
        inference_only: bool = True,
        timeout_seconds: float | None = None,
    ) -> None:
        """Send weights to all runners and wait until they have loaded them.

        Args:
            policies: Ids of the modules whose weights are sent; None: all.
            from_worker_or_learner_group: A LearnerGroup, a Learner or an EnvRunner; None: the run's learners.
            inference_only, timeout_seconds: Accepted for RLlib compatibility: runners only get inference weights, and
                the call returns when all have loaded them.

        Raises:
            ValueError: The group has no run, and no source is given.
            KeyError: There is no such module.
        """
        source = self.learner_group if from_worker_or_learner_group is None else from_worker_or_learner_group
        if source is None:
            raise ValueError("sync_weights: this group belongs to no run: set from_worker_or_learner_group.")
        is_run = source is self.learner_group and self.sync_with_run is not None
        if is_run and (policies is None or set(source.module_spec.rl_module_specs) <= set(policies)):
            assert self.sync_with_run is not None
            await self.sync_with_run()
            return
        state = source.get_state()
        modules = (await state if inspect.isawaitable(state) else state)["rl_module"]
        unknown = [module_id for module_id in policies or () if module_id not in modules]
        if unknown:
            raise KeyError(f"sync_weights: no module {unknown[0]!r}.{did_you_mean(unknown[0], modules)}")
        chosen = modules if policies is None else {module_id: modules[module_id] for module_id in policies}
        # Version 0: load them even if they are older.
        await self.set_module_states({"rl_module": chosen, "weights_seq_no": 0})

    async def set_module_states(self, state: Mapping[str, Any]) -> None:
        """Load these weights on every runner.

        Args:
            state: ``{"rl_module": {module id: {name: array}}, "weights_seq_no": version}``. Modules that a runner
                lacks are ignored.
        """
        await self._on_all(lambda handle: handle.set_state(dict(state)))

    async def sync_env_runner_states(
        self,
        *,
        config: BaseConfig | None = None,
        env_steps_sampled: int | None = None,
        rl_module_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Merge the runners' connector states and send the result to all.

        Args:
            config: Accepted for RLlib compatibility; ``merge_env_runner_states`` of the group's config applies.
            env_steps_sampled: Lifetime env steps of all runners, for exploration schedules.
            rl_module_state: Weights, see `set_module_states`.
        """
        sync = self.connector_sync
        if sync is None:
            single = self.config.single_spaces()
            sync = self.connector_sync = ConnectorSync(
                self.config, {"__env_single__": single, "__env__": single}
            )
        if sync.is_needed:
            await self.set_connector_state(sync.merge(await self.get_connector_deltas()) or {})
        if rl_module_state:
            await self.set_module_states(rl_module_state)
        if env_steps_sampled is not None:
            counted = {"num_env_steps_sampled_lifetime": int(env_steps_sampled)}
            await self._on_all(lambda handle: handle.set_state(counted))
