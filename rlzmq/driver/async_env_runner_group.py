"""AsyncEnvRunnerGroup: the env runners of a run, or of its evaluation, as one object.

A run synchronizes by itself. Custom training steps and standalone groups call these methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import LazyModule
from rlzmq.core.patience import Supervision
from rlzmq.driver.process_config import config_for_runners
from rlzmq.driver.runner_calls import RunnerCalls
from rlzmq.driver.supervision import RunnerSupervisor, spawn_within
from rlzmq.runners.episode_metrics import FragmentMeta

__all__ = ["AsyncEnvRunnerGroup", "flatten_episodes"]


if TYPE_CHECKING:
    from rlzmq.actors.handle import ActorHandle
    from rlzmq.roles import runner_role
else:  # it imports torch, which only a local runner needs here
    runner_role = LazyModule("rlzmq.roles.runner_role")


# Name of the actor class of a runner: only the runner imports it, since it imports torch.
_ROLE = "rlzmq.roles.runner_role:EnvRunnerRole"


class AsyncEnvRunnerGroup(RunnerCalls):
    """Samples with one local runner, or with several runner processes.

    Args:
        config: Number of runners, their envs and modules.
        system: The ActorSystem that spawns them. Without one there is a single local runner, and the group's
            coroutines never wait.
        is_evaluation: Whether the group evaluates; its random streams then differ from those of training.
        samples: Whether the run samples; otherwise the group has no runner.
        watch: Watches the calls of a local runner.

    Attributes:
        handles: The runners' actor handles; empty for a local group.
        supervisor: Replaces runners that die; None for a local group.
        local_env_runner: The runner in this process, or None.
        synced_module_ids: The modules whose weights come from the learners; None: all.
        reports_samples: Whether `sampled` is read for the metrics of `sample` calls. If not, metrics logged by
            callbacks remain for `get_metrics`.
        recreated: 1-based indices of the runners that were replaced; whoever reads them empties the list.
        sampled: Metadata of the batches of each `sample` call; whoever counts them empties the list.
    """

    config: BaseConfig

    def __init__(
        self,
        config: BaseConfig,
        *,
        system: Any = None,
        is_evaluation: bool = False,
        samples: bool = True,
        watch: CallWatch | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._system = system
        self._is_evaluation = is_evaluation
        self._samples = samples
        self._watch = watch or CallWatch()
        self.handles: list[Any] = []
        self.recreated: list[int] = []
        self.local_env_runner: Any = None
        self.supervisor: RunnerSupervisor | None = None
        self._weights: tuple[Any, int, int, int | None] | None = None
        self._connector_state: Mapping[str, Any] | None = None
        self.synced_module_ids: list[str] | None = None
        self.reports_samples: bool = not is_evaluation
        self.sampled: list[list[FragmentMeta]] = []

    @property
    def num_env_runners(self) -> int:
        """Number of runners that sample: the remote ones, or the local one."""
        return len(self.handles) or 1

    async def start(self) -> None:
        """Create the runners, all remote ones concurrently."""
        num = self.config.num_env_runners
        if not self._samples and self._system is None:
            return
        if num == 0 and (self._system is None or self._is_evaluation):
            make_env_runner = runner_role.make_env_runner  # imports torch, which is no call of user code
            with self._watch.call(self._watch.RESETS):
                runner = make_env_runner(self.config, self._worker_index(0))
            runner.env_watch = self._watch
            self.local_env_runner = runner
            if self.synced_module_ids is not None:
                self.local_env_runner.change_modules(self.config, self.synced_module_ids)
            return
        # If external runners join and none is configured here, this group does not sample.
        is_open = self.config.listen
        least = 0 if (is_open and not self._is_evaluation) or not self._samples else 1
        what = "evaluation env runner" if self._is_evaluation else "env runner"
        self.supervisor = RunnerSupervisor(
            self.config, self.spawn_runner, self.handles, self.recreated, what=what
        )
        await self.supervisor.start(max(num, least))
        self.supervisor.prepare.append(self._bring_up_to_date)

    async def spawn_runner(self, index: int, supervision: Supervision) -> Any:
        """Start the runner at index `index` (0-based) and return its handle, ready to sample."""
        local = self.config.num_env_runners == 0
        name = f"{'eval-' if self._is_evaluation else ''}runner-{index}"
        # An environment's constructor may take as long as a reset; the runner enforces that limit.
        start_s, reset_s = self.config.process_start_timeout_s, self.config.env_reset_timeout_s
        timeout_s = start_s + reset_s if start_s and reset_s else 0.0
        spawn = self._system.spawn(
            _ROLE,
            self._sent_config(),
            self._worker_index(0 if local else index + 1),
            supervision.incarnation,
            is_local=local,
            place=name,
            name=name,
            in_process=local,
            deadline_s=timeout_s,
            patience=supervision.patience,
        )
        handle = await spawn_within(timeout_s, "process_start_timeout_s or env_reset_timeout_s", spawn)
        if self.synced_module_ids is not None:
            await self._change_modules_of(handle)
        return handle

    async def _bring_up_to_date(self, index: int, handle: ActorHandle, incarnation: int) -> None:
        """Repeat `set_weights`, `set_connector_state` and `foreach_env_runner` calls on the replacement of a runner."""
        await self._give_env_config(index, handle)
        if self._weights is not None:
            await handle.set_weights(*self._weights)
        if self._connector_state is not None:
            await handle.set_connector_state(self._connector_state)

    @property
    def num_restarts(self) -> int:
        """Number of runner processes that have been replaced."""
        return self.supervisor.num_restarts if self.supervisor is not None else 0

    def _worker_index(self, index: int) -> int:
        return index + (1_000_000 if self._is_evaluation else 0)

    # -- sampling -------------------------------------------------------------------------------

    async def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[Any]:
        """Return episodes sampled by all runners concurrently, as one flat list.

        Args:
            num_timesteps: Minimum number of env steps over all runners.
            num_episodes: Exact number of whole episodes over all runners. Without both, each runner returns one
                fragment (see EnvRunner.sample).
            explore, random_actions, force_reset: See EnvRunner.sample.

        Returns:
            Episodes in runner order; those of one runner in the order in which it returned them.
        """
        batches = await self.sample_batches(
            num_timesteps=num_timesteps,
            num_episodes=num_episodes,
            explore=explore,
            random_actions=random_actions,
            force_reset=force_reset,
            with_metrics=self.reports_samples,
        )
        if self.reports_samples:
            self.sampled.append([batch.meta for batch in batches])
        return flatten_episodes(batches)

    async def sample_batches(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        with_metrics: bool = True,
        **options: Any,
    ) -> list[Any]:
        """Sample like `sample`; return one EpisodeBatch per runner.

        Args:
            num_timesteps, num_episodes, options: See `sample`.
            with_metrics: Whether to move metrics logged by callbacks from the runners to the batches' metas.
        """
        calls = self.share_out(num_timesteps=num_timesteps, num_episodes=num_episodes, **options)
        if self.local_env_runner is not None:
            runner = self.local_env_runner
            self._watch.attend(runner.env)
            with self._watch.call(self._watch.STEPS):
                return [
                    runner.sample_with_metrics(options) if with_metrics else runner.sample_batch(**options)
                    for _, options in calls
                ]
        if not self.handles:
            raise ConfigurationError(
                "sample(): this run has no env runners to call: external runners sample under the broker's "
                "leases, and an offline algorithm has none. Set num_env_runners to 1 or more, or use "
                "eval_env_runner_group."
            )
        assert self.supervisor is not None
        supervisor = self.supervisor
        batches = await asyncio.gather(
            *(supervisor.call(index, _sampling(options, with_metrics)) for index, options in calls)
        )
        return [batch for batch in batches if batch is not None]

    def share_out(
        self, *, num_timesteps: int | None = None, num_episodes: int | None = None, **options: Any
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return (0-based index, options of its sample call) for every runner with work to do."""
        num = self.num_env_runners
        calls = []
        for index in range(num):
            shares = {
                name: _share(total, num, index)
                for name, total in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes))
                if total is not None
            }
            if all(share for share in shares.values()):
                calls.append((index, {**options, **shares}))
        return calls

    # -- weights and state ----------------------------------------------------------------------

    async def set_weights(
        self, snapshot: object, version: int, generation: int = 0, num_env_steps: int | None = None
    ) -> None:
        """Load one snapshot (``WeightsLayout.snapshot``) into every runner.

        Args:
            snapshot, version: The result of `AsyncLearnerGroup.get_inference_weights`.
            generation: From now on, weights of lower generations, which may still be in transit, are refused.
            num_env_steps: See `EnvRunner.set_weights`.
        """
        self._weights = (snapshot, version, generation, num_env_steps)
        await self._on_all(lambda handle: handle.set_weights(snapshot, version, generation, num_env_steps))

    async def set_connector_state(self, state: Mapping[str, Any]) -> None:
        """Load merged connector states into every runner's pipelines."""
        if not state:
            return
        self._connector_state = state
        await self._on_all(lambda handle: handle.set_connector_state(state))

    async def get_connector_deltas(self) -> list[Any]:
        """Return the connector statistics of every runner since the last call."""
        return await self._on_all(lambda handle: handle.get_connector_delta())

    async def begin_again(self, number: int) -> None:
        """Make every runner begin new episodes (see EnvRunner.begin_again)."""
        await self._on_all(lambda handle: handle.begin_again(number))

    async def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None) -> None:
        """Replace the set of modules of every runner (see EnvRunner.change_modules)."""
        self.config, self.synced_module_ids = config, synced_module_ids
        if self.local_env_runner is not None:
            self.local_env_runner.change_modules(config, synced_module_ids)
            return
        self._weights = None  # the new layout differs
        await self._on_all(self._change_modules_of)

    async def _change_modules_of(self, handle: ActorHandle) -> None:
        def change(role: Any, config: BaseConfig, synced_module_ids: list[str] | None) -> str:
            return str(role.change_modules(config, synced_module_ids))

        await handle.expect_layout(await handle.apply(change, self._sent_config(), self.synced_module_ids))

    def _sent_config(self) -> BaseConfig:
        return config_for_runners(self.config) if self.config.num_env_runners else self.config

    async def get_metrics(self) -> list[dict[str, Any]]:
        """Return each runner's metrics since the last call.

        Metrics that callbacks logged while a run sampled are in the run's results instead.
        """
        return await self._on_all(lambda handle: handle.get_metrics())

    async def _on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Await ``call(handle)`` for all remote runners concurrently, or make the call for the local one at once."""
        if self.local_env_runner is not None:
            with self._watch.call("a call of the env runner"):
                return [call(self.local_env_runner)]
        if self.supervisor is None:
            return []
        calls = (self.supervisor.call(index, call) for index in range(len(self.handles)))
        return list(await asyncio.gather(*calls))

    async def stop(self) -> None:
        """End the runners."""
        await self.cancel_calls()
        if self.supervisor is not None:
            await self.supervisor.stop()
        if self.local_env_runner is not None:
            with self._watch.call("close() of the envs"):
                self.local_env_runner.stop()
            self.local_env_runner = None
        handles, self.handles = self.handles, []
        await asyncio_gather(handles, lambda handle: handle.stop())


def flatten_episodes(batches: Sequence[Any]) -> list[Any]:
    """Return all episodes of several batches (or lists) in one list."""
    return [episode for batch in batches for episode in batch]


async def asyncio_gather(handles: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """Await ``call(handle)`` for all handles concurrently. Does not wait if there are none."""
    if not handles:
        return []
    return list(await asyncio.gather(*(call(handle) for handle in handles)))


def _sampling(options: Mapping[str, Any], with_metrics: bool) -> Callable[[Any], Any]:
    if with_metrics:
        return lambda handle: handle.sample_with_metrics(options)
    return lambda handle: handle.sample(**options)


def _share(total: int, num: int, index: int) -> int:
    if total < 0:
        raise ConfigurationError(f"sample(): expected a number of steps or episodes ≥ 0, got {total}.")
    return total // num + (1 if index < total % num else 0)
