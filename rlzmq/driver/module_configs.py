"""ModuleConfigs: which modules live in which processes, after modules were added to or removed from a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlzmq.config.base_config import BaseConfig

__all__ = ["ModuleConfigs", "ModulePlace"]

ModulePlace = Literal["learners", "env_runners", "eval_env_runners"]


@dataclass(frozen=True)
class ModuleConfigs:
    """One config per place; they differ only in their modules.

    Attributes:
        run: Config with all modules.
        learners, env_runners, eval_env_runners: Configs with the modules of these places.
    """

    run: BaseConfig
    learners: BaseConfig
    env_runners: BaseConfig
    eval_env_runners: BaseConfig

    @classmethod
    def everywhere(cls, config: BaseConfig) -> ModuleConfigs:
        """Create with all modules at all places."""
        return cls(config, config, config, config)

    def synced_module_ids(self, place: Literal["env_runners", "eval_env_runners"]) -> list[str] | None:
        """Return the modules whose weights are sent from the learners to a place; None: all."""
        there = getattr(self, place).module_ids
        if set(there) == set(self.learners.module_ids):
            return None
        return sorted(set(there) & set(self.learners.module_ids))
