"""EnvRunnerGroup: the env runners for callers without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.driver.learner_group import LearnerGroup
from rlzmq.driver.run_coroutine import Run, runner_for

__all__ = ["EnvRunnerGroup"]


class EnvRunnerGroup:
    """Synchronous interface to AsyncEnvRunnerGroup.

    Args:
        config: With ``num_env_runners=0`` the group is one local runner.

    Example::

        group = EnvRunnerGroup(config=config)
        episodes = group.sample(num_episodes=4)
        group.stop()
    """

    def __init__(self, *, config: BaseConfig) -> None:
        run = runner_for(config)
        self._run: Run = run
        self._system: Any = None
        if config.num_env_runners:
            self._system = ActorSystem()
            run(self._system.start())
        self._group = AsyncEnvRunnerGroup(config, system=self._system)
        self._group.reports_samples = False  # there are no results to add them to
        run(self._group.start())

    @classmethod
    def facing(cls, group: AsyncEnvRunnerGroup, run: Run) -> Self:
        """Return the synchronous interface to an existing group."""
        face = cls.__new__(cls)
        face._run, face._system, face._group = run, None, group
        return face

    def sample(self, **kwargs: Any) -> list[Any]:
        """Return episodes from all runners (see AsyncEnvRunnerGroup.sample)."""
        return self._run(self._group.sample(**kwargs))  # type: ignore[no-any-return]

    @property
    def local_env_runner(self) -> Any:
        """The runner in this process, or None."""
        return self._group.local_env_runner

    @property
    def num_env_runners(self) -> int:
        """Number of runners that sample."""
        return self._group.num_env_runners

    def num_remote_env_runners(self) -> int:
        """Number of runner processes."""
        return self._group.num_remote_env_runners()

    def num_healthy_remote_env_runners(self) -> int:
        """Number of runner processes that are alive."""
        return self._group.num_healthy_remote_env_runners()

    num_remote_workers = num_remote_env_runners
    num_healthy_remote_workers = num_healthy_remote_env_runners

    def foreach_env_runner(self, func: Any, **options: Any) -> list[Any]:
        """Call ``func(env_runner)`` in every runner's process (see RunnerCalls.foreach_env_runner)."""
        return self._run(self._group.foreach_env_runner(func, **options))  # type: ignore[no-any-return]

    def foreach_env_runner_async(self, func: Any, tag: str | None = None, **options: Any) -> int:
        """Start calls of ``func(env_runner)`` (see RunnerCalls.foreach_env_runner_async)."""
        return self._run(self._group.foreach_env_runner_async(func, tag, **options))  # type: ignore[no-any-return]

    def fetch_ready_async_reqs(self, **options: Any) -> list[tuple[int, Any]]:
        """Return results of started calls (see RunnerCalls.fetch_ready_async_reqs)."""
        return self._run(self._group.fetch_ready_async_reqs(**options))  # type: ignore[no-any-return]

    def foreach_env(self, func: Callable[[Any], Any]) -> list[list[Any]]:
        """Call ``func(env)`` for every env of every runner; return a list per runner."""
        return self._run(self._group.foreach_env(func))  # type: ignore[no-any-return]

    def get_metrics(self) -> list[dict[str, Any]]:
        """Return each runner's metrics since the last call (see AsyncEnvRunnerGroup.get_metrics)."""
        return self._run(self._group.get_metrics())  # type: ignore[no-any-return]

    def sync_weights(
        self,
        policies: Collection[str] | None = None,
        from_worker_or_learner_group: Any = None,
        **options: Any,
    ) -> None:
        """Send weights to all runners (see RunnerSync.sync_weights)."""
        source = from_worker_or_learner_group
        if isinstance(source, LearnerGroup):
            source = (
                source.group if source.group is self._group.learner_group else _WithState(source.get_state())
            )
        self._run(self._group.sync_weights(policies, source, **options))

    def sync_env_runner_states(self, **options: Any) -> None:
        """Merge the runners' connector states (see RunnerSync.sync_env_runner_states)."""
        self._run(self._group.sync_env_runner_states(**options))

    def stop(self) -> None:
        """Stop the runners."""
        self._run(self._group.stop())
        if self._system is not None:
            self._run(self._system.stop())


class _WithState:
    """A state that was already fetched, with the interface of its source."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def get_state(self) -> Mapping[str, Any]:
        return self._state
