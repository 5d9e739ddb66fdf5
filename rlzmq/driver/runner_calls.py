"""RunnerCalls: function calls on every env runner of a group, and explicit synchronization of weights and states.

A run synchronizes by itself. Custom training steps and standalone groups call these methods.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.updates import ConnectorSync
from rlzmq.wire.payloads import pack_blob

__all__ = ["RunnerCalls", "RunnerFunction"]


_log = logging.getLogger("rlzmq.driver")


RunnerFunction = Callable[..., Any] | str
"""``fn(env_runner, **kwargs)``, or the name of one of its methods."""


class RunnerCalls:
    """The function calls and explicit synchronization of AsyncEnvRunnerGroup. Runners are numbered from 1, as in RLlib.

    Attributes:
        learner_group: The learners of the run; None for a standalone group.
        sync_with_run: Sends the learners' weights to all runners.
        connector_sync: Merges connector states. It is the run's, or created on first use.
    """

    config: BaseConfig
    handles: list[Any]
    local_env_runner: Any
    supervisor: Any
    _on_all: Callable[[Callable[[Any], Any]], Awaitable[list[Any]]]
    get_connector_deltas: Callable[[], Awaitable[list[Any]]]
    set_connector_state: Callable[[Mapping[str, Any]], Awaitable[None]]

    def __init__(self) -> None:
        self.learner_group: Any = None
        self.sync_with_run: Callable[[], Awaitable[None]] | None = None
        self.connector_sync: ConnectorSync | None = None
        self._in_background: dict[tuple[str | None, int], asyncio.Task[Any]] = {}
        self._env_configs: dict[int, dict[str, Any]] = {}  # by place, if a function has changed it

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

        If a runner dies during the call, the call is repeated on its replacement.

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
            return list(await asyncio.gather(*tasks))
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
        return [task.result() for task in tasks if task.done()]

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
        for key in ready:
            del self._in_background[key]
        return [(number, mine[tag, number].result()) for tag, number in ready]

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
        def on_role(role: Any) -> Any:
            return _call_and_compare(role.env_runner, function, kwargs)

        result, env_config = await self.supervisor.call(number - 1, lambda handle: handle.apply(on_role))
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


def _call(env_runner: object, function: RunnerFunction, kwargs: Mapping[str, Any]) -> object:
    if isinstance(function, str):
        return getattr(env_runner, function)(**kwargs)
    result = function(env_runner, **kwargs)
    return list(result) if inspect.isgenerator(result) else result


def _call_and_compare(env_runner: Any, function: RunnerFunction, kwargs: Mapping[str, Any]) -> object:
    """Return (result, the runner's env config if the function has changed it, else None)."""
    before = dict(getattr(env_runner.config, "env_config", None) or {})
    result = _call(env_runner, function, kwargs)
    after = dict(getattr(env_runner.config, "env_config", None) or {})
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
