"""Session: the runners, the learners and the pipeline of one run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import first_error
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup, MergedConnectors
from rlzmq.driver.async_learner_group import AsyncLearnerGroup
from rlzmq.driver.broker_pipeline import BrokerPipeline
from rlzmq.driver.join_files import JoinKeys, keys_file
from rlzmq.driver.process_config import ModuleConfigs
from rlzmq.driver.remote_learners import RemoteLearnerListener
from rlzmq.driver.synchronous import has_broker, needs_processes
from rlzmq.driver.updates import Accounting, SerialPipeline
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.interfaces import UpdatePipeline

__all__ = ["Session"]

_log = logging.getLogger("rlzmq.driver")

_LEARNER = "learner_group/learner"
_REPLAY = "learner_group/replay-"


class Session:
    """Starts and stops everything that a run needs. An Algorithm only plans and reports.

    Attributes:
        system: The ActorSystem; None if everything is in this process.
        env_runner_group, learner_group, pipeline: Set by `start`.
        accounting: Account of all env steps of the run.
        spaces: (observation space, action space) of one env.
        watch: Watches the calls of user code in this process.
    """

    pipeline: UpdatePipeline

    def __init__(self, config: BaseConfig, watch: CallWatch) -> None:
        self.watch: CallWatch = watch
        self.config: BaseConfig = config
        self.system: Any = None
        self.env_runner_group: Any = None
        self.learner_group: Any = None
        self.accounting: Accounting = Accounting()
        self.spaces: tuple[Any, Any] = (None, None)
        self._has_pipeline = False
        self._connectors: Any = None
        self._learner_door: Any = None
        self._modules: Any = None  # those that `get_modules` built, if the learners are other processes

    async def start(self) -> None:
        """Start the processes, form the groups, and send the first weights to the runners."""
        config = self.config
        with self.watch.call("the env's constructor or close()"):
            self.spaces = single = config.single_spaces()
        spaces = {"__env_single__": single, "__env__": single}
        module_spec = config.get_multi_rl_module_spec(spaces=spaces)
        self._connectors = MergedConnectors(config, spaces)
        if needs_processes(config):
            self.system = ActorSystem()
            await self.system.start()
        pipeline_system = self.system if has_broker(config) else None
        self.env_runner_group = AsyncEnvRunnerGroup(
            config, system=pipeline_system, samples=config.is_online, watch=self.watch
        )
        self.env_runner_group.merged_connectors = self._connectors
        self.env_runner_group.sync_with_run = self.sync_weights
        join_keys = await self._open_door()
        self.learner_group = AsyncLearnerGroup(
            config, module_spec, system=pipeline_system, door=self._learner_door
        )
        self.env_runner_group.learner_group = self.learner_group
        if pipeline_system is None:
            await self.env_runner_group.start()
            await self.learner_group.start()
            self.pipeline = serial = SerialPipeline(
                config,
                self.env_runner_group.local_env_runner,
                self.learner_group.local_learner,
                self._connectors,
                self.accounting,
                self.watch,
            )
            self._has_pipeline = True
            await serial.publish()
            return
        self.pipeline = broker = BrokerPipeline(
            config,
            self.system,
            self.env_runner_group,
            self.learner_group,
            self._connectors,
            self.accounting,
            join_keys,
            self._learner_door.control_address if self._learner_door is not None else None,
        )
        self._has_pipeline = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.env_runner_group.start())
                tasks.create_task(self.learner_group.start())
                tasks.create_task(broker.start_broker())
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        await broker.start()

    async def _open_door(self) -> JoinKeys | None:
        """Create keys for external peers and return the listener for learners; None without external peers."""
        if self.config.listen is None:
            return None
        join_file = self.config.join_file
        keys = JoinKeys.generate() if join_file is None else JoinKeys.kept(keys_file(join_file))
        if self.config.num_remote_learners:
            self._learner_door = RemoteLearnerListener(self.config, keys, self.spaces)
            await self._learner_door.start()
        return keys

    async def restart(self) -> None:
        """Continue everywhere from the learners' state, which was changed from outside, between two updates."""
        await self.pipeline.restart()
        self.learner_group.is_changed = False
        if self._modules is not None:
            await self.get_modules()

    async def sync_weights(self) -> None:
        """Send the learners' weights and the merged connector state to all runners."""
        self.learner_group.num_changes += 1
        self.learner_group.is_changed = True
        snapshot, version = await self.learner_group.get_inference_weights()
        if self.learner_group.handles:  # the data in transit at the broker is older
            self.learner_group.generation += 1
        await self.env_runner_group.set_weights(
            snapshot, version, self.learner_group.generation, self.accounting.sampled
        )
        await self.env_runner_group.sync_env_runner_states()

    async def change_modules(
        self,
        configs: ModuleConfigs,
        change: Callable[[Any], Any],
    ) -> None:
        """Add or remove modules between two updates. All peers continue with the learners' weights.

        Args:
            configs: The configs with the new modules.
            change: ``change(learner)`` adds or removes the modules.
        """
        self.config, self._modules = configs.run, None
        spaces = {"__env_single__": self.spaces}
        module_spec = configs.learners.get_multi_rl_module_spec(spaces=spaces)
        synced = configs.synced_module_ids("env_runners")
        await self.env_runner_group.change_modules(configs.env_runners, synced)
        await self.learner_group.change_modules(configs.learners, module_spec, change, synced)
        await self.restart()

    def get_connector_state(self) -> dict[str, Any]:
        """Return the merged connector state; {} if no piece has state."""
        return self._connectors.get_state() if self._connectors.is_needed else {}

    def get_pipeline(self, name: Literal["env_to_module", "module_to_env"]) -> Any:
        """Return the local runner's connector pipeline; without one, an equal pipeline with the merged states."""
        runner = self.env_runner_group.local_env_runner
        if runner is not None:
            return getattr(runner, name)
        spaces = {"__env_single__": self.spaces, "__env__": self.spaces}
        pipeline = getattr(self.config, f"build_{name}_connector")(env=None, spaces=spaces)
        if state := self.get_connector_state().get(f"{name}_connector"):
            pipeline.set_state(state)
        return pipeline

    async def get_module(self, module_id: str) -> Any:
        """Return a local RLModule with the current weights; in a run of one agent its module, whatever the id."""
        modules = await self.get_modules()
        if len(modules) == 1 and DEFAULT_MODULE_ID in (module_id, *modules.keys()):
            return next(iter(modules.values()))
        if module_id not in modules:
            raise KeyError(f"No module {module_id!r}.{did_you_mean(module_id, list(modules.keys()))}")
        return modules[module_id]

    async def get_modules(self) -> Any:
        """Return a local MultiRLModule with the current weights, always the same one while the modules do not change.

        What changes the learners from outside (a restore) changes it, too.
        """
        if self.learner_group.local_learner is not None:
            return self.learner_group.local_learner.module
        if self._modules is None:
            self._modules = self.learner_group.module_spec.build()
        self._modules.set_state(await self.learner_group.get_weights())
        return self._modules

    def fault_tolerance(self) -> dict[str, Any]:
        """Return the result's ``fault_tolerance``: RLlib's keys, and additional ones for learners and the broker."""
        runners, learners = self.env_runner_group, self.learner_group
        num_healthy = runners.num_healthy_remote_env_runners() if self.config.num_env_runners else 0
        return {
            "num_healthy_workers": num_healthy,
            "num_remote_worker_restarts": runners.num_restarts if runners.supervisor else 0,
            **(learners.fault_tolerance() if learners.supervisor else {}),
            **self.pipeline.fault_tolerance(),
        }

    # -- checkpoints ----------------------------------------------------------------------------

    async def get_state(self, *, with_replay: bool = True) -> dict[str, Any]:
        """Return a checkpoint's components: learner, connectors and accounting.

        With ``checkpoint_replay``, each rank's batch source is included.
        """
        with_replay = with_replay and self.config.checkpoint_replay
        sources = await self.learner_group.get_sources() if with_replay else []
        return {
            **{f"{_REPLAY}{rank}": source for rank, source in enumerate(sources)},
            _LEARNER: await self.learner_group.get_state(),
            "env_runner": self.get_connector_state(),
            "accounting": self.accounting.get_state(),
        }

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the components of `get_state`, with new episodes.

        Missing components keep their state.
        """
        learner = state.get(_LEARNER)
        self.learner_group.num_changes += 1
        self.learner_group.is_changed = True
        if learner is not None:
            await self.learner_group.set_state(learner)
        names = sorted(
            (name for name in state if name.startswith(_REPLAY)), key=lambda name: (len(name), name)
        )
        sources = [state[name] for name in names]
        with_sources = bool(sources) and await self.learner_group.set_sources(sources)
        if "env_runner" in state:
            # In a whole run's state, missing states are empty. A single pipeline's state leaves the other one
            # unchanged.
            kept = {} if "accounting" in state else self.get_connector_state()
            self._connectors.set_state({**kept, **state["env_runner"]})
        if "accounting" in state:
            num_lost = self.accounting.set_state(state["accounting"], with_sources=with_sources)
            if num_lost:
                _log.warning(
                    "The checkpoint was written without checkpoint_replay: the %d env steps that replay buffers "
                    "held are lost, and empty buffers are filled by sampling.",
                    num_lost,
                )
        await self.restart()
        if "accounting" in state:  # now that nobody may sample under the replaced state
            await self.env_runner_group.begin_again(self.accounting.sampled, self.learner_group.generation)

    async def stop(self) -> None:
        """Stop everything, in an order that loses no data. May be called after a failed start."""
        try:
            if self._has_pipeline:
                await self.pipeline.stop()
            for end in (
                self.env_runner_group.stop if self.env_runner_group else None,
                self.learner_group.shutdown if self.learner_group else None,
            ):
                if end is not None:
                    await end()
        finally:
            if self._learner_door is not None:
                await self._learner_door.close()
            if self.system is not None:
                await self.system.stop()
