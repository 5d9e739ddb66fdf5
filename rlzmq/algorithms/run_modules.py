"""RunModules: the modules of a run, and their changes between two iterations."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.module_changes import (
    SAME_RULES,
    ModuleChange,
    NewRules,
    plan_addition,
    plan_removal,
    plan_training,
)
from rlzmq.algorithms.stored_config import modules_to_store, stored_spec
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.process_config import PLACES, ModuleConfigs
from rlzmq.driver.session import Session
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

__all__ = ["RunModules"]

_log = logging.getLogger("rlzmq.checkpoints")


class RunModules:
    """Tracks which modules the learners and runners have, and changes all of them together.

    Attributes:
        configs: The current configs, by place.
    """

    def __init__(self, config: BaseConfig, session: Session, evaluation: Evaluation) -> None:
        self._session = session
        self._evaluation = evaluation
        self.configs: ModuleConfigs = ModuleConfigs.everywhere(config)
        # Whether a change has set which modules are trained, which overrides the config of `__init__`.
        self._has_own_rule = False

    async def add(
        self,
        module_id: str,
        module_spec: RLModuleSpec | None = None,
        *,
        places: Collection[str] = PLACES,
        config_overrides: Mapping[str, Any] | None = None,
        rules: NewRules = SAME_RULES,
    ) -> MultiRLModuleSpec:
        """Add a module at these places (see AsyncAlgorithm.add_module)."""
        change = plan_addition(
            self.configs,
            self._session.spaces,
            module_id,
            module_spec,
            places=places,
            config_overrides=config_overrides,
            rules=rules,
        )
        return await self._apply(change, self._has_own_rule or rules.to_train is not None)

    async def remove(
        self, module_id: str, *, places: Collection[str] = PLACES, rules: NewRules = SAME_RULES
    ) -> MultiRLModuleSpec:
        """Remove a module at these places (see AsyncAlgorithm.remove_module)."""
        change = plan_removal(self.configs, self._session.spaces, module_id, places=places, rules=rules)
        return await self._apply(change, self._has_own_rule or rules.to_train is not None)

    async def _apply(self, change: ModuleChange | None, has_own_rule: bool) -> MultiRLModuleSpec:
        if change is not None:
            configs = change.configs
            await self._session.change_modules(configs, change.change)
            await self._evaluation.change_modules(
                configs.eval_env_runners, configs.synced_module_ids("eval_env_runners")
            )
            self.configs = configs
        self._has_own_rule = has_own_rule
        return self._session.learner_group.module_spec  # type: ignore[no-any-return]

    # -- checkpoints ----------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the component "modules" of a checkpoint (see `modules_to_store`)."""
        return modules_to_store(self.configs.run, self._session.spaces, has_own_rule=self._has_own_rule)

    async def set_state(self, stored: Mapping[str, Any]) -> None:
        """Add, remove and freeze modules to match a checkpoint."""
        specs = stored.get("specs") or {}
        ids = self.configs.run.module_ids
        for module_id in [mid for mid in specs if mid not in ids]:
            spec = stored_spec(self.configs.run, module_id, specs[module_id])
            await self.add(module_id, spec, config_overrides=stored.get("overrides", {}).get(module_id))
        for module_id in [mid for mid in ids if specs and mid not in specs]:
            await self.remove(module_id)
        rule = stored.get("trained")
        # If neither run changed which modules are trained, the config's rule is kept.
        if rule is not None and (rule["is_changed"] or self._has_own_rule):
            await self._apply(self._plan_rule(rule), rule["is_changed"])

    def _plan_rule(self, rule: Mapping[str, Any]) -> ModuleChange | None:
        if not rule["is_function"]:
            return plan_training(self.configs, rule["module_ids"])
        trained = self.configs.run.policies_to_train
        if not callable(trained):
            _log.warning(
                "The saved run used a function to select the modules to train, which checkpoints do not contain. Now "
                "these are trained: %s. Pass config=… with other policies_to_train to change that.",
                trained or "all",
            )
        return None

    def check(self, module_ids: Iterable[str]) -> None:
        """Raise KeyError if the learners lack one of these modules."""
        known = self.configs.learners.module_ids
        for module_id in module_ids:
            if module_id not in known:
                raise KeyError(f"the learners have no module {module_id!r}.{did_you_mean(module_id, known)}")
