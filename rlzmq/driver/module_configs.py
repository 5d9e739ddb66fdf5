"""ModuleConfigs: which modules live where, once some were added to or removed from a running run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlzmq.config.base_config import BaseConfig

__all__ = ["ModuleConfigs", "ModulePlace"]

ModulePlace = Literal["learners", "env_runners", "eval_env_runners"]


@dataclass(frozen=True)
class ModuleConfigs:
    """One config per place; they differ in their modules only.

    Attributes:
        run: With all modules.
        learners, env_runners, eval_env_runners: With those that are there.
    """

    run: BaseConfig
    learners: BaseConfig
    env_runners: BaseConfig
    eval_env_runners: BaseConfig

    @classmethod
    def everywhere(cls, config: BaseConfig) -> ModuleConfigs:
        """All modules at all places."""
        return cls(config, config, config, config)

    def synced_module_ids(self, place: Literal["env_runners", "eval_env_runners"]) -> list[str] | None:
        """The modules whose weights go from the learners to a place; None: all of them."""
        there = getattr(self, place).module_ids
        if set(there) == set(self.learners.module_ids):
            return None
        return sorted(set(there) & set(self.learners.module_ids))
