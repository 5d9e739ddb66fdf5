"""Configs from files: the code that a purpose needs, where it may come from, and what is missing.

A stored config names code. To act, only what acts is needed: modules and connectors; to evaluate also the
environment; to resume everything. Code comes from the caller (`Given`), from names that are trusted
(`rlzmq.core.trust`), or from the checkpoint's description, as for connector pieces of rlzmq. Code that is not needed
and not to be had is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rlzmq.algorithms.policy_agents import modules_of_agents
from rlzmq.algorithms.registry import config_class_named
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import code_names, plain_setting, revive_setting
from rlzmq.connectors.connector_v2 import ConnectorV2, recorded_arguments
from rlzmq.connectors.defaults import users_pieces
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.plain import NotPlainError
from rlzmq.core.spaces import space_to_plain
from rlzmq.core.trust import DOORS, PLACES, Trust, class_name, find_code
from rlzmq.driver.process_config import training, with_module, without_module
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

if TYPE_CHECKING:
    from rlzmq.modules.rl_module import RLModule

__all__ = [
    "PLACES",
    "Given",
    "Purpose",
    "StoredConfig",
    "modules_to_store",
    "stored_spec",
    "with_stored_modules",
]


def modules_to_store(
    config: BaseConfig, spaces: tuple[Any, Any], *, has_own_rule: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's plain data about what acts (specs, spaces, agents, connector pieces) and what is trained.

    Args:
        config: The config with the current modules.
        spaces: (observation space, action space) of one env.
        has_own_rule: Whether the run has changed which modules are trained (see `RunModules`).
    """
    both = {"__env_single__": spaces, "__env__": spaces}
    filled = config.get_multi_rl_module_spec(spaces={"__env_single__": spaces})
    specs = {module_id: _plain_or_none(spec.to_dict) for module_id, spec in filled.rl_module_specs.items()}
    trained = config.policies_to_train
    overrides = {
        mid: dict(values)
        for mid, values in config.algorithm_config_overrides_per_module.items()
        if all(isinstance(value, bool | int | float | str | None) for value in values.values())
    }
    plain_spaces = _plain_or_none(lambda: [space_to_plain(space) for space in spaces])
    return {
        "specs": specs,
        "multi_rl_module_class": class_name(filled.given_class),
        "overrides": overrides,
        "spaces": plain_spaces,
        "has_policies": config.policies is not None,
        "agents": [
            [*pair] for pair in modules_of_agents(config, spaces[0]).items() if config.policy_mapping_fn
        ],
        "connectors": {
            name: _plain_pieces(config, name, {"env": None, "spaces": both, **more})
            for name, more in (("env_to_module_connector", {"device": None}), ("module_to_env_connector", {}))
        },
        "trained": {
            "module_ids": sorted(trained) if isinstance(trained, Collection) else None,
            "is_function": callable(trained),
            "is_changed": has_own_rule,
        },
    }


def _plain_or_none(make: Callable[[], Any]) -> object:
    try:
        return make()
    except (NotPlainError, ConfigurationError):
        return None


