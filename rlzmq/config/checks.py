"""Values derived from a config (batch sizes, modules, configs of modules and of evaluation), and its consistency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from rlzmq.config.model_config import DefaultModelConfig, model_config_to_dict
from rlzmq.config.values import ConfigValues
from rlzmq.core.addresses import check_bind_address, split_tcp
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.metrics import check_stats_cls_lookup
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import Schedule, UpdatePlan

__all__ = [
    "DerivedValues",
    "check",
]


_Config = TypeVar("_Config", bound=ConfigValues)

# Settings that a module cannot have for itself, since the modules' rows come from one draw, or one clock.
_OF_ALL_MODULES = (
    "minibatch_size",
    "n_step",
    "num_epochs",
    "replay_buffer_config",
    "shuffle_batch_per_epoch",
    "target_network_update_freq",
    "tau",
    "train_batch_size_per_learner",
    "training_intensity",
)

# Evaluation always uses the modules of the run: an evaluation config's values of these settings are ignored.
_MODULES = ("policies", "rl_module_spec", "model_config", "algorithm_config_overrides_per_module")


class DerivedValues(ConfigValues):
    """The settings and the values derived from them."""

    _model_defaults: ClassVar[dict[str, Any]] = {}  # the algorithm's default model settings
    _model_setting_names: ClassVar[
        tuple[str, ...]
    ] = ()  # settings of the algorithm that its modules also read

    @property
    def train_batch_size_per_learner(self) -> int:  # type: ignore[override]
        """Number of env steps per update and learner."""
        size = vars(self)["train_batch_size_per_learner"]
        return int(size) if size else int(self.train_batch_size) // max(self.num_learners, 1)

    @property
    def total_train_batch_size(self) -> int:
        """Number of env steps per update over all learners."""
        return int(self.train_batch_size_per_learner * max(self.num_learners, 1))

    @property
    def framework_str(self) -> str:
        """ "torch", the only choice."""
        return "torch"

    @property
    def is_online(self) -> bool:
        """Whether env runners sample the training data; otherwise it is read from files."""
        return self.update_plan().env_steps_per_rank > 0

    @property
    def is_offline(self) -> bool:
        """Whether the training data is read from files."""
        return not self.is_online

    @property
    def enable_rl_module_and_learner(self) -> bool:
        """Whether RLlib's new API stack is used: always."""
        return True

    enable_env_runner_and_connector_v2 = enable_rl_module_and_learner

    @property
    def is_multi_agent(self) -> bool:
        """Whether there are modules besides "default_policy". Learner-only modules do not count."""
        ids = self.module_ids
        if self.policies is None and self.policy_mapping_fn is None and "default_policy" in ids:
            specs = getattr(self.rl_module_spec, "rl_module_specs", None) or {}
            ids = [
                module_id for module_id in ids if module_id not in specs or not specs[module_id].learner_only
            ]
        return len(ids) > 1 or "default_policy" not in ids

    @property
    def module_ids(self) -> list[str]:
        """The ids of all modules, in the order given (a set is sorted)."""
        policies = self.policies
        if policies is None:
            spec = self.rl_module_spec
            specs = getattr(spec, "rl_module_specs", None)
            return list(specs) if isinstance(specs, dict) and specs else ["default_policy"]
        ordered = sorted(policies) if isinstance(policies, set | frozenset) else policies
        return [str(module_id) for module_id in ordered]

    def get_rollout_fragment_length(self, worker_index: int = 0) -> int:
        """Return the number of vector steps in a full lease of one runner.

        Args:
            worker_index: 1-based index of the runner (0: the local one). With "auto", the first runners take the
                remainder of an uneven division.
        """
        if self.rollout_fragment_length != "auto":
            return int(self.rollout_fragment_length)
        runners = max(self.num_env_runners, 1)
        per_runner, remainder = divmod(self.total_train_batch_size, self.num_envs_per_env_runner * runners)
        extra = remainder / self.num_envs_per_env_runner
        return int(per_runner) + (1 if max(worker_index, 1) - 1 < extra else 0)

    def update_plan(self) -> UpdatePlan:
        """Return the plan of each update's training data. Algorithms override this if their plan differs."""
        staleness = self.staleness
        return UpdatePlan(
            env_steps_per_rank=self.train_batch_size_per_learner,
            num_ranks=max(self.num_learners, 1),
            fragment_length=self.get_rollout_fragment_length(),
            staleness=staleness,
            max_policy_lag=staleness if self.max_policy_lag is None else self.max_policy_lag,
            open_updates=staleness + 1,
        )

    def should_update(self, module_id: str, batch: object = None) -> bool:
        """Return whether the module is one of `policies_to_train`. If that is a function, call it with `batch`."""
        trained = self.policies_to_train
        if trained is None:
            return True
        return bool(trained(module_id, batch)) if callable(trained) else module_id in trained

    # -- modules and learners -------------------------------------------------------------------

    def get_default_rl_module_spec(self) -> Any:
        """Return the algorithm's default RLModuleSpec (without spaces)."""
        raise NotImplementedError

    @property
    def rl_module_spec(self) -> Any:
        """The spec that was set, or else the algorithm's default."""
        given = vars(self)["rl_module_spec"]
        return self.get_default_rl_module_spec() if given is None else given

    @rl_module_spec.setter
    def rl_module_spec(self, value: object) -> None:
        """For type checkers only: `__setattr__` handles assignments."""

    @property
    def model_config(self) -> dict[str, Any]:
        """The model settings: the algorithm's defaults, overridden by the user's."""
        of_settings = {name: vars(self)[name] for name in self._model_setting_names}
        given = vars(self)["model_config"]
        plain = given.to_dict() if isinstance(given, DefaultModelConfig) else model_config_to_dict(given)
        return {**self._model_defaults, **of_settings, **plain}

    def get_default_learner_class(self) -> Any:
        """Return the algorithm's Learner class."""
        raise NotImplementedError

    @property
    def learner_class(self) -> Any:
        """The Learner class that was set, or else the algorithm's default."""
        return vars(self)["learner_class"] or self.get_default_learner_class()

    # -- configs made of this one ---------------------------------------------------------------

    @classmethod
    def overrides(cls, **kwargs: object) -> dict[str, Any]:
        """Return a checked dict of overrides, for evaluation_config and per-module overrides.

        Raises:
            KeyError: A name is not a setting of this class.
        """
        config = cls()
        for name in kwargs:
            if name not in vars(config):
                raise KeyError(f"{cls.__name__} has no setting {name!r}.{did_you_mean(name, vars(config))}")
        return kwargs

    def get_config_for_module(self, module_id: str) -> Self:
        """Return this config with the module's overrides applied (itself if there are none)."""
        spec = self.policies.get(module_id) if isinstance(self.policies, Mapping) else None
        of_spec: Mapping[str, Any] = getattr(spec, "config", {})  # of RLlib's PolicySpec
        overrides = {**of_spec, **(self.algorithm_config_overrides_per_module.get(module_id) or {})}
        if not overrides:
            return self
        cached = self._of_modules
        if module_id not in cached or not self._frozen:
            new = self.copy(copy_frozen=False)
            vars(new)["algorithm_config_overrides_per_module"] = {}
            where = f"algorithm_config_overrides_per_module[{module_id!r}]"
            new = _with(new, overrides, where)
            for name in _OF_ALL_MODULES:
                if new.get(name) != self.get(name):
                    raise ConfigurationError(
                        f"config.{where}: {name}={new.get(name)!r} has no effect, since all modules have the same, "
                        f"{self.get(name)!r}. Leave it out here."
                    )
            cached[module_id] = new
        return cached[module_id]

    def get_evaluation_config_object(self) -> Self:
        """Return the config of the evaluation runners.

        If `evaluation_config` is a config, this is a copy of it. Otherwise it is a copy of this config, updated with
        the settings in `evaluation_config`. In both cases the number of runners is `evaluation_num_env_runners`, and
        the modules are those of this config.

        Raises:
            ConfigurationError: `evaluation_config` is neither a dict nor a config, or a setting in it is unknown or
                wrong.
        """
        given = self.evaluation_config
        if isinstance(given, ConfigValues):
            new: Any = given.copy(copy_frozen=False)
            vars(new).update({name: vars(self)[name] for name in _MODULES})
            for name in ("policy_mapping_fn", "seed"):
                if vars(new)[name] is None:
                    vars(new)[name] = vars(self)[name]
        else:
            new = self.copy(copy_frozen=False)
            vars(new).update(evaluation_config=None, rollout_fragment_length="auto")
            new = _with(new, given or {}, "evaluation_config")
        vars(new).update(
            num_env_runners=self.evaluation_num_env_runners, evaluation_config=None, in_evaluation=True
        )
        return new  # type: ignore[no-any-return]


