"""LearnerGroup: the learners for callers without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpointable import Checkpointable
from rlzmq.driver.async_learner_group import AsyncLearnerGroup
from rlzmq.driver.run_coroutine import Run, runner_for
from rlzmq.learners.learner_base import LearnerBase

__all__ = ["LearnerGroup"]


class LearnerGroup(Checkpointable):
    """Synchronous interface to AsyncLearnerGroup.

    Args:
        config: With ``num_learners=0`` the group is one local learner.
        module_spec: The MultiRLModuleSpec with its spaces.
    """

    checkpoint_name = LearnerBase.checkpoint_name

    def __init__(self, *, config: BaseConfig, module_spec: Any) -> None:
        run: Run = runner_for(config)
        self._run = run
        self._system: Any = None
        if config.num_learners:
            self._system = ActorSystem()
            run(self._system.start())
        self._group = AsyncLearnerGroup(config, module_spec, system=self._system)
        run(self._group.start())

    @classmethod
    def facing(cls, group: AsyncLearnerGroup, run: Run) -> Self:
        """Return the synchronous interface to an existing group."""
        face = cls.__new__(cls)
        face._run, face._system, face._group = run, None, group
        return face

    def update(self, **kwargs: Any) -> list[dict[str, Any]]:
        """Train one update (see AsyncLearnerGroup.update)."""
        return self._run(self._group.update(**kwargs))  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """Return rank 0's learner state."""
        return self._run(self._group.get_state())  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load this state on every rank."""
        self._run(self._group.set_state(state))

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint on every rank (see AsyncLearnerGroup.restore_from_path)."""
        self._run(self._group.restore_from_path(path, component))

    def get_weights(self) -> dict[str, Any]:
        """Return ``{module id: {name: array}}``."""
        return self._run(self._group.get_weights())  # type: ignore[no-any-return]

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Load these weights on every rank."""
        self._run(self._group.set_weights(weights))

    def load_module_state(self, **options: Any) -> None:
        """Load weights from checkpoints on every rank (see AsyncLearnerGroup.load_module_state)."""
        self._run(self._group.load_module_state(**options))

    def add_module(self, **options: Any) -> Any:
        """Add a module to a standalone group (see AsyncLearnerGroup.add_module)."""
        return self._run(self._group.add_module(**options))

    def remove_module(self, module_id: str, **options: Any) -> Any:
        """Remove a module from a standalone group (see AsyncLearnerGroup.remove_module)."""
        return self._run(self._group.remove_module(module_id, **options))

    def foreach_learner(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call ``func(learner)`` on every rank; return the results in rank order."""
        return self._run(self._group.foreach_learner(func))  # type: ignore[no-any-return]

    @property
    def group(self) -> AsyncLearnerGroup:
        """The underlying asynchronous group."""
        return self._group

    @property
    def num_learners(self) -> int:
        """Ranks."""
        return self._group.num_learners

    def shutdown(self) -> None:
        """Stop the learners."""
        self._run(self._group.shutdown())
        if self._system is not None:
            self._run(self._system.stop())
