"""Evaluation of a checkpoint's policy on whole episodes, with statistics and a video of the first episodes."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.algorithms.checkpoints import load_policy, read_algorithm
from rlzmq.algorithms.stored_config import Given
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError, Progress
from rlzmq.core.files import opener
from rlzmq.core.imports import import_optional
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.score_statistics import Statistic, bootstrap_interval, interquartile_mean, mean
from rlzmq.core.version import __version__
from rlzmq.driver.sync_groups import EnvRunnerGroup
from rlzmq.envs.registry import EnvContext, make_env, resolve_env
from rlzmq.runners.episode_metrics import EpisodeMetrics, add_fragment_metas

__all__ = ["CheckpointScores", "evaluate_checkpoint"]

_log = logging.getLogger("rlzmq.evaluation")

_VIDEO_SUFFIXES = (".mp4", ".gif")
_MAX_GIF_FPS = 50  # delays of a GIF are in hundredths of a second, and viewers slow down a delay of one
_MAX_INLINE_BYTES = 8_000_000


@dataclass(frozen=True)
class CheckpointScores:
    """Returns and lengths of a checkpoint's evaluation episodes. Notebooks show them as a table, with the video.

    Attributes:
        checkpoint: The evaluated checkpoint.
        env: The environment.
        seed: Seed of the environment; None: a random one.
        explore: Whether actions were sampled from the distribution.
        returns: Return of each episode, in order.
        lengths: Env steps of each episode.
        agent_return_means: Mean return by agent id; {} for single-agent environments.
        video: The video file, or None.
    """

    checkpoint: str
    env: str
    seed: int | None
    explore: bool
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    agent_return_means: Mapping[str, float]
    video: Path | None = None

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def iqm(self) -> float:
        """Interquartile mean of the returns."""
        return float(interquartile_mean(self.returns))

    @property
    def mean_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean; NaN for a single episode."""
        return self._interval(mean)

    @property
    def iqm_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the interquartile mean; NaN for a single episode."""
        return self._interval(interquartile_mean)

    def _interval(self, statistic: Statistic) -> tuple[float, float]:
        low, high = bootstrap_interval(self.returns, statistic)
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values. Statistics that do not exist are None."""
        return {
            "checkpoint": self.checkpoint,
            "env": self.env,
            "seed": self.seed,
            "explore": self.explore,
            "rlzmq": __version__,
            "return": {
                "mean": self.mean,
                "mean_interval_95": _finite(self.mean_interval),
                "iqm": self.iqm,
                "iqm_interval_95": _finite(self.iqm_interval),
                "std": float(np.std(self.returns)),
                "min": min(self.returns),
                "max": max(self.returns),
            },
            "length_mean": float(np.mean(self.lengths)),
            "agent_return_means": dict(self.agent_return_means),
            "episodes": [
                {"return": episode_return, "length": length}
                for episode_return, length in zip(self.returns, self.lengths, strict=True)
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as a JSON file."""
        try:  # the path may name a pipe or a device, which is written to and not replaced
            with open(path, "w", encoding="utf-8", opener=opener) as file:
                file.write(json.dumps(self.to_dict(), indent=1) + "\n")
        except OSError as error:
            error.filename = str(path)  # a write to a full disk leaves it out
            raise

    def __str__(self) -> str:
        lines = [
            f"episodes {len(self.returns)}  return mean {self.mean:.2f} {_shown(self.mean_interval)}  "
            f"IQM {self.iqm:.2f} {_shown(self.iqm_interval)}  (95 % intervals, bootstrap over episodes)",
            f"min {min(self.returns):.2f}  max {max(self.returns):.2f}  length mean {np.mean(self.lengths):.1f}",
        ]
        if self.agent_return_means:
            lines.append("  ".join(f"{id_} {value:.2f}" for id_, value in self.agent_return_means.items()))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            ("return mean", f"{self.mean:.2f} {_shown(self.mean_interval)}"),
            ("return IQM", f"{self.iqm:.2f} {_shown(self.iqm_interval)}"),
            ("min, max", f"{min(self.returns):.2f}, {max(self.returns):.2f}"),
            ("episodes", f"{len(self.returns)}, {np.mean(self.lengths):.1f} steps long on average"),
        ]
        table = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
        return f"<table>{table}</table>{self._video_html()}"

    def _video_html(self) -> str:
        if self.video is None or self.video.stat().st_size > _MAX_INLINE_BYTES:
            return ""
        data = base64.b64encode(self.video.read_bytes()).decode()
        if self.video.suffix == ".gif":
            return f'<img src="data:image/gif;base64,{data}">'
        return f'<video controls src="data:video/mp4;base64,{data}"></video>'


def evaluate_checkpoint(
    path: str | Path,
    *,
    num_episodes: int = 10,
    seed: int | None = None,
    explore: bool = False,
    video: str | Path | None = None,
    num_video_episodes: int = 1,
    config: BaseConfig | None = None,
    trust: Collection[str] = (),
    module_class: type | Mapping[str, type] | None = None,
    **settings: object,
) -> CheckpointScores:
    """Evaluate a checkpoint's policy in this process.

    The episodes are played one after the other in one environment. With several environments, short episodes would end
    first and be counted too often.

    Args:
        path: A checkpoint, or a run directory, whose newest intact checkpoint is evaluated.
        num_episodes: Number of complete episodes.
        seed: Seed of the environment; None: the run's.
        explore: Whether to sample actions from the distribution instead of taking its mode.
        video: ``.mp4`` or ``.gif`` file for a video of the first episodes; None: no video.
        num_video_episodes: Number of episodes in the video.
        config: Replaces the stored config.
        trust, module_class, settings: See `Policy.load`. Evaluating also needs the environment: ``env=MyEnv``.

    Raises:
        ConfigurationError: A count is below 1, the video's suffix is unknown, or the environment renders no images.
        MissingPackageError: imageio is not installed (``pip install 'rlzmq[video]'``).
        CheckpointError: See `Algorithm.from_checkpoint`.
    """
    for name, count in (("num_episodes", num_episodes), ("num_video_episodes", num_video_episodes)):
        if count < 1:
            raise ConfigurationError(f"{name}={count}: expected 1 or more.")
    recorder = None if video is None else _VideoRecorder(Path(video), min(num_video_episodes, num_episodes))
    stored = read_algorithm(path)
    chosen = stored.config_to("evaluate", Given(config, trust, module_class, settings))
    chosen = _config_for_evaluation(chosen.copy(copy_frozen=False), num_episodes, explore)
    if seed is not None or chosen.seed is None:
        chosen.debugging(seed=stored.seed if seed is None else seed)
    if recorder is not None:
        recorder.configure(chosen)
    chosen.offline_data(input_=None).experimental(_validate_config=False)  # the policy needs no data
    group = EnvRunnerGroup(config=chosen.get_evaluation_config_object(), is_evaluation=True)
    try:
        group.foreach_env_runner(partial(load_policy, state=stored.acting_state))
        progress, metas = Progress("played %d of %d episodes", num_episodes, _log.warning), []
        for _ in range(num_episodes):
            metas += [batch.meta for batch in group.sample_batches(num_episodes=1)]
            progress.add()
    finally:
        group.stop()
        if recorder is not None:
            recorder.close()
    episodes = EpisodeMetrics(num_smoothed=num_episodes)
    add_fragment_metas(episodes, MetricsLogger(), metas)
    metrics = episodes.reduce()
    by_agent = metrics.get("agent_episode_return_mean", {})
    return CheckpointScores(
        checkpoint=str(path),
        env=resolve_env(chosen.env).label,
        seed=chosen.seed,
        explore=explore,
        returns=tuple(float(value) for value in episodes.returns),
        lengths=tuple(int(value) for value in episodes.lengths),
        agent_return_means={str(id_): float(value) for id_, value in by_agent.items()},
        video=None if recorder is None else recorder.path,
    )


def _config_for_evaluation(config: BaseConfig, num_episodes: int, explore: bool) -> BaseConfig:
    """Change `config` to that of a serial run with one environment, for evaluation."""
    config.env_runners(num_env_runners=0).learners(num_learners=0).evaluation(
        evaluation_num_env_runners=0,
        evaluation_interval=None,
        evaluation_parallel_to_training=False,
        evaluation_duration=num_episodes,
        evaluation_duration_unit="episodes",
        evaluation_config={"explore": explore, "num_envs_per_env_runner": 1},
    )
    config.networking(listen=None, advertise=None, join_file=None, num_remote_learners=0)
    return config


class _VideoRecorder:
    """Writes the images of the first episodes to a video, as callbacks of the env runner."""

    def __init__(self, path: Path, num_episodes: int) -> None:
        if path.suffix not in _VIDEO_SUFFIXES:
            raise ConfigurationError(f"video {path}: expected a file name that ends with .mp4 or .gif.")
        if not path.parent.is_dir():
            raise ConfigurationError(f"video {path}: there is no directory {path.parent}.")
        self.path: Path | None = path
        self._format = path.suffix
        self._content = io.BytesIO()
        self._num_left = num_episodes
        self._imageio = import_optional("imageio.v2", "A video", "rlzmq[video]")
        if path.suffix == ".mp4":
            import_optional("imageio_ffmpeg", "An mp4 video", "rlzmq[video]")
        self._writer: Any = None
        self._frames_per_s = 30.0

    def configure(self, config: BaseConfig) -> None:
        """Make the config's environments render images, and its env runner call this recorder.

        Raises:
            ConfigurationError: The environment renders no images.
        """
        if not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
            os.environ.setdefault(
                "SDL_VIDEODRIVER", "dummy"
            )  # otherwise pygame complains that there is no display
        settings = {**config.env_config, "render_mode": "rgb_array"}
        env = _env_with_pictures(config.env, settings)
        self._frames_per_s = float(env.metadata.get("render_fps") or 30)
        env.close()
        config.environment(env_config=settings)
        if config.gym_env_vectorize_mode == "async":
            config.env_runners(gym_env_vectorize_mode="sync")
        config.callbacks(on_episode_start=self._add, on_episode_step=self._add, on_episode_end=self._end)

    def close(self) -> None:
        """Write the file. If that fails, log the error, and let `path` be None: the scores are kept."""
        if self._writer is None or self.path is None:
            return
        self._writer.close()
        try:
            self.path.write_bytes(self._content.getbuffer())
        except OSError as error:
            _log.error("no video was written to %s: %s", self.path, error)
            self.path = None

    def _add(self, *, env: Any, env_index: int, **kwargs: object) -> None:
        if self._num_left < 1 or env_index:
            return
        frame = _first(env.envs[0].render() if hasattr(env, "envs") else env.render())
        if self._writer is None:
            self._writer = self._open()
        # The codec takes even sizes only: of an odd one, the last row or column is repeated.
        odd = ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0))
        self._writer.append_data(np.pad(frame, odd, mode="edge"))

    def _end(self, **kwargs: object) -> None:
        self._num_left -= 1

    def _open(self) -> Any:
        options: dict[str, Any] = {"fps": self._frames_per_s, "macro_block_size": 2}
        if self._format == ".gif":
            options = {"duration": 1000 / min(self._frames_per_s, _MAX_GIF_FPS), "loop": 0}
        # In memory: imageio's writers of files that cannot be written fail once more when they are deleted.
        return self._imageio.get_writer(self._content, format=self._format, **options)


def _env_with_pictures(env: object, settings: Mapping[str, Any]) -> Any:
    label = resolve_env(env).label
    how = f"video: {label} makes no pictures with env_config={{'render_mode': 'rgb_array'}}"
    try:
        made = make_env(env, EnvContext(settings))
    except Exception as error:
        raise ConfigurationError(f"{how}: {error}") from error
    if getattr(made, "render_mode", None) == "rgb_array":
        return made
    modes = getattr(made, "metadata", {}).get("render_modes") or "none"
    raise ConfigurationError(
        f"{how}: its render_mode is {getattr(made, 'render_mode', None)!r}, its render modes are {modes}. Its "
        "constructor should take render_mode and set self.render_mode; render() should return an array [height, width, "
        "3] of uint8."
    )


def _first(rendered: object) -> NDArray[np.uint8]:
    """Return the image of the first environment, from the rendering of a single or a vector env."""
    frame = rendered[0] if isinstance(rendered, tuple | list) and rendered else rendered
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return frame
    came = f"{frame.dtype}{list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise ConfigurationError(
        f"video: the environment's render() returned {came}; expected an array [height, width, 3] of uint8."
    )


def _finite(interval: tuple[float, float]) -> list[float] | None:
    return None if np.isnan(interval).any() else list(interval)


def _shown(interval: tuple[float, float]) -> str:
    return "[–]" if np.isnan(interval).any() else f"[{interval[0]:.2f}, {interval[1]:.2f}]"
