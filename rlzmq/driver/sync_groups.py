"""EnvRunnerGroup and LearnerGroup: the env runners and the learners for callers without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import Checkpointable
from rlzmq.core.names import LEARNER_PATH
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.driver.async_learner_group import AsyncLearnerGroup
from rlzmq.driver.synchronous import Forwarded, Synchronous, blocking, coroutine_runner

__all__ = ["EnvRunnerGroup", "LearnerGroup", "synchronous_parallel_sample"]


class _OwnProcesses:
    """The processes of a group that belongs to no run."""

    _system: ActorSystem | None = None

    def _begin(self: Any, config: BaseConfig, num_processes: int, make: Callable[..., Any]) -> None:
        self._run = coroutine_runner(config)
        if num_processes:
            self._system = ActorSystem()
            self._run(self._system.start())
        self._async = make(system=self._system)
        self._run(self._async.start())

    def _end(self: Any) -> None:
        if self._system is not None:
            self._run(self._system.stop())


class LearnerGroup(_OwnProcesses, Synchronous[AsyncLearnerGroup], Checkpointable):
    """Synchronous interface to AsyncLearnerGroup.

    Args:
        config: The config. With ``num_learners=0`` the group is one local learner.
        module_spec: The MultiRLModuleSpec with its spaces.
    """

    checkpoint_name: ClassVar[str] = LEARNER_PATH

    def __init__(self, *, config: BaseConfig, module_spec: object) -> None:
        self._begin(
            config, config.num_learners, lambda system: AsyncLearnerGroup(config, module_spec, system=system)
        )

    local_learner: Forwarded[Any] = Forwarded[Any](AsyncLearnerGroup, "local_learner")
    _learner = local_learner  # as RLlib's scripts read it
    num_learners: Forwarded[int] = Forwarded[int](AsyncLearnerGroup, "num_learners")
    update: Final = blocking(AsyncLearnerGroup.update)
    get_state: Final = blocking(AsyncLearnerGroup.get_state)
    set_state: Final = blocking(AsyncLearnerGroup.set_state)
    get_sources: Final = blocking(AsyncLearnerGroup.get_sources)
    set_sources: Final = blocking(AsyncLearnerGroup.set_sources)
    restore_from_path: Final = blocking(AsyncLearnerGroup.restore_from_path)
    get_weights: Final = blocking(AsyncLearnerGroup.get_weights)
    set_weights: Final = blocking(AsyncLearnerGroup.set_weights)
    load_module_state: Final = blocking(AsyncLearnerGroup.load_module_state)
    add_module: Final = blocking(AsyncLearnerGroup.add_module)
    remove_module: Final = blocking(AsyncLearnerGroup.remove_module)
    foreach_learner: Final = blocking(AsyncLearnerGroup.foreach_learner)
    evaluate_offline: Final = blocking(AsyncLearnerGroup.evaluate_offline)

    def shutdown(self) -> None:
        """Stop the learners."""
        self._run(self._async.shutdown())
        self._end()


class EnvRunnerGroup(_OwnProcesses, Synchronous[AsyncEnvRunnerGroup]):
    """Synchronous interface to AsyncEnvRunnerGroup.

    Args:
        config: The config. With ``num_env_runners=0`` the group is one local runner.
        is_evaluation: Whether its environments and random numbers are those of evaluation.

    Example::

        group = EnvRunnerGroup(config=config)
        episodes = group.sample(num_episodes=4)
        group.stop()
    """

    def __init__(self, *, config: BaseConfig, is_evaluation: bool = False) -> None:
        def make(system: object) -> AsyncEnvRunnerGroup:
            group = AsyncEnvRunnerGroup(config, system=system, is_evaluation=is_evaluation)
            group.reports_samples = False  # there are no results to add them to
            return group

        self._begin(config, config.num_env_runners, make)

    local_env_runner: Forwarded[Any] = Forwarded[Any](AsyncEnvRunnerGroup, "local_env_runner")
    num_env_runners: Forwarded[int] = Forwarded[int](AsyncEnvRunnerGroup, "num_env_runners")
    num_remote_env_runners: Final = blocking(AsyncEnvRunnerGroup.num_remote_env_runners)
    num_healthy_remote_env_runners: Final = blocking(AsyncEnvRunnerGroup.num_healthy_remote_env_runners)
    num_remote_workers = num_remote_env_runners
    num_healthy_remote_workers = num_healthy_remote_env_runners
    sample: Final = blocking(AsyncEnvRunnerGroup.sample)
    sample_batches: Final = blocking(AsyncEnvRunnerGroup.sample_batches)
    foreach_env_runner: Final = blocking(AsyncEnvRunnerGroup.foreach_env_runner)
    foreach_env_runner_async: Final = blocking(AsyncEnvRunnerGroup.foreach_env_runner_async)
    fetch_ready_async_reqs: Final = blocking(AsyncEnvRunnerGroup.fetch_ready_async_reqs)
    foreach_env: Final = blocking(AsyncEnvRunnerGroup.foreach_env)
    get_metrics: Final = blocking(AsyncEnvRunnerGroup.get_metrics)
    sync_env_runner_states: Final = blocking(AsyncEnvRunnerGroup.sync_env_runner_states)

    def sync_weights(
        self,
        policies: Collection[str] | None = None,
        from_worker_or_learner_group: object = None,
        **options: object,
    ) -> None:
        """Send weights to all runners (see AsyncEnvRunnerGroup.sync_weights)."""
        source = from_worker_or_learner_group
        if isinstance(source, LearnerGroup):
            if source._async is self._async.learner_group:
                source = source._async
            else:  # its state, fetched here
                source = SimpleNamespace(get_state=partial(dict, source.get_state()))
        self._run(self._async.sync_weights(policies, source, **options))

    def stop(self) -> None:
        """Stop the runners."""
        self._run(self._async.stop())
        self._end()


def synchronous_parallel_sample(
    *,
    worker_set: Any,
    max_agent_steps: int | None = None,
    max_env_steps: int | None = None,
    concat: bool = True,
    sample_timeout_s: float | None = None,
    random_actions: bool = False,
    _uses_new_env_runners: bool = True,
    _return_metrics: bool = False,
) -> Any:
    """Make every runner sample fragments, in rounds, until there are enough steps (RLlib's function).

    A round waits for its slowest runner. ``env_runner_group.sample(num_timesteps=…)`` divides the steps instead.

    Args:
        worker_set: An EnvRunnerGroup.
        max_agent_steps: Stop at this number of agent steps.
        max_env_steps: Stop at this number of env steps. Without both limits, make one round.
        concat: Whether to return one flat list of episodes instead of a list per sample.
        sample_timeout_s: Runners whose samples take longer are left out of a round; None: no limit.
        random_actions: Whether to sample without the module.
        _uses_new_env_runners: Must be True.
        _return_metrics: Whether to also return the results of the runners' `get_metrics`, for ``metrics.aggregate(…,
            key="env_runners")``.

    Returns:
        The episodes, or (episodes, metrics).

    Raises:
        ValueError: Both limits are given.
    """
    if max_agent_steps is not None and max_env_steps is not None:
        raise ValueError("synchronous_parallel_sample: set max_agent_steps or max_env_steps, not both.")
    options = {"random_actions": True} if random_actions else {}

    def sample(env_runner: Any) -> Any:
        episodes = env_runner.sample(**options)
        return episodes, env_runner.get_metrics() if _return_metrics else None

    samples: list[Any] = []
    metrics: list[Any] = []
    num_steps = 0
    while True:
        answers = worker_set.foreach_env_runner(sample, timeout_seconds=sample_timeout_s)
        for episodes, of_runner in answers:
            samples.append(episodes)
            metrics.append(of_runner)
            num_steps += sum(
                episode.env_steps() if max_agent_steps is None else episode.agent_steps()
                for episode in episodes
            )
        if not answers or num_steps >= (max_env_steps or max_agent_steps or 0):
            break
    result: list[Any] = [episode for of_runner in samples for episode in of_runner] if concat else samples
    return (result, metrics) if _return_metrics else result
