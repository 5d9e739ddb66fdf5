"""Algorithm: the synchronous interface of a run.

train ─► AsyncAlgorithm.train ─► training_step: sample, update, publish
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.algorithms.async_algorithm import AsyncAlgorithm
from rlzmq.algorithms.checkpoints import check_algorithm_class, read_algorithm, run_to_resume
from rlzmq.algorithms.registry import config_class_named
from rlzmq.algorithms.stored_config import Given
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import TellsUncalled
from rlzmq.core.synonyms import AnswersSynonyms, SynonymsOfClass
from rlzmq.core.tracebacks import short_traceback
from rlzmq.driver.sync_groups import EnvRunnerGroup, LearnerGroup
from rlzmq.driver.synchronous import Forwarded, Synchronous, blocking, coroutine_runner
from rlzmq.driver.updates import Accounting

__all__ = ["Algorithm"]

ConfigClass = type[BaseConfig] | str


class SavedPath(str):
    """The path of a checkpoint, with RLlib's attributes of what `save` returns there."""

    __slots__ = ()

    @property
    def checkpoint(self) -> SavedPath:
        """The path itself."""
        return self

    @property
    def path(self) -> str:
        """The path as text."""
        return str(self)


class _AlgorithmClass(SynonymsOfClass):
    """Metaclass that answers calls which other libraries' algorithms take: ``PPO("MlpPolicy", env)``."""

    if not TYPE_CHECKING:  # to a type checker, calling a class gives an instance of that class

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                cls.__signature__.bind(*args, **kwargs)
            except TypeError as error:
                own = cls._config_class().__name__
                raise TypeError(
                    f"{cls.__name__}(config): {error}. Instead: {own}().environment(env).training(lr=…).build()."
                ) from None
            return super().__call__(*args, **kwargs)