def _plain_pieces(config: BaseConfig, setting: str, arguments: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the user's pieces of a pipeline by class and constructor's arguments, which may be None if not plain."""
    with recorded_arguments() as made:
        try:
            pieces = users_pieces(config, setting, arguments)
        except Exception:  # the user's function needs an env
            return None
    found = []
    for piece in pieces:
        plain = None
        if id(piece) in made:
            _, args, kwargs = made[id(piece)]
            plain = _plain_or_none(lambda: plain_setting(setting, {"args": args, "kwargs": kwargs}))  # noqa: B023
        found.append({"class": class_name(type(piece)), "made_with": plain})
    return found


def with_stored_modules(config: BaseConfig, stored: Mapping[str, Any], given: Given) -> BaseConfig:
    """Return `config` with the modules of a checkpoint, including added, removed and frozen ones.

    Args:
        config: The config that the run was built with, or that its checkpoint stored.
        stored: The return value of `modules_to_store`; ``{}`` changes nothing.
        given: Where the classes of modules come from that only the checkpoint has.

    Raises:
        CheckpointError: A module's spec was not stored, or names an unknown class.
    """
    specs = stored.get("specs")
    if specs is None:
        return config
    for module_id in [mid for mid in config.module_ids if mid not in specs]:
        config = without_module(config, module_id)
    for module_id, plain in specs.items():
        if module_id in config.module_ids:
            continue
        config = with_module(
            config,
            module_id,
            stored_spec(config, module_id, plain, given),
            config_overrides=stored.get("overrides", {}).get(module_id),
        )
    rule = stored.get("trained", {})
    if rule.get("is_changed") and not rule["is_function"]:
        config = training(config, rule["module_ids"])
    return config


@dataclass(frozen=True)
class Given:
    """What a caller hands over because files do not carry code.

    Attributes:
        config: Replaces the stored config; None: the stored one.
        trust: Packages whose code the file may name.
        module_class: A class, for all modules that are not of rlzmq's own classes, or classes by module id.
        settings: Settings by name, which replace the stored ones, e.g. ``env`` or ``learner_class``.
    """

    config: BaseConfig | None = None
    trust: Trust | Collection[str] = ()
    module_class: type | Mapping[str, type] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def own_config(self) -> BaseConfig | None:
        """Return the caller's config with the settings; None if the stored one is to be used."""
        if self.config is None or not self.settings:
            return self.config
        return self.config.copy(copy_frozen=False).update_from_dict(self.settings)

    def find_module_class(
        self, config: BaseConfig, module_id: str, named: str | None
    ) -> type[RLModule] | None:
        """Return the class of a module; None for the algorithm's default.

        Raises:
            ConfigurationError: It is not given, nor named by `config`, nor trusted; or it cannot be found.
        """
        if isinstance(self.module_class, Mapping) and module_id in self.module_class:
            return self.module_class[module_id]
        if named is None:
            return None
        if isinstance(self.module_class, type) and not named.startswith("rlzmq."):
            return self.module_class
        known = {class_name(cls): cls for cls in _module_classes(config)}
        return known[named] if named in known else find_code(named, Trust.of(self.trust), object)


def stored_spec(config: BaseConfig, module_id: str, plain: Any, given: Given = Given()) -> RLModuleSpec:
    """Return the RLModuleSpec of a module of a checkpoint.

    Raises:
        CheckpointError: It was not stored, or its class is not to be had.
    """
    if plain is None:
        raise CheckpointError(
            f"The checkpoint has a module {module_id!r} whose spec could not be stored. Pass a config whose "
            "policies have it."
        )
    try:
        module_class = given.find_module_class(config, module_id, plain.get("module_class"))
        spec = RLModuleSpec.from_dict({**plain, "module_class": None}, module_class=module_class)
    except (ConfigurationError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The class of the checkpoint's module {module_id!r}: {error} Pass it, module_class=…, or a config whose "
            "policies have it."
        ) from error
    spec.load_state_path = None  # the checkpoint's weights are loaded later
    return spec


def _module_classes(config: BaseConfig) -> list[type[RLModule]]:
    specs: list[Any] = list(config.policies.values()) if isinstance(config.policies, Mapping) else []
    outer = config.rl_module_spec
    specs += list(outer.rl_module_specs.values()) if isinstance(outer, MultiRLModuleSpec) else [outer]
    return [spec.module_class for spec in specs if getattr(spec, "module_class", None) is not None]


_log = logging.getLogger("rlzmq.checkpoints")

Purpose = Literal["act", "evaluate", "resume"]

_CONNECTORS = ("env_to_module_connector", "module_to_env_connector")
_TO_ACT = {
    "action_space": "the space of actions",
    "env_to_module_connector": "prepares observations",
    "module_class": "computes the actions",
    "module_to_env_connector": "turns the module's outputs into actions",
    "observation_space": "the space of observations",
    "policies": "the modules",
    "rl_module_spec": "the modules",
}
_TO_EVALUATE = {**_TO_ACT, "env": "makes the environments", "wrappers": "wrap the environments"}
_TO_RESUME = {
    **_TO_EVALUATE,
    "callbacks_class": "is called during the run",
    "callbacks_hooks": "are called during the run",
    "config": "the config's class",
    "learner_class": "trains",
    "learner_connector": "prepares train batches",
    "policy_mapping_fn": "chooses each agent's module",
}
# Methods of a config class that acting calls.
_ACTING_METHODS = {"build_env_to_module_connector", "build_module_to_env_connector"}


class _Pieces:
    """The settings of a stored config that can be had, and why the others cannot."""

    def __init__(self, stored: StoredConfig, given: Given) -> None:
        self.where, self.modules = stored.where, stored.modules
        self.trust = Trust.of(given.trust, is_signed=stored.is_mine)
        self.given = replace(given, trust=self.trust)
        self.values: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.names: set[str] = set()  # of code that trust would allow
        plain = stored.plain
        values, left_out = plain.get("values"), plain.get("left_out")
        if not isinstance(values, Mapping) or not isinstance(left_out, Mapping):
            raise CheckpointError(f"The config of {self.where} is malformed.")
        self.built_in = config_class_named(str(plain.get("config")))
        self.config_class = self._class(plain.get("config_class"))
        # Whether the class has methods that acting calls.
        self.acts_by_class = bool(set(plain.get("overridden") or ()) & _ACTING_METHODS)
        self.missing |= {name: f"{what}, which has no name to import" for name, what in left_out.items()}
        for name, value in values.items():
            if name in PLACES or not (stored.is_mine or name not in DOORS):
                continue
            try:
                self.values[name] = revive_setting(name, value, self.trust)
            except ConfigurationError as error:
                names = list(code_names(value))
                self._note(name, str(error), [value] if isinstance(value, str) and not names else names)
        for name in given.settings:
            self.missing.pop(name, None)

    def _class(self, named: object) -> type[BaseConfig]:
        if named is None or named == class_name(self.built_in):
            return self.built_in
        try:
            found: type[BaseConfig] = find_code(str(named), self.trust, self.built_in)
        except ConfigurationError as error:
            self._note("config", str(error), [str(named)])
            return self.built_in
        return found

    def _note(self, name: str, why: str, names: Collection[str]) -> None:
        self.missing[name] = why
        self.names |= {
            named
            for named in names
            if ":" in named and not named.startswith("__main__:") and not self.trust.covers(named)
        }

    def config(self, purpose: Purpose) -> BaseConfig:
        """Return the config.

        Raises:
            CheckpointError: Code is missing that the purpose needs.
        """
        needed = set(self.missing)
        if purpose != "resume":
            used = {"act": _TO_ACT, "evaluate": _TO_EVALUATE}[purpose]
            needed &= {*used, *(["config"] if self.acts_by_class else [])}
        if needed:
            raise CheckpointError(
                self._refusal(purpose, {name: self.missing[name] for name in sorted(needed)})
            )
        if self.missing:
            names = ", ".join(sorted(self.missing))
            _log.info("%s: not needed to %s, and left at the default: %s", self.where, purpose, names)
        known = self.config_class().keys()
        values = {
            name: value
            for name, value in self.values.items()
            if "config" not in self.missing or name in known
        }
        return self.config_class.from_dict(values).update_from_dict(self.given.settings)

    def _refusal(self, purpose: Purpose, missing: Mapping[str, str]) -> str:
        verb = "act with" if purpose == "act" else purpose
        lines = [f"To {verb} {self.where}, code is needed that it does not carry:"]
        for name, why in missing.items():
            use = _TO_RESUME.get(name)
            lines.append(f"  {name}{f' ({use})' if use else ''}: {why}")
        by_name = ", ".join(f"{name}=…" for name in missing)
        flag = ", --env" if "env" in missing else ""
        lines.append(f"Hand it over by name: {by_name} (on the command line: --config FILE{flag}).")
        if self.names:
            packages = sorted({name.partition(":")[0].partition(".")[0] for name in self.names})
            flags = " ".join(f"--trust {package}" for package in packages)
            lines.append(
                "It does not carry your signature: it comes from another user or machine, or was altered. If you trust "
                f"it, you can also allow what it names: trust={packages} ({flags})."
            )
        return "\n".join(lines)

    def use_what_acts(self) -> None:
        """Take modules, connector pieces and the mapping of agents from the checkpoint's description."""
        specs = self.modules.get("specs")
        if isinstance(specs, Mapping) and None not in specs.values():
            self.use_stored_modules()
        for name in _CONNECTORS:
            if name in self.missing:
                self._use_stored_pieces(name)
        if self.missing.pop("policy_mapping_fn", None):  # a policy of one module and agent does not call it
            self.values["policy_mapping_fn"] = _StoredMapping(self.modules.get("agents") or [])

    def use_stored_modules(self) -> None:
        """Take the modules from their stored specs, in place of the settings that define them."""
        outer = self.values.get("rl_module_spec")
        found: dict[str, Any] = {}
        for module_id, plain in self.modules["specs"].items():
            try:
                found[module_id] = stored_spec(self.built_in(), module_id, plain, self.given)
            except CheckpointError as error:
                self._note("module_class", str(error.__cause__ or error), [str(plain.get("module_class"))])
        multi_class = self.modules.get("multi_rl_module_class")
        try:
            spec = MultiRLModuleSpec.from_dict(
                {"multi_rl_module_class": multi_class, "rl_module_specs": {}}, trust=self.trust
            )
        except ConfigurationError as error:
            self._note("rl_module_spec", str(error), [str(multi_class)])
            return
        spec.add_modules(found)
        spec.model_config = outer.model_config if isinstance(outer, MultiRLModuleSpec) else None
        for name in ("policies", "rl_module_spec"):
            self.missing.pop(name, None)
        policies = set(found) if self.modules.get("has_policies") else None
        self.values |= {"rl_module_spec": spec, "policies": policies}

    def _use_stored_pieces(self, name: str) -> None:
        """Take a pipeline's pieces from their classes and arguments, in place of the function that creates them."""
        stored = (self.modules.get("connectors") or {}).get(name)
        if not isinstance(stored, list):
            return
        made: list[Any] = []
        for one in stored:
            kind, plain = (str(one["class"]), one["made_with"]) if isinstance(one, Mapping) else ("", None)
            try:
                cls = find_code(kind, self.trust, ConnectorV2)
                made_with = plain and revive_setting(name, plain, self.trust)
                if not isinstance(made_with, Mapping) or set(made_with) != {"args", "kwargs"}:
                    raise ConfigurationError(f"the arguments of {kind!r} are not stored.")
                made.append((cls, made_with))
            except ConfigurationError as error:
                self._note(name, str(error), [kind])
                return
        self.missing.pop(name, None)
        self.values[name] = lambda *args, **kwargs: [
            cls(*made_with["args"], **made_with["kwargs"]) for cls, made_with in made
        ]


@dataclass(frozen=True)
class StoredConfig:
    """A config in a file.

    Attributes:
        plain: The result of `AlgorithmConfig.to_stored`.
        where: Where it is stored, for error messages.
        is_mine: Whether this user's signature covers `plain` and `modules`.
        modules: The result of `modules_to_store`; {}: there is none.
    """

    plain: Mapping[str, Any]
    where: str
    is_mine: bool = False
    modules: Mapping[str, Any] = field(default_factory=dict)

    def config_class(self, given: Given) -> type[BaseConfig]:
        """Return the class of the config.

        Raises:
            CheckpointError: It is the user's own and not trusted.
        """
        pieces = _Pieces(replace(self, plain={**self.plain, "values": {}, "left_out": {}}), given)
        pieces.config("resume")
        return pieces.config_class

    def config_to(self, purpose: Purpose, given: Given) -> BaseConfig:
        """Return the caller's config or the stored one, with the checkpoint's modules.

        Raises:
            CheckpointError: Code is missing that the purpose needs.
        """
        config = given.own_config()
        if config is None:
            pieces = _Pieces(self, given)
            if purpose != "resume":
                pieces.use_what_acts()
                # Without stored spaces, they are those of the env.
                return pieces.config("evaluate" if self.modules.get("spaces") is None else purpose)
            if given.module_class is not None and self.modules.get("specs"):
                pieces.use_stored_modules()
            config = pieces.config("resume")
        given = replace(given, trust=Trust.of(given.trust, is_signed=self.is_mine))
        return with_stored_modules(config, self.modules, given)


class _StoredMapping:
    """The mapping of agents to modules as a checkpoint lists it, for functions that it cannot carry."""

    def __init__(self, agents: Any) -> None:
        self._modules = dict(agents)

    def __call__(self, agent_id: object, episode: object = None, **kwargs: object) -> str:
        if agent_id not in self._modules:
            raise ConfigurationError(
                f"the checkpoint does not say which module acts for agent {agent_id!r}, because that depends on the "
                "episode: pass policy_mapping_fn=…, or module_id and agent_id."
            )
        return str(self._modules[agent_id])
