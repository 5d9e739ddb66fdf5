"""AsyncEnvRunnerGroup: the env runners of a run, or of its evaluation, as one object.

A run synchronizes by itself. Custom training steps and standalone groups call these methods.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import LazyModule
from rlzmq.core.plain import NotPlainError
from rlzmq.core.spaces import space_to_plain
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.process_config import config_for_runners
from rlzmq.driver.supervision import Place, Supervisor, env_runner_supervisor
from rlzmq.runners.episode_metrics import FragmentMeta
from rlzmq.wire.payloads import pack_blob

__all__ = ["AsyncEnvRunnerGroup", "MergedConnectors", "RunnerFunction", "flatten_episodes"]


if TYPE_CHECKING:
    from rlzmq.actors.handle import ActorHandle
    from rlzmq.roles import runner_role
    from rlzmq.runners.env_runner import EnvRunner
else:  # it imports torch, which only a local runner needs here
    runner_role = LazyModule("rlzmq.roles.runner_role")


# Name of the actor class of a runner: only the runner imports it, since it imports torch.
_ROLE = "rlzmq.roles.runner_role:EnvRunnerRole"


_log = logging.getLogger("rlzmq.driver")

_GONE: Any = object()  # the result of a runner that the run goes on without

RunnerFunction = Callable[..., Any] | str
"""``fn(env_runner, **kwargs)``, or the name of one of its methods."""


class AsyncEnvRunnerGroup:
    """Samples with one local runner, or with several runner processes. Runners are numbered from 1, as in RLlib.

    Args:
        config: Number of runners, their envs and modules.
        system: The ActorSystem that spawns them. Without one there is a single local runner, and the group's
            coroutines never wait.
        is_evaluation: Whether the group evaluates; its random streams then differ from those of training.
        samples: Whether the run samples; otherwise the group has no runner.
        watch: Watches the calls of a local runner.

    Attributes:
        supervisor: Replaces runners that die; None for a local group.
        local_env_runner: The runner in this process, or None.
        synced_module_ids: The modules whose weights come from the learners; None: all.
        reports_samples: Whether `sampled` is read for the metrics of `sample` calls. If not, metrics logged by
            callbacks remain for `get_metrics`.
        recreated: 1-based indices of the runners that were replaced; whoever reads them empties the list.
        sampled: Metadata of the batches of each `sample` call; whoever counts them empties the list.
        learner_group: The learners of the run; None for a standalone group.
        sync_with_run: Sends the learners' weights to all runners.
        merged_connectors: Merges connector states. It is the run's, or created on first use.
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
        self.config = config
        self._system = system
        self._is_evaluation = is_evaluation
        self._samples = samples
        self._watch = watch or CallWatch()
        self.recreated: list[int] = []
        self.local_env_runner: Any = None
        self.supervisor: Supervisor | None = None
        self._weights: tuple[Any, int, int, int | None] | None = None
        self._connector_state: Mapping[str, Any] | None = None
        self.synced_module_ids: list[str] | None = None
        self.reports_samples: bool = not is_evaluation
        self.sampled: list[list[FragmentMeta]] = []
        self.learner_group: Any = None
        self.sync_with_run: Callable[[], Awaitable[None]] | None = None
        self.merged_connectors: MergedConnectors | None = None
        self._in_background: dict[tuple[str | None, int], asyncio.Task[Any]] = {}
        self._env_configs: dict[int, dict[str, Any]] = {}  # by place, if a function has changed it

    @property
    def handles(self) -> list[Any]:
        """The runners' actor handles; empty for a local group."""
        return self.supervisor.handles if self.supervisor is not None else []

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
            self._watch.attend(runner.env)
            self.local_env_runner = runner
            if self.synced_module_ids is not None:
                self.local_env_runner.change_modules(self.config, self.synced_module_ids)
            return
        # If external runners join and none is configured here, this group does not sample.
        is_open = self.config.listen
        least = 0 if (is_open and not self._is_evaluation) or not self._samples else 1
        self.supervisor = env_runner_supervisor(self.config, self._spawn)
        await self.supervisor.start(max(num, least))
        self.supervisor.prepare.append(self._bring_up_to_date)

    async def _spawn(self, place: Place) -> Any:
        """Start the runner of a place, and return its handle, ready to sample."""
        local = self.config.num_env_runners == 0
        name = f"{'eval-' if self._is_evaluation else ''}runner-{place.index}"
        # An environment's constructor may take as long as a reset; the runner enforces that limit.
        start_s, reset_s = self.config.process_start_timeout_s, self.config.env_reset_timeout_s
        handle = await self._system.spawn(
            _ROLE,
            self._sent_config(),
            self._worker_index(0 if local else place.index + 1),
            place.incarnation,
            is_local=local,
            place=name,
            name=name,
            in_process=local,
            deadline_s=start_s + reset_s if start_s and reset_s else 0.0,
            patience=place.patience,
        )
        if self.synced_module_ids is not None:
            await self._change_modules_of(handle)
        return handle

    async def _bring_up_to_date(self, place: Place) -> None:
        """Give a replacement its predecessor's env config, and the weights and connector state that were set."""
        handle = place.handle
        await self._give_env_config(place.index, handle)
        if self._weights is not None:
            await handle.set_weights(*self._weights)
        if self._connector_state is not None:
            await handle.set_connector_state(self._connector_state)
        self.recreated.append(place.index + 1)

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
        /,
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

    async def begin_again(self, number: int, generation: int) -> None:
        """Make every runner begin new episodes (see EnvRunner.begin_again), under weights of this generation."""
        if self.local_env_runner is not None:
            self.local_env_runner.begin_again(number)
        else:
            await self._on_all(lambda handle: handle.begin_again(number, generation))

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
        return [result for result in await asyncio.gather(*calls) if result is not None]

    # -- number of runners ----------------------------------------------------------------------

    def num_remote_env_runners(self) -> int:
        """Number of runner processes."""
        return len(self.handles)

    def num_healthy_remote_env_runners(self) -> int:
        """Number of runner processes that are alive."""
        return self.supervisor.num_healthy if self.supervisor is not None else 0

    num_remote_workers = num_remote_env_runners
    num_healthy_remote_workers = num_healthy_remote_env_runners

    # -- calls ----------------------------------------------------------------------------------

    async def foreach_env_runner(
        self,
        func: RunnerFunction | Sequence[RunnerFunction],
        *,
        kwargs: Mapping[str, Any] | None = None,
        local_env_runner: bool = True,
        remote_worker_ids: Collection[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call ``func(env_runner)`` in every runner's process; return the results in runner order.

        If a runner dies during the call, the call is repeated on its replacement; one that is not replaced is left out.

        Args:
            func: A function, pickled by value for local processes; its result must be plain values, arrays or
                episodes. Or the name of a method, or a list of either with one item per runner.
            kwargs: Additional arguments.
            local_env_runner: Whether to also call the runner in this process, if there is one.
            remote_worker_ids: Numbers of the runner processes to call, from 1; None: all.
            timeout_seconds: Results that take longer are left out, with a warning; None: no limit; 0: do not wait for
                results.

        Raises:
            Exception: An error raised by `func`.
        """
        options = dict(kwargs or {})
        if self.local_env_runner is not None:
            (function,) = _one_for_each(func, 1)
            return [_call(self.local_env_runner, function, options)] if local_env_runner else []
        numbers = self._chosen(remote_worker_ids)
        functions = _one_for_each(func, len(numbers))
        tasks = [
            asyncio.ensure_future(self._call_one(number, function, options))
            for number, function in zip(numbers, functions, strict=True)
        ]
        if not tasks:
            return []
        if timeout_seconds is not None:
            return await self._within(timeout_seconds, numbers, tasks)
        try:
            return [result for result in await asyncio.gather(*tasks) if result is not _GONE]
        finally:
            for task in tasks:
                task.cancel()

    async def _within(
        self, timeout_s: float, numbers: Sequence[int], tasks: Sequence[asyncio.Task[Any]]
    ) -> list[Any]:
        await asyncio.wait(tasks, timeout=timeout_s)
        late = [number for number, task in zip(numbers, tasks, strict=True) if not task.done()]
        if late and timeout_s:
            _log.warning("foreach_env_runner: no result of runner(s) %s within %g s", late, timeout_s)
        for number, task in zip(numbers, tasks, strict=True):
            if not task.done():
                self._in_background[f"late-{id(task)}", number] = task
                task.add_done_callback(self._forget)
        return [result for task in tasks if task.done() and (result := task.result()) is not _GONE]

    def _forget(self, done: asyncio.Task[Any]) -> None:
        """Discard the result of a call that ended without a waiter."""
        self._in_background = {key: task for key, task in self._in_background.items() if task is not done}
        if not done.cancelled() and done.exception() is not None:
            _log.warning("foreach_env_runner: a late call failed: %s", done.exception())

    async def foreach_env_runner_async(
        self,
        func: RunnerFunction | Sequence[RunnerFunction],
        tag: str | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        remote_worker_ids: Collection[int] | None = None,
    ) -> int:
        """Start calls of ``func(env_runner)`` in all runner processes. `fetch_ready_async_reqs` returns the results.

        Args:
            func, kwargs, remote_worker_ids: See `foreach_env_runner`.
            tag: A name for these calls. Each runner has at most one pending call per tag.

        Returns:
            Number of calls started: one per runner whose last result for this tag has been fetched.
        """
        numbers = self._chosen(remote_worker_ids)
        begun = 0
        for number, function in zip(numbers, _one_for_each(func, len(numbers)), strict=True):
            if (tag, number) in self._in_background:
                continue
            call = self._call_one(number, function, dict(kwargs or {}))
            self._in_background[tag, number] = asyncio.ensure_future(call)
            begun += 1
        return begun

    async def fetch_ready_async_reqs(
        self,
        *,
        tags: str | Collection[str | None] | None = None,
        timeout_seconds: float | None = 0.0,
    ) -> list[tuple[int, Any]]:
        """Return results of calls from `foreach_env_runner_async`, as (runner's number, result).

        Args:
            tags: The tag, or tags, of the results to return; None: all.
            timeout_seconds: Time to wait for the first result if none is ready; None: no limit.

        Raises:
            Exception: A function raised an error.
        """
        wanted = [tags] if isinstance(tags, str) else tags
        mine = {
            key: task
            for key, task in self._in_background.items()
            if (wanted is None or key[0] in wanted) and not str(key[0]).startswith("late-")
        }
        if not mine:
            return []
        await asyncio.wait(mine.values(), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        ready = [key for key, task in mine.items() if task.done()]
        # An error is raised alone: the other results are returned by the next call.
        ready = [key for key in ready if mine[key].exception() is not None][:1] or ready
        for key in ready:
            del self._in_background[key]
        results = [(number, mine[tag, number].result()) for tag, number in ready]
        return [(number, result) for number, result in results if result is not _GONE]

    async def foreach_env(self, func: Callable[[Any], Any]) -> list[list[Any]]:
        """Call ``func(env)`` for every env of every runner; return a list per runner."""
        return await self.foreach_env_runner(lambda env_runner: env_runner.foreach_env(func))

    async def cancel_calls(self) -> None:
        """Cancel the calls in the background."""
        tasks, self._in_background = list(self._in_background.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chosen(self, numbers: Collection[int] | None) -> list[int]:
        known = range(1, len(self.handles) + 1)
        unknown = [number for number in numbers or () if number not in known]
        if unknown:
            raise ValueError(
                f"remote_worker_ids: expected numbers from 1 to {len(self.handles)}, got {unknown[0]!r}."
            )
        return [number for number in known if numbers is None or number in numbers]

    async def _call_one(self, number: int, function: RunnerFunction, kwargs: dict[str, Any]) -> object:
        def on_role(role: Any) -> object:
            return _call_and_compare(role.env_runner, function, kwargs)

        assert self.supervisor is not None
        answer = await self.supervisor.call(number - 1, lambda handle: handle.apply(on_role))
        if answer is None:
            return _GONE
        result, env_config = answer
        if env_config is not None:
            self._env_configs[number - 1] = env_config
        return result

    async def _give_env_config(self, index: int, handle: ActorHandle) -> None:
        """Give a replacement its predecessor's env config, which a function may have changed (a curriculum)."""

        def make_again(role: Any, env_config: dict[str, Any]) -> None:
            role.env_runner.config.environment(env_config=env_config)
            role.env_runner.make_env()

        if index in self._env_configs:
            await handle.apply(make_again, self._env_configs[index])

    # -- synchronization ------------------------------------------------------------------------

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
        sync = self.merged_connectors
        if sync is None:
            single = self.config.single_spaces()
            sync = self.merged_connectors = MergedConnectors(
                self.config, {"__env_single__": single, "__env__": single}
            )
        if sync.is_needed:
            await self.set_connector_state(sync.merge(await self.get_connector_deltas()) or {})
        if rl_module_state:
            await self.set_module_states(rl_module_state)
        if env_steps_sampled is not None:
            counted = {"num_env_steps_sampled_lifetime": int(env_steps_sampled)}
            await self._on_all(lambda handle: handle.set_state(counted))

    async def stop(self) -> None:
        """End the runners."""
        await self.cancel_calls()
        if self.supervisor is not None:
            await self.supervisor.end()
        if self.local_env_runner is not None:
            with self._watch.call("close() of the envs"):
                self.local_env_runner.stop()
            self.local_env_runner = None


def flatten_episodes(batches: Sequence[Any]) -> list[Any]:
    """Return all episodes of several batches (or lists) in one list."""
    return [episode for batch in batches for episode in batch]


def _sampling(options: Mapping[str, Any], with_metrics: bool) -> Callable[[Any], Any]:
    if with_metrics:
        return lambda handle: handle.sample_with_metrics(options)
    return lambda handle: handle.sample(**options)


def _share(total: int, num: int, index: int) -> int:
    if total < 0:
        raise ConfigurationError(f"sample(): expected a number of steps or episodes ≥ 0, got {total}.")
    return total // num + (1 if index < total % num else 0)


def _call(env_runner: object, function: RunnerFunction, kwargs: Mapping[str, Any]) -> object:
    if isinstance(function, str):
        return getattr(env_runner, function)(**kwargs)
    result = function(env_runner, **kwargs)
    return list(result) if inspect.isgenerator(result) else result


def _call_and_compare(env_runner: EnvRunner, function: RunnerFunction, kwargs: Mapping[str, Any]) -> object:
    """Return (result, the runner's env config if the function has changed it, else None)."""
    before = dict(env_runner.config.env_config or {})
    result = _call(env_runner, function, kwargs)
    after = dict(env_runner.config.env_config or {})
    if before.keys() == after.keys() and all(before[key] is after[key] for key in after):
        return result, None
    try:
        pack_blob(after)
    except (TypeError, ValueError) as error:
        _log.warning("A replacement of this runner will use the run's env_config: %s", error)
        return result, None
    return result, after


def _one_for_each(func: RunnerFunction | Sequence[RunnerFunction], num: int) -> list[RunnerFunction]:
    if isinstance(func, str) or callable(func):
        return [func] * num
    functions = list(func)
    if len(functions) != num:
        raise ValueError(
            f"foreach_env_runner: expected {num} functions, one for each runner, got {len(functions)}."
        )
    return functions


_CONNECTORS = ("env_to_module_connector", "module_to_env_connector")


class MergedConnectors:
    """The statistics of connector pieces (running means, …), merged over all runners.

    Args:
        config: Source of the runners' connectors.
        spaces: ``{"__env_single__": (obs, act), …}``.

    Attributes:
        is_needed: Whether any piece has such state. If not, nothing is merged or sent.
    """

    def __init__(self, config: BaseConfig, spaces: Mapping[str, Any]) -> None:
        self.spaces = spaces
        env_to_module = config.build_env_to_module_connector(env=None, spaces=spaces)
        module_to_env = config.build_module_to_env_connector(env=None, spaces=spaces)
        self._pipelines = dict(zip(_CONNECTORS, (env_to_module, module_to_env), strict=True))
        self._lets_envs_stray = config.disable_env_checking
        self._merges = config.merge_env_runner_states is not False
        pieces = [piece for p in self._pipelines.values() for piece in p.flat]
        self.is_needed: bool = self._merges and any(piece.has_delta for piece in pieces)

    @property
    def stores_module_outputs(self) -> bool:
        """Whether episodes store the modules' outputs unchanged; custom module-to-env pieces may change them."""
        return bool(self._pipelines["module_to_env_connector"].on_rows)

    def stored_observation_space(self) -> Any:
        """Return the space of the observations in runners' episodes, as plain data.

        None if it cannot be determined, or if the config lets envs violate their spaces.
        """
        pipeline = self._pipelines["env_to_module_connector"]
        if not pipeline.on_rows or self._lets_envs_stray:
            return None
        try:
            return space_to_plain(pipeline.stored_observation_space)
        except NotPlainError:  # a custom space class
            return None

    def merge(self, deltas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """Merge the results of runners' `get_connector_delta`.

        Returns:
            The merged state for every runner's `set_connector_state`; None if no piece has state.
        """
        if not self.is_needed:
            return None
        listed = []
        for delta in deltas:
            if delta and not _is_finite(delta):
                _log.warning("a runner's connector state holds NaN or infinity: ignored")
            elif delta:
                listed.append(delta)
        for name, pipeline in self._pipelines.items():
            mine = [delta[name] for delta in listed if delta.get(name)]
            if mine:
                pipeline.merge_deltas(mine)
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """Return the merged state by pipeline."""
        return {name: state for name, p in self._pipelines.items() if (state := p.get_state())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `get_state`, e.g. from a checkpoint."""
        for name, pipeline in self._pipelines.items():
            pipeline.reset_state()
            if state.get(name):
                pipeline.set_state(state[name])


def _is_finite(delta: object) -> bool:
    if isinstance(delta, Mapping):
        return all(map(_is_finite, delta.values()))
    if isinstance(delta, (list, tuple)):
        return all(map(_is_finite, delta))
    if isinstance(delta, float) or (isinstance(delta, np.ndarray) and delta.dtype.kind == "f"):
        return bool(np.isfinite(delta).all())
    return True