class Algorithm(TellsUncalled, Synchronous[AsyncAlgorithm], AnswersSynonyms, metaclass=_AlgorithmClass):
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
        config: The config, or a dict of settings. One that is not frozen is copied, validated and frozen first.
    """

    config_class: ClassVar[ConfigClass] = "AlgorithmConfig"
    """This algorithm's config class, or the name of a built-in one, which is then imported on request."""

    _not_called: ClassVar[Mapping[str, str]] = {
        "cleanup": "override stop(), or use the callback on_algorithm_end",
        "evaluate": "evaluation(custom_evaluation_function=…); your own code may call an override",
        "evaluate_offline": "use the callback on_evaluate_offline_end",
        "get_default_policy_class": "config.rl_module(rl_module_spec=…)",
        "get_state": "store what is yours beside the checkpoint, after save_to_path()",
        "load_checkpoint": "use the callback on_checkpoint_loaded",
        "reset_config": "each trial of a search builds its algorithm",
        "restore_env_runners": "use the callback on_env_runners_recreated",
        "save_checkpoint": "store what is yours beside the checkpoint, after save_to_path()",
        "set_state": "use the callback on_checkpoint_loaded",
        "step": "override training_step()",
        "validate_env": "use the callback on_environment_created",
    }

    @classmethod
    def get_default_config(cls) -> Any:
        """Return this algorithm's config with its defaults; custom algorithms override it or set `config_class`."""
        return cls._config_class()(algo_class=cls)

    @classmethod
    def default_resource_request(cls, config: BaseConfig) -> dict[str, float]:
        """Return the number of processes of a run, for `tune.with_resources`."""
        return {"cpu": 1.0 + config.num_env_runners + config.num_learners + config.evaluation_num_env_runners}

    @classmethod
    def _config_class(cls) -> Any:
        own = cls.config_class
        return config_class_named(own) if isinstance(own, str) else own

    def __init__(self, config: BaseConfig | dict[str, Any]) -> None:
        given: Any = self._config_class().from_dict(config) if isinstance(config, dict) else config
        _check_is_config(type(self), given)
        self.setup(given if given.is_frozen else given._for_build(None, True))

    def setup(self, config: BaseConfig) -> None:
        """Start the run. The constructor calls this; overrides call it first, with the frozen config.

        Whatever an override needs of the run's processes is there afterwards (`env_runner_group`, `learner_group`).
        """
        overrides_step = type(self).training_step is not Algorithm.training_step
        self._run = coroutine_runner(config)
        self._async = _WithSyncTrainingStep(config) if overrides_step else AsyncAlgorithm(config)
        self._async._dispatch.algorithm = self
        self._run(self._async.start())

    # -- training and evaluation ----------------------------------------------------------------

    train: Final = blocking(AsyncAlgorithm.train)
    evaluate: Final = blocking(AsyncAlgorithm.evaluate)
    evaluate_offline: Final = blocking(AsyncAlgorithm.evaluate_offline)
    sync_weights: Final = blocking(AsyncAlgorithm.sync_weights)
    cut_iteration_short: Final = blocking(AsyncAlgorithm.cut_iteration_short)

    def training_step(self) -> Any:
        """Run one update. Custom algorithms override this, return None, and report through `self.metrics`."""
        self._run(AsyncAlgorithm.training_step(self._async))

    log_result: Final = AsyncAlgorithm.log_result
    __reduce__: Final = AsyncAlgorithm.__reduce__

    # -- parts ----------------------------------------------------------------------------------

    config: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "config")
    iteration: Forwarded[int] = Forwarded[int](AsyncAlgorithm, "iteration")
    training_iteration = iteration
    metrics: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "metrics")
    _counters: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "_counters")  # RLlib's callbacks count in it
    accounting: Forwarded[Accounting] = Forwarded[Accounting](AsyncAlgorithm, "accounting")
    callbacks: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "callbacks")
    env_runner: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "env_runner")
    eval_env_runner: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "eval_env_runner")
    env_to_module_connector: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "env_to_module_connector")
    module_to_env_connector: Forwarded[Any] = Forwarded[Any](AsyncAlgorithm, "module_to_env_connector")

    @property
    def env_runner_group(self) -> EnvRunnerGroup:
        """The env runners that sample."""
        return EnvRunnerGroup.of(self._async.env_runner_group, self._run)

    @property
    def eval_env_runner_group(self) -> EnvRunnerGroup | None:
        """The env runners that evaluate; None before the first round."""
        group = self._async.eval_env_runner_group
        return None if group is None else EnvRunnerGroup.of(group, self._run)

    @property
    def learner_group(self) -> LearnerGroup:
        """The learners."""
        return LearnerGroup.of(self._async.learner_group, self._run)

    # -- modules and acting ---------------------------------------------------------------------

    get_module: Final = blocking(AsyncAlgorithm.get_module)
    add_module: Final = blocking(AsyncAlgorithm.add_module)
    remove_module: Final = blocking(AsyncAlgorithm.remove_module)
    get_policy: Final = blocking(AsyncAlgorithm.get_policy)
    compute_action: Final = blocking(AsyncAlgorithm.compute_action)

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Return the modules' weights by module id.

        Args:
            policies: Ids of the modules; None: all.
        """
        weights = self.learner_group.get_weights()
        return {mid: of for mid, of in weights.items() if policies is None or mid in policies}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Give modules the weights of `get_weights`, and send them to all env runners."""
        self.learner_group.set_weights({**self.learner_group.get_weights(), **weights})
        self.sync_weights()

    # -- checkpoints ----------------------------------------------------------------------------

    get_state: Final = blocking(AsyncAlgorithm.get_state)
    set_state: Final = blocking(AsyncAlgorithm.set_state)
    save_to_path: Final = blocking(AsyncAlgorithm.save_to_path)
    restore_from_path: Final = blocking(AsyncAlgorithm.restore_from_path)
    _restore: Final = blocking(AsyncAlgorithm._restore)
    keep_checkpoints: Final = blocking(AsyncAlgorithm.keep_checkpoints)
    save_checkpoint: Final = blocking(AsyncAlgorithm.save_checkpoint)
    save_interrupted: Final = blocking(AsyncAlgorithm.save_interrupted)

    def save(self, path: str | Path | None = None) -> SavedPath:
        """Call `save_to_path`, and return the checkpoint's path (also as ``.checkpoint.path``, as in RLlib).

        Args:
            path: The checkpoint's directory. None: a new one in the temporary directory for each call
                (``rlzmq-checkpoint-…``), which no run removes; its path is also logged.
        """
        return SavedPath(self.save_to_path(path))

    def restore(self, path: str | Path) -> None:
        """Call `restore_from_path`."""
        self.restore_from_path(path)

    @classmethod
    @short_traceback
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> Self:
        """Return an algorithm that continues from a checkpoint.

        A checkpoint carries no code. What you saved on this machine finds its code by itself if that can be imported.

        Example::

            Algorithm.from_checkpoint(path, env=MyEnv)  # its class was defined in the training script

        Args:
            path: The checkpoint's directory.
            config: Replaces the stored config.
            trust: Packages whose code somebody else's checkpoint may name, e.g. ``["my_package"]``.
            module_class: The class of modules that the checkpoint does not find; or classes by module id.
            settings: Settings that replace the stored ones, e.g. code that the checkpoint does not find.

        Raises:
            CheckpointError: The checkpoint is incomplete, altered or of an unknown version, needs code that it does not
                carry (the text names it), or was saved by a custom class that is neither this class nor the config's.
            ConfigurationError: The checkpoint is of another algorithm than this class.
        """
        stored = read_algorithm(path)
        chosen = stored.config_to("resume", Given(config, trust, module_class, settings))
        algo_class = cls
        if cls is Algorithm:
            algo_class = chosen._algorithm_class()
            check_algorithm_class(path, algo_class)
        expected = algo_class._config_class()
        if not isinstance(chosen, expected):
            raise ConfigurationError(
                f"{path} was saved with a {type(chosen).__name__}; {algo_class.__name__} expects a "
                f"{expected.__name__}. Use Algorithm.from_checkpoint()."
            )
        algorithm = algo_class(chosen._for_build(None, True))
        try:
            algorithm._restore(path, stored.state)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        *,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> Self:
        """Return an algorithm that continues the run in a directory and keeps its checkpoints there.

        It starts from the newest intact checkpoint in the directory; if there is none, it starts a new run.

        Example::

            algo = Algorithm.resume("runs/mine", config=config)  # the same line after every interruption

        Args:
            directory: The run directory; checkpoints are in ``checkpoints/`` below it.
            config: Config of a new run; also replaces the stored config.
            trust, module_class, settings: See `from_checkpoint`.

        Raises:
            CheckpointError: There is no checkpoint, and `config` is None.
            ConfigurationError: Another process drives the run in the directory.
        """
        with run_to_resume(directory, config) as (newest, run_dir):
            if newest is not None:
                algorithm = cls.from_checkpoint(
                    newest, config=config, trust=trust, module_class=module_class, **settings
                )
            else:
                assert config is not None
                algorithm = (cls if cls is not Algorithm else config._algorithm_class())(config)
            try:
                algorithm.keep_checkpoints(run_dir)
            except BaseException:
                algorithm.stop()
                raise
        return algorithm

    # -- lifecycle -----------------------------------------------------------------------------------

    stop: Final = blocking(AsyncAlgorithm.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.config.env!r}, iteration={self.iteration})"


