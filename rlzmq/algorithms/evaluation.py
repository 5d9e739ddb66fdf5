"""Evaluation: rounds with the current weights in separate envs, with metrics separate from training.

alone      evaluate ─► on_evaluate_start ─► weights ─► sample ─► on_evaluate_end ─► result
parallel   begin ────► on_evaluate_start ─► weights ─► a task samples …
           … training steps …
           end, finish ───────────────────► the task's episodes ─► on_evaluate_end ─► result
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.algorithms.results import merge_into
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import without_objects
from rlzmq.core.errors import ClosedError, ConfigurationError, first_error
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.names import ALL_MODULES, COMPONENT_EVAL_ENV_RUNNER
from rlzmq.core.signatures import place_of_code
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.driver.session import Session
from rlzmq.driver.synchronous import CallbackDispatch
from rlzmq.runners.episode_metrics import EpisodeMetrics, FragmentMeta, add_fragment_metas

__all__ = ["Evaluation"]

_logger = logging.getLogger("rlzmq.evaluation")


class Evaluation:
    """Owner of the evaluation runners. A local runner is created for the first round.

    Metrics of a parallel round are logged, and its end callbacks called, only in `finish`, after training.
    """

    def __init__(
        self, config: BaseConfig, session: Session, dispatch: CallbackDispatch, metrics: MetricsLogger
    ) -> None:
        self._config = config
        self._session = session
        self._dispatch = dispatch
        self._metrics_logger = metrics
        self._synced_module_ids: list[str] | None = None
        self._metrics = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
        self._lifetime_counts: dict[str, Any] = {}
        self._offline_counts: Counter[str] = Counter()
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._sampling: SamplingRound | None = None
        self._local_runner: Any = None  # while it samples
        self.env_runner_group: AsyncEnvRunnerGroup | None = None

    async def start(self) -> None:
        """Start the evaluation processes, if the config has any."""
        if self._config.evaluation_num_env_runners:
            await self._make_group()

    async def _make_group(self) -> AsyncEnvRunnerGroup:
        config = self._config.get_evaluation_config_object()
        config.freeze()
        group = AsyncEnvRunnerGroup(
            config, system=self._session.system, is_evaluation=True, watch=self._session.watch
        )
        group.synced_module_ids = self._synced_module_ids
        await group.start()
        self.env_runner_group = group
        return group

    async def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None) -> None:
        """Change the modules of the evaluation runners.

        Args:
            config: The run's config with their new modules.
            synced_module_ids: Ids of the modules whose weights come from the learners; None: all.
        """
        self._config, self._synced_module_ids = config, synced_module_ids
        if self.env_runner_group is not None:
            own = config.get_evaluation_config_object()
            own.freeze()
            await self.env_runner_group.change_modules(own, synced_module_ids)

    # -- sequential rounds --------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """Run one round; see AsyncAlgorithm.evaluate. A parallel round in progress is ended and awaited first."""
        self.end()
        if self._task is not None:
            await asyncio.wait((self._task,))
        group = await self._prepare()
        if self.calls_custom_function:
            metrics = await self._call_custom_function()
        elif group.local_env_runner is not None:
            metrics = await self._sample_locally(group)
        else:
            sampling = self._new_sampling(group)
            sampling.end()
            metrics = await self._sample(sampling)
        return await self._call_end_callbacks(metrics)

    async def _sample_locally(self, group: AsyncEnvRunnerGroup) -> dict[str, Any]:
        self._local_runner = group.local_env_runner
        try:
            batches = await group.sample_batches(**self._options())
        except KeyboardInterrupt:  # the next round gets a new runner
            self.env_runner_group = None
            await group.stop()
            raise
        finally:
            self._local_runner = None
        return self._reduce([batch.meta for batch in batches])

    def interrupt(self) -> None:
        """Let a round that samples in this process raise Interrupted. May be called by a signal handler."""
        if (runner := self._local_runner) is not None:
            runner.interrupt()

    async def run_offline(self) -> dict[str, Any]:
        """Evaluate on recorded data; see AsyncAlgorithm.evaluate_offline."""
        await self._dispatch.call("on_evaluate_offline_start", metrics_logger=self._metrics_logger)
        results = await self._session.learner_group.evaluate_offline()
        overall = results[ALL_MODULES]
        self._offline_counts.update(overall)
        overall |= {f"{name}_lifetime": count for name, count in self._offline_counts.items()}
        return await self._call_end_callbacks({"offline_eval_runners": results}, "on_evaluate_offline_end")

    async def _prepare(self) -> AsyncEnvRunnerGroup:
        """Return the runners, with the learners' weights and the merged connector states."""
        await self._dispatch.call("on_evaluate_start", metrics_logger=self._metrics_logger)
        group = self.env_runner_group or await self._make_group()
        snapshot, version = await self._session.learner_group.get_inference_weights(group.synced_module_ids)
        await group.set_weights(snapshot, version, num_env_steps=self._session.accounting.sampled)
        await group.set_connector_state(self._session.get_connector_state())
        return group

    async def _call_end_callbacks(
        self, metrics: dict[str, Any], hook: str = "on_evaluate_end"
    ) -> dict[str, Any]:
        await self._dispatch.call(hook, metrics_logger=self._metrics_logger, evaluation_metrics=metrics)
        return metrics

    # -- parallel rounds ----------------------------------------------------------------

    @property
    def is_parallel(self) -> bool:
        """Whether rounds run in parallel to training steps."""
        return bool(self._config.evaluation_parallel_to_training and self._config.evaluation_num_env_runners)

    @property
    def calls_custom_function(self) -> bool:
        """Whether a user function evaluates."""
        return self._config.custom_evaluation_function is not None

    @property
    def has_failed(self) -> bool:
        """Whether the current parallel round has failed; `finish` raises its error."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    async def begin(self, expected_s: float | None) -> None:
        """Begin a parallel round. The runners are sampling when this returns.

        Args:
            expected_s: Expected duration of the training steps in seconds, if known.
        """
        group = await self._prepare()
        if self.calls_custom_function:
            self._task = asyncio.create_task(self._call_custom_function(), name="evaluation round")
            return
        self._sampling = sampling = self._new_sampling(group, expected_s)
        self._task = asyncio.create_task(self._sample(sampling), name="evaluation round")
        asked = asyncio.create_task(sampling.asked.wait(), name="evaluation round asked")
        try:
            await asyncio.wait((self._task, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    async def _sample(self, sampling: SamplingRound) -> dict[str, Any]:
        metas = await sampling.run()
        return self._reduce(metas)

    def end(self) -> None:
        """Let the parallel round end as soon as possible, since training is over."""
        if self._sampling is not None:
            self._sampling.end()

    async def finish(self) -> dict[str, Any]:
        """Return the result of the parallel round.

        Raises:
            ClosedError: The run was stopped during the round.
            Exception: The error raised by the round.
        """
        self.end()
        task = self._task
        if task is not None:
            await asyncio.wait((task,))
        self._task = self._sampling = None
        if task is None or task.cancelled():
            raise ClosedError("the run was stopped")
        return await self._call_end_callbacks(task.result())

    async def abandon(self) -> None:
        """Cancel the parallel round in progress, if any, and discard its results."""
        task, self._task, self._sampling = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # mark as retrieved: another error takes precedence, or the round is not needed

    # -- contents of a round ------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        config = self._config
        if config.evaluation_duration_unit == "episodes":
            return {"num_episodes": config.evaluation_duration}
        force_reset = config.evaluation_force_reset_envs_before_iteration
        return {"num_timesteps": config.evaluation_duration, "force_reset": force_reset}

    def _new_sampling(self, group: AsyncEnvRunnerGroup, expected_s: float | None = None) -> SamplingRound:
        config = self._config
        if config.evaluation_duration != "auto":
            return SamplingRound(group, **self._options())
        until_end = {
            "min_env_steps": config.evaluation_auto_duration_min_env_steps_per_sample,
            "max_env_steps": config.evaluation_auto_duration_max_env_steps_per_sample,
            "expected_s": expected_s,
        }
        force_reset = config.evaluation_force_reset_envs_before_iteration
        return SamplingRound(group, until_end=until_end, force_reset=force_reset)

    async def _call_custom_function(self) -> dict[str, Any]:
        function: Any = self._config.custom_evaluation_function
        algorithm = self._dispatch.algorithm
        outcome = await self._dispatch.run(
            "custom_evaluation_function", function, algorithm, algorithm.eval_env_runner_group
        )
        try:
            results, num_env_steps, num_agent_steps = outcome
            results = dict(results)
        except (TypeError, ValueError):
            raise ConfigurationError(
                "config.custom_evaluation_function: expected it to return (results, env_steps, agent_steps), got "
                f"{outcome!r}{place_of_code(function)}."
            ) from None
        return {
            **(results if "env_runners" in results else {"env_runners": results}),
            "num_env_steps_sampled_this_iter": num_env_steps,
            "num_agent_steps_sampled_this_iter": num_agent_steps,
        }

    def _reduce(self, metas: Sequence[FragmentMeta]) -> dict[str, Any]:
        """Return the result: metrics of this round's episodes, and lifetime counts over all rounds."""
        self._warn_if_slow(metas)
        episodes = EpisodeMetrics(num_smoothed=1_000_000)
        episodes.set_state(self._lifetime_counts)
        add_fragment_metas(episodes, self._metrics, metas)
        counts = episodes.get_state()
        self._lifetime_counts = {name: counts[name] for name in counts if name.endswith("_lifetime")}
        result = {"env_runners": episodes.reduce()}
        result["env_runners"]["hist_stats"] = {
            "episode_return": [float(value) for value in episodes.returns],
            "episode_len": [int(value) for value in episodes.lengths],
        }
        merge_into(result, self._metrics.reduce())
        return result

    def _warn_if_slow(self, metas: Sequence[FragmentMeta]) -> None:
        config = self._config
        limit_s = config.evaluation_sample_timeout_s
        if limit_s is None or config.evaluation_duration == "auto":
            return
        # Measured by the runners, since their results may have waited for training in this process.
        slowest_s = max((float(meta["timers"]["sample"][0]) for meta in metas), default=0.0)
        if slowest_s > limit_s:
            _logger.warning(
                "An evaluation round of %s %s took %.1f s, more than evaluation_sample_timeout_s=%s.",
                config.evaluation_duration,
                config.evaluation_duration_unit,
                slowest_s,
                limit_s,
            )

    # -- checkpoints and stop ---------------------------------------------------------------

    async def get_state(self) -> dict[str, Any]:
        """Return the component of a checkpoint: metrics."""
        state: dict[str, Any] = {}
        if self._lifetime_counts or self._offline_counts:
            logged = without_objects(self._metrics.get_state())
            state[COMPONENT_EVAL_ENV_RUNNER] = {
                "lifetime_counts": self._lifetime_counts,
                "offline_counts": dict(self._offline_counts),
                "metrics": logged,
            }
        return state

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`."""
        if COMPONENT_EVAL_ENV_RUNNER in state or "algorithm" in state:
            mine = state.get(
                COMPONENT_EVAL_ENV_RUNNER, {}
            )  # a whole run's state lacks it if nothing was evaluated
            self._lifetime_counts = dict(mine.get("lifetime_counts", {}))
            self._offline_counts = Counter(mine.get("offline_counts", {}))
            self._metrics.set_state(mine.get("metrics", {}))

    async def stop(self) -> None:
        """Cancel the parallel round in progress, and stop the evaluation runners."""
        await self.abandon()
        if self.env_runner_group is not None:
            await self.env_runner_group.stop()


_round_ids = itertools.count(1)


class SamplingRound:
    """One round of a group of runner processes, e.g. of evaluation during training, which returns metas, no episodes.

    Between the request and the end of the round runners do not depend on the caller's event loop, so training in the
    caller's process, which blocks that loop, does not delay them.

    A runner that dies is replaced, and its replacement samples the whole share, as with `AsyncEnvRunnerGroup.sample`.
    When `run` is cancelled, runners that sample until the end stop after the current sample call; those that sample
    a share complete it, and the result is discarded.

    Args:
        group: An AsyncEnvRunnerGroup with processes.
        until_end: Limits for runners that sample until `end` is called, at least once each; None: a share each.
            ``min_env_steps`` and ``max_env_steps`` bound one sample call of one runner; the calls aim to end after
            ``expected_s`` seconds (None: unknown).
        options: Arguments of `AsyncEnvRunnerGroup.sample`: the amount (without `until_end`), ``force_reset``, ….

    Attributes:
        asked: Set once every runner has been called.
    """

    def __init__(self, group: Any, *, until_end: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._supervisor = group.supervisor
        self._until_end = until_end
        self._options = options
        everyone = range(len(group.handles))
        self._shares: list[tuple[int, Mapping[str, Any]]] = (
            group.share_out(**options) if until_end is None else [(index, options) for index in everyone]
        )
        self._id = next(_round_ids)
        self._over = asyncio.Event()
        self._num_asked = 0
        self.asked: asyncio.Event = asyncio.Event()

    def end(self) -> None:
        """End the round for runners that sample until the end. Idempotent; may be called at any time."""
        self._over.set()

    async def run(self) -> list[FragmentMeta]:
        """Run the round.

        Returns:
            The metas of all samples, in order for each runner.

        Raises:
            Exception: A runner's code failed, or a runner could not be replaced.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(self._ask(index, options)) for index, options in self._shares]
                if self._until_end is not None:
                    tasks.create_task(self._tell_the_end())
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return [meta for task in asking for meta in task.result() or ()]

    async def _ask(self, index: int, options: Mapping[str, Any]) -> list[FragmentMeta] | None:
        def call(handle: ActorHandle) -> Any:
            self._num_asked += 1
            if self._num_asked >= len(self._shares):
                # The call below is sent before the callback runs.
                asyncio.get_running_loop().call_soon(self.asked.set)
            if self._until_end is None:
                return handle.measure(options)
            # A replacement may start after the end; it samples once.
            rounds = 0 if self._over.is_set() else self._id
            return handle.measure_until_end(rounds, self._until_end, options)

        return await self._supervisor.call(index, call)  # type: ignore[no-any-return]

    async def _tell_the_end(self) -> None:
        await self._over.wait()
        async with asyncio.TaskGroup() as tasks:
            for index, _ in self._shares:
                tasks.create_task(self._supervisor.call(index, lambda handle: handle.end_round(self._id)))
