"""Algorithm: the synchronous interface of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.algorithms.async_algorithm import AsyncAlgorithm
from rlzmq.algorithms.checkpoints import (
    check_algorithm_class,
    latest_checkpoint,
    read_algorithm,
    resume_config,
)
from rlzmq.algorithms.policy import Policy
from rlzmq.algorithms.registry import config_class_named
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.driver.env_runner_group import EnvRunnerGroup
from rlzmq.driver.learner_group import LearnerGroup
from rlzmq.driver.run_coroutine import runner_for
from rlzmq.driver.update_results import Accounting
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec

__all__ = ["Algorithm"]


class Algorithm:
    """A run with blocking methods: trains, evaluates, saves and restores.

    With ``num_env_runners=0`` and ``num_learners=0`` everything runs in the calling thread, without other
    processes, threads or an event loop, so that a debugger can step through it. Otherwise an event loop on a
    separate thread communicates with the processes; this also works inside a running loop (notebooks).

    Example::

        with PPOConfig().environment("CartPole-v1").build() as algo:
            print(algo.train()["env_runners"]["episode_return_mean"])

    Custom algorithms override `training_step` and use `env_runner_group.sample()`,
    `learner_group.update(episodes=…)` and `sync_weights()`.

    Args:
        config: The config; one that is not frozen is copied, validated and frozen first.
    """

    config_class: ClassVar[Any] = None

    @classmethod
    def get_default_config(cls) -> Any:
        """Return this algorithm's config with its defaults; custom algorithms override it or set `config_class`."""
        return (cls.config_class or config_class_named("AlgorithmConfig"))(algo_class=cls)

    def __init__(self, config: BaseConfig) -> None:
        _check_is_config(type(self), config)
        if not config.is_frozen:
            config = config._for_build(None, True)
        overrides_step = type(self).training_step is not Algorithm.training_step
        self._async = _WithSyncTrainingStep(config) if overrides_step else AsyncAlgorithm(config)
        self._async._dispatch.algorithm = self
        self._run = runner_for(config)
        self._run(self._async.start())

    # -- training -------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Run one iteration and return its result under RLlib's keys (see AsyncAlgorithm.train)."""
        return self._run(self._async.train())  # type: ignore[no-any-return]

    def training_step(self) -> Any:
        """Run one update. Custom algorithms override it, return None, and report through `self.metrics`."""
        self._run(AsyncAlgorithm.training_step(self._async))

    def log_result(self, result: dict[str, Any]) -> None:
        """Handle the result of an iteration, after the callbacks. Does nothing; override it to log results."""

    def evaluate(self) -> dict[str, Any]:
        """Run one evaluation round and return ``{"env_runners": {"episode_return_mean": …, …}}``."""
        return self._run(self._async.evaluate())  # type: ignore[no-any-return]

    def sync_weights(self) -> None:
        """Send the learners' current weights to all runners."""
        self._run(self._async.sync_weights())

    # -- parts ----------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The run's frozen config, with its current modules."""
        return self._async.config

    @property
    def iteration(self) -> int:
        """Number of completed training iterations."""
        return self._async.iteration

    @property
    def training_iteration(self) -> int:
        """The same as `iteration`."""
        return self._async.iteration

    @property
    def metrics(self) -> Any:
        """The MetricsLogger whose values join each result."""
        return self._async.metrics

    @property
    def accounting(self) -> Accounting:
        """Every env step of the run: sampled = trained + dropped (by reason) + pending."""
        return self._async.accounting

    @property
    def callbacks(self) -> Any:
        """All callbacks of the config."""
        return self._async.callbacks

    @property
    def env_runner_group(self) -> EnvRunnerGroup:
        """The env runners that sample."""
        return EnvRunnerGroup.facing(self._async.env_runner_group, self._run)

    @property
    def eval_env_runner_group(self) -> EnvRunnerGroup | None:
        """The env runners that evaluate; None before the first round."""
        group = self._async.eval_env_runner_group
        return None if group is None else EnvRunnerGroup.facing(group, self._run)

    @property
    def learner_group(self) -> LearnerGroup:
        """The learners."""
        return LearnerGroup.facing(self._async.learner_group, self._run)

    @property
    def env_runner(self) -> Any:
        """The EnvRunner in this process; None if all runners are separate processes."""
        return self._async.env_runner

    @property
    def eval_env_runner(self) -> Any:
        """The evaluation EnvRunner in this process (see AsyncAlgorithm.eval_env_runner)."""
        return self._async.eval_env_runner

    @property
    def env_to_module_connector(self) -> Any:
        """The env-to-module pipeline of `env_runner`; if that is None, an equal one with the merged states."""
        return self._async.env_to_module_connector

    @property
    def module_to_env_connector(self) -> Any:
        """The module-to-env pipeline of `env_runner`; if that is None, an equal one with the merged states."""
        return self._async.module_to_env_connector

    def get_module(self, module_id: str = "default_policy") -> Any:
        """Return an RLModule in this process with the current weights.

        Raises:
            KeyError: No such module.
            ClosedError: The algorithm was stopped.
        """
        return self._run(self._async.get_module(module_id))

    # -- modules --------------------------------------------------------------------------------

    def add_module(self, module_id: str, module_spec: Any = None, **options: Any) -> MultiRLModuleSpec:
        """Add a module to a multi-agent run (see AsyncAlgorithm.add_module)."""
        return self._run(self._async.add_module(module_id, module_spec, **options))  # type: ignore[no-any-return]

    def remove_module(self, module_id: str, **options: Any) -> MultiRLModuleSpec:
        """Remove a module (see AsyncAlgorithm.remove_module)."""
        return self._run(self._async.remove_module(module_id, **options))  # type: ignore[no-any-return]

    # -- acting ---------------------------------------------------------------------------------

    def get_policy(self, *, module_id: str | None = None, agent_id: Any = None) -> Policy:
        """Return a Policy with the current weights and connectors (see AsyncAlgorithm.get_policy)."""
        return self._run(self._async.get_policy(module_id=module_id, agent_id=agent_id))  # type: ignore[no-any-return]

    def compute_action(self, observation: Any, **options: Any) -> Any:
        """Return the env action for an observation (see AsyncAlgorithm.compute_action)."""
        return self._run(self._async.compute_action(observation, **options))

    # -- checkpoints ----------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the state that a checkpoint contains, or some components (see AsyncAlgorithm.get_state)."""
        return self._run(self._async.get_state(components, not_components=not_components))  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, or parts of it (see AsyncAlgorithm.set_state)."""
        self._run(self._async.set_state(state))

    def save_to_path(self, path: str | Path | None = None) -> str:
        """Write a checkpoint atomically and return its absolute path (see AsyncAlgorithm.save_to_path)."""
        return self._run(self._async.save_to_path(path))  # type: ignore[no-any-return]

    def save(self, path: str | Path | None = None) -> str:
        """The same as `save_to_path`."""
        return self.save_to_path(path)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Restore a checkpoint, or one component of it (see AsyncAlgorithm.restore_from_path)."""
        self._run(self._async.restore_from_path(path, component))

    def restore(self, path: str | Path) -> None:
        """The same as `restore_from_path`."""
        self.restore_from_path(path)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, config: BaseConfig | None = None, trust_code: bool = False
    ) -> Self:
        """Return an algorithm that continues from a checkpoint.

        Args:
            path: The checkpoint's directory.
            config: Replaces the stored config; needed if that held functions or classes.
            trust_code: Whether to import functions and classes that the stored config names.

        Raises:
            CheckpointError: The checkpoint is incomplete, altered, of an unknown version, or was saved by a custom
                class that is neither this class nor that of the config.
            ConfigurationError: It is of another algorithm than this class.
        """
        state = read_algorithm(path)
        chosen = resume_config(path, state, config, trust_code=trust_code)
        algo_class = cls
        if cls is Algorithm:
            algo_class = chosen._algorithm_class()
            check_algorithm_class(path, algo_class)
        if algo_class.config_class is not None and not isinstance(chosen, algo_class.config_class):
            raise ConfigurationError(
                f"{path} was saved with a {type(chosen).__name__}; {algo_class.__name__} expects a "
                f"{algo_class.config_class.__name__}. Use Algorithm.from_checkpoint()."
            )
        algorithm = algo_class(chosen._for_build(None, True))
        try:
            algorithm.set_state(state)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    def keep_checkpoints(
        self, directory: str | Path, *, every_s: float | None = None, num: int | None = None
    ) -> None:
        """Make `train` write checkpoints automatically (see AsyncAlgorithm.keep_checkpoints)."""
        self._async.keep_checkpoints(directory, every_s=every_s, num=num)

    def save_checkpoint(self) -> Path:
        """Write a checkpoint to the directory of `keep_checkpoints` now (see AsyncAlgorithm.save_checkpoint)."""
        return self._run(self._async.save_checkpoint())  # type: ignore[no-any-return]

    @classmethod
    def resume(
        cls, directory: str | Path, *, config: BaseConfig | None = None, trust_code: bool = False
    ) -> Self:
        """Return an algorithm that continues the run in a directory and keeps its checkpoints there.

        It starts from the newest intact checkpoint in the directory; if there is none, it starts a new run.

        Example::

            algo = Algorithm.resume("runs/mine", config=config)  # the same line after every interruption

        Args:
            directory: The run directory; checkpoints are in ``checkpoints/`` below it.
            config: Config of a new run; also replaces the stored config.
            trust_code: Whether to import functions and classes that the stored config names.

        Raises:
            CheckpointError: There is no checkpoint, and `config` is None.
        """
        newest = latest_checkpoint(directory)
        if newest is not None:
            algorithm = cls.from_checkpoint(newest, config=config, trust_code=trust_code)
        elif config is None:
            raise CheckpointError(
                f"{directory} holds no intact checkpoint. Pass config=… to start a new run."
            )
        else:
            algorithm = (cls if cls is not Algorithm else config._algorithm_class())(config)
        algorithm.keep_checkpoints(Path(directory) / "checkpoints")
        return algorithm

    def cut_iteration_short(self) -> None:
        """End the current iteration after the current update. May be called by a signal handler."""
        self._async.cut_iteration_short()

    # -- lifecycle -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop every process of the run. Idempotent."""
        self._run(self._async.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.config.env!r}, iteration={self.iteration})"


class _WithSyncTrainingStep(AsyncAlgorithm):
    """An AsyncAlgorithm that calls the `training_step` of the user's synchronous algorithm."""

    async def training_step(self) -> Any:
        return await in_calling_thread(self._dispatch.algorithm.training_step)


def _check_is_config(algorithm: type[Algorithm], config: BaseConfig) -> None:
    """Check that the argument of an algorithm class is a config, not e.g. an env's name, a dict or a config class.

    Raises:
        TypeError: It is not a config; the text has the right call.
    """
    if isinstance(config, BaseConfig):
        return
    own = algorithm.config_class.__name__ if algorithm.config_class is not None else "AlgorithmConfig"
    text = f"{own}().environment({config!r})" if isinstance(config, str) else f"{own}().environment(…)"
    if isinstance(config, dict):
        text = f"{own}.from_dict({{…}})"
    raise TypeError(
        f"{algorithm.__name__}(config): expected a config such as {own}(), got {config!r}. Write {text}.build(), or "
        f"{algorithm.__name__}(config={text})."
    )
