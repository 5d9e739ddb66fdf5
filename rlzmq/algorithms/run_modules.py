"""RunModules: the modules of a run, and their changes between two iterations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.policy_agents import modules_of_agents
from rlzmq.algorithms.stored_config import modules_to_store, stored_spec
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.process_config import (
    PLACES,
    SAME_RULES,
    ModuleConfigs,
    NewRules,
    training,
    with_module,
    without_module,
)
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
        if not places:
            raise ValueError(f"add_module({module_id!r}): no place to add it to.")
        before, spaces = self.configs, self._session.spaces

        def added(config: BaseConfig, spec: RLModuleSpec | None) -> BaseConfig:
            return with_module(config, module_id, spec, config_overrides=config_overrides, rules=rules)

        run = added(before.run, module_spec)
        filled = run.get_multi_rl_module_spec(spaces={"__env_single__": spaces})[module_id]
        module = filled.build(seed=run.seed, module_id=module_id)  # raises here if it cannot be built
        if "learners" in places:
            run.learner_class.check_module(module_id, module, run)
        by_place = {}
        for place in PLACES:
            config = getattr(before, place)
            by_place[place] = added(config, filled.copy()) if place in places else rules.applied_to(config)
        configs = ModuleConfigs(run=added(before.run, filled.copy()), **by_place)

        def change(learner: Any) -> None:
            if "learners" in places:
                learner.add_module(
                    module_id=module_id,
                    module_spec=filled,
                    config_overrides=config_overrides,
                    new_should_module_be_updated=rules.to_train,
                )

        return await self._apply(configs, change, self._has_own_rule or rules.to_train is not None)

    async def remove(
        self, module_id: str, *, places: Collection[str] = PLACES, rules: NewRules = SAME_RULES
    ) -> MultiRLModuleSpec:
        """Remove a module at these places (see AsyncAlgorithm.remove_module)."""
        before = self.configs
        if module_id not in before.run.module_ids:
            without_module(before.run, module_id)  # raises KeyError
        by_place = {}
        for place in PLACES:
            config = getattr(before, place)
            is_there = place in places and module_id in config.module_ids
            by_place[place] = (
                without_module(config, module_id, rules=rules) if is_there else rules.applied_to(config)
            )
        is_left = any(module_id in config.module_ids for config in by_place.values())
        run = rules.applied_to(before.run) if is_left else without_module(before.run, module_id, rules=rules)

        def change(learner: Any) -> None:
            if "learners" in places and module_id in learner.module:
                learner.remove_module(module_id, new_should_module_be_updated=rules.to_train)

        has_own_rule = self._has_own_rule or rules.to_train is not None
        return await self._apply(ModuleConfigs(run=run, **by_place), change, has_own_rule)

    async def _train_only(self, module_ids: Sequence[str] | None, has_own_rule: bool) -> None:
        """Train only these modules; None: all."""
        places = {place: training(getattr(self.configs, place), module_ids) for place in ("run", *PLACES)}
        if all(config is getattr(self.configs, place) for place, config in places.items()):
            self._has_own_rule = has_own_rule
            return

        def change(learner: Any) -> None:
            learner.policies_to_train = module_ids

        await self._apply(ModuleConfigs(**places), change, has_own_rule)

    async def _apply(
        self, configs: ModuleConfigs, change: Callable[[Any], Any], has_own_rule: bool
    ) -> MultiRLModuleSpec:
        """Give all places their new configs; ``change(learner)`` changes a learner."""
        _check_mapping(configs, self._session.spaces[0])
        await self._session.change_modules(configs, change)
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
        if rule is None or not (rule["is_changed"] or self._has_own_rule):
            return
        if not rule["is_function"]:
            await self._train_only(rule["module_ids"], rule["is_changed"])
            return
        self._has_own_rule = rule["is_changed"]
        trained = self.configs.run.policies_to_train
        if not callable(trained):
            _log.warning(
                "The saved run used a function to select the modules to train, which checkpoints do not contain. Now "
                "these are trained: %s. Pass config=… with other policies_to_train to change that.",
                trained or "all",
            )

    def check(self, module_ids: Iterable[str]) -> None:
        """Raise KeyError if the learners lack one of these modules."""
        known = self.configs.learners.module_ids
        for module_id in module_ids:
            if module_id not in known:
                raise KeyError(f"the learners have no module {module_id!r}.{did_you_mean(module_id, known)}")


def _check_mapping(configs: ModuleConfigs, observation_spaces: object) -> None:
    """Raise ConfigurationError if an agent is mapped to a module that its runners lack."""
    for place in ("env_runners", "eval_env_runners"):
        config = getattr(configs, place)
        for agent_id, module_id in modules_of_agents(config, observation_spaces).items():
            if config.policy_mapping_fn and module_id not in config.module_ids:
                raise ConfigurationError(
                    f"policy_mapping_fn({agent_id!r}, episode) returns {module_id!r}, which the {place} would "
                    f"not have; they would have {config.module_ids}. Pass new_agent_to_module_mapping_fn=…"
                )
