"""ModuleConfigs: the modules of each place, and changes of a standalone learner group's modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import CheckpointError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.modules.saving import read_module_states

__all__ = ["PLACES", "ModuleConfigs", "ModulePlace", "one_less", "one_more", "weights_to_load"]

ModulePlace = Literal["learners", "env_runners", "eval_env_runners"]
PLACES: tuple[ModulePlace, ...] = ("learners", "env_runners", "eval_env_runners")


@dataclass(frozen=True)
class ModuleConfigs:
    """One config per place. They differ only in their modules.

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


Changed = tuple[Any, Any, Callable[[Any], Any]]


def weights_to_load(
    module_spec: Any,
    *,
    multi_rl_module_ckpt_dir: str | Path | None,
    modules_to_load: Collection[str] | None,
    rl_module_ckpt_dirs: Mapping[str, str | Path] | None,
) -> dict[str, Any]:
    """Return module id → weights. For arguments and errors, see `AsyncLearnerGroup.load_module_state`."""
    mine = module_spec.as_multi_rl_module_spec()
    weights: dict[str, Any] = {}
    if multi_rl_module_ckpt_dir is not None:
        found = read_module_states(multi_rl_module_ckpt_dir)
        for module_id in (
            [mid for mid in found if mid in mine] if modules_to_load is None else modules_to_load
        ):
            if module_id not in found:
                names = did_you_mean(module_id, found)
                raise CheckpointError(f"{multi_rl_module_ckpt_dir} has no module {module_id!r}.{names}")
            weights[module_id] = found[module_id]
    for module_id, path in (rl_module_ckpt_dirs or {}).items():
        weights[module_id] = read_module_states(path, module_id)
    for module_id in weights:
        mine[module_id]  # raises KeyError if the learners have no such module
    return weights


def one_more(
    config: BaseConfig,
    module_spec: Any,
    module_id: str,
    new: Any,
    *,
    config_overrides: Mapping[str, Any] | None,
    new_should_module_be_updated: Any,
) -> Changed:
    """Return (config, specs, function that adds the module to a learner); see `AsyncLearnerGroup.add_module`."""
    specs = module_spec.as_multi_rl_module_spec().copy()
    specs.add_modules({module_id: new}, override=False)
    config = config.copy(copy_frozen=False)
    if config_overrides:
        per_module = dict(config.algorithm_config_overrides_per_module)
        config.algorithm_config_overrides_per_module = {**per_module, module_id: dict(config_overrides)}

    def change(learner: Any) -> None:
        learner.add_module(
            module_id=module_id,
            module_spec=new,
            config_overrides=config_overrides,
            new_should_module_be_updated=new_should_module_be_updated,
        )

    return _training(config, new_should_module_be_updated), specs, change


def one_less(
    config: BaseConfig, module_spec: Any, module_id: str, *, new_should_module_be_updated: Any
) -> Changed:
    """Return (config, specs, function that removes the module from a learner)."""
    specs = module_spec.as_multi_rl_module_spec().copy()
    specs[module_id]  # raises KeyError if there is no such module
    specs.remove_modules(module_id)

    def change(learner: Any) -> None:
        learner.remove_module(module_id, new_should_module_be_updated=new_should_module_be_updated)

    return _training(config.copy(copy_frozen=False), new_should_module_be_updated), specs, change


def _training(config: BaseConfig, to_train: object) -> BaseConfig:
    if to_train is not None:
        config.policies_to_train = to_train
    config.freeze()
    return config
