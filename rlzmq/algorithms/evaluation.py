"""Evaluation rounds: the current weights, in envs of their own, counted apart from training."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.algorithms.face import Face
from rlzmq.algorithms.results import merge_into
from rlzmq.core.frozen import freeze_known, thaw
from rlzmq.core.metrics import MetricsLogger
from rlzmq.runners.episode_metrics import EpisodeMetrics
from rlzmq.runners.fragment_metas import add_fragment_metas
from rlzmq.runtime.env_runner_group import AsyncEnvRunnerGroup
from rlzmq.runtime.session import Session

__all__ = ["Evaluation"]

_logger = logging.getLogger("rlzmq.evaluation")

_RUNNERS = "eval_env_runners/"
_METRICS = "evaluation"


class Evaluation:
    """Owns the evaluation runners; the local one is made at the first round.

    Args:
        config: The run's config.
        session: Where weights and connector states come from.
        face: Whose callbacks are called.
        metrics: The algorithm's MetricsLogger, for callbacks.
    """

    def __init__(self, config: Any, session: Session, face: Face, metrics: MetricsLogger) -> None:
        self._config = config
        self._session = session
        self._face = face
        self._metrics_logger = metrics
        self._synced_module_ids: list[str] | None = None
        self._metrics = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
        self._lifetime_counts: dict[str, Any] = {}
        self.env_runner_group: AsyncEnvRunnerGroup | None = None

    async def start(self) -> None:
        """Start the evaluation processes, where the config asks for some."""
        if self._config.evaluation_num_env_runners:
            await self._make_group()

    async def _make_group(self) -> AsyncEnvRunnerGroup:
        config = self._config.get_evaluation_config_object()
        config.freeze()
        group = AsyncEnvRunnerGroup(config, system=self._session.system, is_evaluation=True)
        group.synced_module_ids = self._synced_module_ids
        await group.start()
        self.env_runner_group = group
        return group

    async def change_modules(self, config: Any, synced_module_ids: list[str] | None) -> None:
        """From now on the evaluation runners have these modules.

        Args:
            config: The run's config with the modules that they have.
            synced_module_ids: Of which the learners bring the weights; None: all.
        """
        self._config, self._synced_module_ids = config, synced_module_ids
        if self.env_runner_group is not None:
            own = config.get_evaluation_config_object()
            own.freeze()
            await self.env_runner_group.change_modules(own, synced_module_ids)

    async def run(self) -> dict[str, Any]:
        """One round; see AsyncAlgorithm.evaluate."""
        await self._face.call("on_evaluate_start", metrics_logger=self._metrics_logger)
        metrics = await self._round()
        await self._face.call(
            "on_evaluate_end", metrics_logger=self._metrics_logger, evaluation_metrics=metrics
        )
        return metrics

    async def _round(self) -> dict[str, Any]:
        algorithm = self._face.algorithm
        group = self.env_runner_group or await self._make_group()
        snapshot, version = await self._session.get_inference_weights(group.synced_module_ids)
        await group.set_weights(snapshot, version)
        await group.set_connector_state(self._session.get_connector_state())
        custom = self._config.custom_evaluation_function
        if custom is not None:
            outcome = await in_calling_thread(lambda: custom(algorithm, algorithm.eval_env_runner_group))
            if inspect.isawaitable(outcome):
                outcome = await outcome
            results, num_env_steps, num_agent_steps = outcome
            return {
                "env_runners": dict(results),
                "num_env_steps_sampled_this_iter": num_env_steps,
                "num_agent_steps_sampled_this_iter": num_agent_steps,
            }
        duration = self._config.evaluation_duration
        duration = 10 if duration == "auto" else duration
        force_reset = self._config.evaluation_force_reset_envs_before_iteration
        start_s = time.perf_counter()
        if self._config.evaluation_duration_unit == "episodes":
            batches = await group.sample_batches(num_episodes=duration)
        else:
            batches = await group.sample_batches(num_timesteps=duration, force_reset=force_reset)
        limit_s, seconds = self._config.evaluation_sample_timeout_s, time.perf_counter() - start_s
        if limit_s is not None and seconds > limit_s:
            _logger.warning(
                "An evaluation round of %s %s took %.1f s, more than evaluation_sample_timeout_s=%s.",
                duration,
                self._config.evaluation_duration_unit,
                seconds,
                limit_s,
            )
        return self._reduce([batch.meta for batch in batches])

    def _reduce(self, metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The round's result: its own episodes alone, lifetime counts over all rounds."""
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

    async def get_state(self) -> dict[str, Any]:
        """Components of a checkpoint: metrics, and each evaluation runner's sampling state, once there was a round."""
        state: dict[str, Any] = {}
        if self._lifetime_counts:
            logged = freeze_known(self._metrics.get_state())
            state[_METRICS] = {"lifetime_counts": self._lifetime_counts, "metrics": logged}
        if self.env_runner_group is not None:
            states = await self.env_runner_group.get_sampling_states()
            state |= {f"{_RUNNERS}{name}": part for name, part in states.items()}
        return state

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave; with runners, if this run evaluates at all."""
        if _METRICS in state:
            self._lifetime_counts = dict(state[_METRICS]["lifetime_counts"])
            self._metrics.set_state(thaw(state[_METRICS]["metrics"]))
        mine = {n.removeprefix(_RUNNERS): part for n, part in state.items() if n.startswith(_RUNNERS)}
        if mine and (self.env_runner_group is not None or self._config.evaluation_interval):
            group = self.env_runner_group or await self._make_group()
            await group.set_sampling_states(mine)

    async def stop(self) -> None:
        """End the evaluation runners."""
        if self.env_runner_group is not None:
            await self.env_runner_group.stop()