def _with(config: _Config, overrides: object, where: str) -> _Config:
    """Return `config` with the overrides set; errors name their place, `where`."""
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(
            f"config.{where}: expected a dict of settings, got {overrides!r} ({type(overrides).__name__})."
        )
    try:
        return config.update_from_dict(overrides)
    except ConfigurationError as error:
        raise ConfigurationError(f"config.{where}: {error}") from None


def check(config: DerivedValues) -> None:
    """Check that the settings are consistent with each other.

    Raises:
        ConfigurationError: They are not; the text names the settings, the expected and the actual values.
    """
    if config.env is None and config.observation_space is None:
        raise ConfigurationError(
            "config.env is None: set the environment, e.g. .environment('CartPole-v1'), or both "
            "observation_space and action_space."
        )
    learners = max(config.num_learners, 1)
    if not vars(config)["train_batch_size_per_learner"] and config.train_batch_size % learners:
        near = max(config.train_batch_size // learners, 1) * learners
        raise ConfigurationError(
            f"config.train_batch_size={config.train_batch_size} cannot be divided equally among "
            f"num_learners={config.num_learners}. Nearest valid: {near} or {near + learners}; or set "
            "train_batch_size_per_learner."
        )
    per_learner, minibatch = config.train_batch_size_per_learner, config.minibatch_size
    if minibatch is not None and minibatch > per_learner:
        raise ConfigurationError(
            f"config.minibatch_size={minibatch} is more than train_batch_size_per_learner={per_learner}. "
            f"Largest valid: {per_learner}."
        )
    fragment = config.rollout_fragment_length
    if fragment != "auto" and not config.staleness:
        batch = config.update_plan().num_env_steps
        whole = fragment * config.num_envs_per_env_runner * max(config.num_env_runners, 1)
        if whole > batch * 1.1:
            fitting = batch // (config.num_envs_per_env_runner * max(config.num_env_runners, 1))
            raise ConfigurationError(
                f"config.rollout_fragment_length={fragment} × {config.num_envs_per_env_runner} envs × "
                f"{max(config.num_env_runners, 1)} runners = {whole} env steps, more than the batch of "
                f"{batch}. Largest that fits: {max(fitting, 1)}, or 'auto'."
            )
    _check_networking(config)
    _check_record(config)
    if config.trace == "auto":
        raise ConfigurationError(
            'config.trace="auto" is for `rlzmq train`, which has a run directory: set a path.'
        )
    _check_offline_data(config)
    _check_overrides(config)
    if callable(config.policies_to_train) or config.policies_to_train is None:
        unknown: list[str] = []
    else:
        unknown = [mid for mid in config.policies_to_train if mid not in config.module_ids]
    if unknown:
        raise ConfigurationError(
            f"config.policies_to_train names {unknown[0]!r}, which is no module id."
            + did_you_mean(unknown[0], config.module_ids)
        )
    _check_functions(config)
    if config.is_multi_agent and config.policy_mapping_fn is None:
        raise ConfigurationError(
            f"config.policies has the module ids {config.module_ids}, but config.policy_mapping_fn is None: "
            "give .multi_agent(policy_mapping_fn=lambda agent_id, episode: …)."
        )
    try:
        check_stats_cls_lookup(config.custom_stats_cls_lookup)
    except TypeError as error:
        raise ConfigurationError(f"config.{error}") from None
    for name in ("lr", "entropy_coeff", "epsilon", "actor_lr", "critic_lr", "alpha_lr"):
        if isinstance(points := config.get(name), list):
            Schedule(points, f"config.{name}")  # raises an error about points that are none
    _check_evaluation(config)
    if config.torch_compile_learner_what_to_compile == "complete_update" and config.num_learners > 1:
        raise ConfigurationError(
            f"config.torch_compile_learner_what_to_compile='complete_update' with num_learners="
            f"{config.num_learners}: the ranks agree on each step outside of torch. Use 'forward_train'."
        )


def _check_functions(config: DerivedValues) -> None:
    """Check that the user's functions take the arguments that they will get."""
    for name, arguments in (
        ("policy_mapping_fn", ("agent_id", "episode")),
        ("policies_to_train", ("module_id", "batch")),
        ("custom_evaluation_function", ("algorithm", "eval_env_runner_group")),
    ):
        function = config.get(name)
        if callable(function):
            check_takes(function, f"config.{name}", *arguments)


def _check_evaluation(config: DerivedValues) -> None:
    if config.evaluation_parallel_to_training and not config.evaluation_num_env_runners:
        raise ConfigurationError(
            "config.evaluation_parallel_to_training=True needs runners that evaluate while others train, but "
            "config.evaluation_num_env_runners=0. Set evaluation(evaluation_num_env_runners=1) or more."
        )
    if config.evaluation_duration == "auto" and not config.evaluation_parallel_to_training:
        raise ConfigurationError(
            "config.evaluation_duration='auto' means as long as the training steps beside it take: set "
            "evaluation(evaluation_parallel_to_training=True, evaluation_num_env_runners=1), or give a number."
        )
    least = config.evaluation_auto_duration_min_env_steps_per_sample
    most = config.evaluation_auto_duration_max_env_steps_per_sample
    if least > most:
        raise ConfigurationError(
            f"config.evaluation_auto_duration_min_env_steps_per_sample={least} is more than "
            f"evaluation_auto_duration_max_env_steps_per_sample={most}."
        )


def _check_record(config: DerivedValues) -> None:
    if config.record_dir is None:
        return
    if config.num_learners > 1 or config.num_remote_learners:
        raise ConfigurationError(
            f"config.record_dir={config.record_dir!r} with num_learners={config.num_learners} and num_remote_learners="
            f"{config.num_remote_learners}: only a single learner on this machine can be recorded; set num_learners "
            "to 0 or 1 and num_remote_learners to 0."
        )
    if not (config.num_env_runners or config.num_learners or config.listen):
        raise ConfigurationError(
            f"config.record_dir={config.record_dir!r}: a run in one process is reproducible from its seed and is not "
            "recorded. Set num_env_runners or num_learners, or leave record_dir at None."
        )


def _check_offline_data(config: DerivedValues) -> None:
    if config.output is not None and config.is_multi_agent:
        raise ConfigurationError(
            f"config.output={config.output!r} with several modules or agents: only episodes of single-agent "
            "environments are recorded. Leave offline_data(output=…) out."
        )
    if config.is_offline and config.is_multi_agent:
        raise ConfigurationError(
            f"config.policies={config.module_ids}: {type(config).__name__} trains on recorded data, which is of "
            "single-agent environments only."
        )
    if config.input_ is not None and config.is_online:
        raise ConfigurationError(
            f"config.input_={config.input_!r}: {type(config).__name__} trains on what env runners sample. Leave "
            "offline_data(input_=…) out, or use an offline algorithm, e.g. BCConfig or MARWILConfig."
        )
    if config.offline_evaluation_interval is not None and config.is_online:
        raise ConfigurationError(
            f"config.offline_evaluation_interval={config.offline_evaluation_interval}: {type(config).__name__} has no "
            "recorded data to evaluate on, which offline algorithms have (e.g. BCConfig). Set evaluation_interval."
        )


def _check_networking(config: DerivedValues) -> None:
    if config.listen is not None:
        check_bind_address(config.listen, has_keys=True)
        split_tcp(config.listen)  # only TCP
    for name in ("advertise", "join_file"):
        if config.get(name) is not None and config.listen is None:
            raise ConfigurationError(f"config.{name} needs config.listen, e.g. 'tcp://10.0.0.5:5555'.")
    remote, total = config.num_remote_learners, config.num_learners
    if remote and (remote != total or config.listen is None):
        raise ConfigurationError(
            f"config.num_remote_learners={remote} with num_learners={total} and listen={config.listen!r}: "
            "learners are all remote (equal numbers, and listen set), or all local (0)."
        )


def _check_overrides(config: DerivedValues) -> None:
    config.get_evaluation_config_object()
    valid = {*config.module_ids, *(getattr(config.rl_module_spec, "rl_module_specs", None) or {})}
    for module_id in config.algorithm_config_overrides_per_module:
        if module_id not in valid:
            raise ConfigurationError(
                f"config.algorithm_config_overrides_per_module names {module_id!r}, which is no module id."
                f"{did_you_mean(module_id, valid)} (For a module that is added later, pass the overrides to "
                "add_module(config_overrides=…).)"
            )
        config.get_config_for_module(module_id)