class _WithSyncTrainingStep(AsyncAlgorithm):
    """An AsyncAlgorithm that calls the `training_step` of the user's synchronous algorithm."""

    async def training_step(self) -> Any:
        return await in_calling_thread(self._dispatch.algorithm.training_step)


def _check_is_config(algorithm: type[Algorithm], config: BaseConfig) -> None:
    """Check that the argument of an algorithm class is a config, not e.g. an env's name or a config class."""
    if isinstance(config, BaseConfig):
        return
    own = algorithm._config_class().__name__
    text = f"{own}().environment({config!r})" if isinstance(config, str) else f"{own}().environment(…)"
    raise TypeError(
        f"{algorithm.__name__}(config): expected a config such as {own}(), got {config!r}. Write {text}.build(), or "
        f"{algorithm.__name__}(config={text})."
    )


# The training step of each algorithm is that of the base class: one update according to `config.update_plan()`.


class PPO(Algorithm):
    """PPO (arXiv:1707.06347). An update is of at least `total_train_batch_size` env steps under the newest weights."""

    config_class: ClassVar[ConfigClass] = "PPOConfig"


class IMPALA(Algorithm):
    """IMPALA (arXiv:1802.01561). Runners sample ahead of the learner."""

    config_class: ClassVar[ConfigClass] = "IMPALAConfig"


class APPO(IMPALA):
    """APPO (arXiv:1912.00167, arXiv:1707.06347). Runners sample ahead of the learner, which clips its objective."""

    config_class: ClassVar[ConfigClass] = "APPOConfig"


class DQN(Algorithm):
    """DQN (arXiv:1312.5602), with a replay buffer."""

    config_class: ClassVar[ConfigClass] = "DQNConfig"


class SAC(Algorithm):
    """SAC (arXiv:1812.05905), with a replay buffer."""

    config_class: ClassVar[ConfigClass] = "SACConfig"


class TD3(Algorithm):
    """TD3 (arXiv:1802.09477), with a replay buffer."""

    config_class: ClassVar[ConfigClass] = "TD3Config"


class TQC(SAC):
    """TQC (arXiv:2005.04269), with a replay buffer."""

    config_class: ClassVar[ConfigClass] = "TQCConfig"


class BC(Algorithm):
    """Behavior cloning of recorded steps."""

    config_class: ClassVar[ConfigClass] = "BCConfig"


class MARWIL(Algorithm):
    """MARWIL (Wang et al., NeurIPS 2018), on whole recorded episodes."""

    config_class: ClassVar[ConfigClass] = "MARWILConfig"


class CQL(Algorithm):
    """CQL (arXiv:2006.04779), on recorded steps."""

    config_class: ClassVar[ConfigClass] = "CQLConfig"


class IQL(Algorithm):
    """IQL (arXiv:2110.06169), on recorded steps."""

    config_class: ClassVar[ConfigClass] = "IQLConfig"
