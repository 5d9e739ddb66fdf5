"""Checks that the settings of a config are consistent with each other."""

from __future__ import annotations

import itertools
from typing import Any

from rlzmq.config.derived import DerivedValues
from rlzmq.core.addresses import check_bind_address, split_tcp
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.metrics import check_stats_cls_lookup
from rlzmq.core.signatures import check_takes
from rlzmq.core.suggest import did_you_mean

__all__ = ["check"]


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
    if not config._values["train_batch_size_per_learner"] and config.train_batch_size % learners:
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
        _check_schedule(name, config.get(name))
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


def _check_schedule(name: str, value: Any) -> None:
    if not isinstance(value, list):
        return
    times = [point[0] for point in value]
    if len(value) < 2 or times[0] != 0 or any(b <= a for a, b in itertools.pairwise(times)):
        raise ConfigurationError(
            f"config.{name}={value!r}: a schedule is a list of at least two (env steps, value) points that "
            "begins at 0 and rises, e.g. [(0, 0.001), (100000, 0.0001)]."
        )
