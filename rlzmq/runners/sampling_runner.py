"""SamplingRunner: what single- and multi-agent runners share around their samplers."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Mapping
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.bad_values import BadValue
from rlzmq.replay.episode_recorder import EpisodeRecorder
from rlzmq.runners.bad_steps import BadSteps
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.env_runner import EnvRunner, sample_limits
from rlzmq.runners.request import SampleRequest

__all__ = ["EPISODE_HOOKS", "SamplingRunner"]

EPISODE_HOOKS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class SamplingRunner(EnvRunner):
    """An EnvRunner that delegates to one of several samplers, chosen at each call.

    Attributes:
        use_fused: Set to False to always build real episodes.
        shared_data: Dict shared by the pieces of both pipelines between two full resets.
    """

    def __init__(self, *, config: BaseConfig, **kwargs: Any) -> None:
        self.use_fused = True
        self.shared_data: dict[str, Any] = {}
        self._sampler: Any = None
        self._bad_steps = BadSteps(self)
        self._chosen_for: tuple[Any, ...] = ()
        self._needs_seed = True
        self._seed_coordinates: tuple[int, ...] = ()  # of the next seeded reset; (): at the start of the run
        self._id_prefix = uuid.uuid4().hex[:20]
        self._num_episode_ids = 0
        self._recorder = _recorder_for(config)
        super().__init__(config=config, **kwargs)

    @abc.abstractmethod
    def _choose_sampler(self) -> Any:
        """Return the sampler for the current env, module and pipelines."""

    @abc.abstractmethod
    def _env_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return the observation and action spaces of the vector env and of a single one."""

    @abc.abstractmethod
    def _count(self, batch: Any, finished: Any) -> Mapping[str, Any]:
        """Count the sampled steps; return the runner-specific entries of the batch's meta."""

    @abc.abstractmethod
    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        """Return the steps that led an environment to a value in the last sampled batch, if known."""

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> Any:
        self._assert_running()
        num_timesteps, num_episodes = sample_limits(
            self.config, self.num_envs, self.worker_index, num_timesteps, num_episodes
        )
        if not (num_timesteps or num_episodes):
            return []
        request = SampleRequest(
            explore=self.config.explore if explore is None else explore,
            random_actions=random_actions,
            num_timesteps=num_timesteps,
            num_episodes=num_episodes,
        )
        return self._run(request, force_reset=force_reset or num_episodes is not None)

    def sample_lease(
        self,
        num_vector_steps: int,
        *,
        max_env_steps: int | None = None,
        max_s: float | None = None,
        explore: bool | None = None,
    ) -> Any:
        self._assert_running()
        if num_vector_steps < 1:
            raise ValueError(f"sample_lease: expected num_vector_steps >= 1, got {num_vector_steps}.")
        request = SampleRequest(
            explore=self.config.explore if explore is None else explore,
            num_vector_steps=num_vector_steps,
            max_env_steps=max_env_steps,
            ends_at=None if max_s is None else time.perf_counter() + max_s,
        )
        return self._run(request, force_reset=False)

    def _run(self, request: SampleRequest, *, force_reset: bool) -> Any:
        start_s = time.perf_counter()
        sampler = self._choose_sampler()
        if force_reset or not sampler.has_episodes:
            self.shared_data.clear()
            self.shared_data["generator"] = self.generator
            sampler.reset()
        try:
            batch, finished, num_vector_steps = sampler.run(request)
        except BaseException:
            sampler.forget()  # a step was interrupted: nothing can be continued
            raise
        batch, num_unusable = self._bad_steps.cut_out_of(batch)
        finished.leave_out_unusable()
        self.episode_metrics.add_episodes(finished.returns, finished.lengths, finished.durations_s)
        batch.meta = {
            "worker_index": self.worker_index,
            "incarnation": self.incarnation,
            "num_env_steps": batch.num_env_steps,
            **self._count(batch, finished),
            "num_vector_steps": num_vector_steps,
            "weights_version": self.weights_seq_no,
            "weights_generation": self.weights_generation,
            "episode_metrics": finished.to_dict(),
        }
        if num_unusable:
            batch.meta["num_env_steps_not_finite"] = num_unusable
        if self.callbacks.has("on_sample_end"):
            self.callbacks.call("on_sample_end", env_runner=self, metrics_logger=self.metrics, samples=batch)
            batch = batch.updated()
            batch.meta["num_env_steps"] = batch.num_env_steps
        if self._recorder is not None:
            self._recorder.add(batch)
        batch.meta["timers"] = self._time_sample(start_s)
        return batch

    def stop(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        super().stop()

    # -- called by samplers --------------------------------------------------------------------

    def take_reset_seed(self) -> int | None:
        """Return the seed of the next reset; only a vector env's first reset is seeded."""
        if not self._needs_seed:
            return None
        self._needs_seed = False
        return self.env_seed(*self._seed_coordinates)

    def new_episode_id(self) -> str:
        """Return an id that is unique across processes."""
        self._num_episode_ids += 1
        return f"{self._id_prefix}{self._num_episode_ids:012x}"

    # -- construction --------------------------------------------------------------------------

    def _make_pipelines(self) -> None:
        spaces = self._env_spaces()
        self.env_to_module = self.config.build_env_to_module_connector(env=self.env, spaces=spaces)
        self.module_to_env = self.config.build_module_to_env_connector(env=self.env, spaces=spaces)

    def _forget_episodes(self) -> None:
        self._needs_seed = True
        if self._sampler is not None:
            self._sampler.forget()


def _recorder_for(config: BaseConfig) -> EpisodeRecorder | None:
    """Return the recorder of a config's env runner; None if nothing is recorded."""
    if config.output is None or config.in_evaluation:
        return None
    return EpisodeRecorder(
        config.output,
        max_env_steps=config.output_max_rows_per_file,
        writes_unfinished=config.output_write_remaining_data,
        normalize_actions=config.normalize_actions,
    )
