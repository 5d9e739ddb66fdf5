"""MultiRLModuleSpec: everything needed to build a MultiRLModule anywhere."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import gymnasium as gym

from rlzmq.config.plain import MULTI_SPEC_TAG
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import LazyModule
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import Trust, class_name, find_code
from rlzmq.modules.saving import restore_module
from rlzmq.modules.spec import ModuleClass, RLModuleSpec

if TYPE_CHECKING:
    from rlzmq.modules import multi_rl_module
    from rlzmq.modules.rl_module import RLModule
else:  # it imports torch, which only the modules themselves need
    multi_rl_module = LazyModule("rlzmq.modules.multi_rl_module")

__all__ = ["MultiRLModuleSpec"]

_DEFAULT_CLASS = "rlzmq.modules.multi_rl_module:MultiRLModule"


class MultiRLModuleSpec:
    """The description from which a MultiRLModule is built.

    Args:
        rl_module_specs: Module id -> spec.
        multi_rl_module_class: A subclass of MultiRLModule; None: MultiRLModule itself.
        observation_space, action_space: Passed to the class.
        inference_only: Whether to build every module inference-only and leave learner-only ones out; None: as each
            spec defines.
        model_config: Passed to the class, for subclasses that use it.
        load_state_path: Checkpoint of a MultiRLModule to load weights from.
        modules_to_load: Ids of the modules whose weights are loaded; None: all modules that both have.
    """

    plain_tag: ClassVar[str] = MULTI_SPEC_TAG

    multi_rl_module_class: ModuleClass[type[Any]] = ModuleClass()

    def __init__(
        self,
        rl_module_specs: Mapping[str, RLModuleSpec] | None = None,
        *,
        multi_rl_module_class: type[multi_rl_module.MultiRLModule] | None = None,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        inference_only: bool | None = None,
        model_config: Any = None,
        load_state_path: str | None = None,
        modules_to_load: Collection[str] | None = None,
    ) -> None:
        cls: Any = multi_rl_module_class
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, multi_rl_module.MultiRLModule)):
            raise ConfigurationError(
                f"multi_rl_module_class: expected a subclass of MultiRLModule, got {cls!r}"
            )
        self.multi_rl_module_class = cls or _DEFAULT_CLASS
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only = inference_only
        self.model_config = model_config
        self.load_state_path = load_state_path
        self.modules_to_load = modules_to_load
        self.rl_module_specs: dict[str, RLModuleSpec] = {}
        self.add_modules(rl_module_specs or {})

    @property
    def given_class(self) -> type[Any] | str:
        """`multi_rl_module_class`, or its name if it has not been imported."""
        return vars(self)["multi_rl_module_class"]  # type: ignore[no-any-return]

    def build(self, module_id: str | None = None, *, seed: int | None = None) -> Any:
        """Build the MultiRLModule, or one of its modules.

        Args:
            module_id: Build and return only this module.
            seed: See :meth:`RLModuleSpec.build`, for every module.

        Raises:
            ConfigurationError: A module cannot be built; the text names its id.
        """
        if module_id is not None:
            spec = self[module_id]
            if self.inference_only and not spec.inference_only:
                spec = spec.copy()
                spec.inference_only = True
            return spec.build(seed=seed, module_id=module_id)
        module = self.multi_rl_module_class(
            observation_space=self.observation_space,
            action_space=self.action_space,
            inference_only=self.inference_only,
            model_config=self.model_config,
            rl_module_specs=self.rl_module_specs,
            seed=seed,
        )
        if self.load_state_path is not None:
            restore_module(module, self.load_state_path, module_ids=self.modules_to_load)
        return module

    def add_modules(self, rl_module_specs: Mapping[str, RLModuleSpec], override: bool = True) -> None:
        """Add specs by id.

        Raises:
            TypeError: A value is not an RLModuleSpec.
            ValueError: An id exists already and ``override`` is False.
        """
        if not isinstance(rl_module_specs, Mapping):
            raise TypeError(
                "rl_module_specs: expected a dict {module_id: RLModuleSpec}, "
                f"got {type(rl_module_specs).__name__}"
            )
        for module_id, spec in rl_module_specs.items():
            if not isinstance(spec, RLModuleSpec):
                raise TypeError(
                    f"rl_module_specs[{module_id!r}]: expected an RLModuleSpec, got {type(spec).__name__}"
                )
            if module_id in self.rl_module_specs and not override:
                raise ValueError(f"there is a spec for module {module_id!r} already")
            self.rl_module_specs[module_id] = spec

    def remove_modules(self, module_ids: str | Collection[str]) -> None:
        """Remove specs. Unknown ids are ignored."""
        for module_id in (module_ids,) if isinstance(module_ids, str) else module_ids:
            self.rl_module_specs.pop(module_id, None)

    def update(self, other: MultiRLModuleSpec | RLModuleSpec, override: bool = True) -> None:
        """Update from another spec. A single RLModuleSpec updates every module."""
        if isinstance(other, RLModuleSpec):
            for spec in self.rl_module_specs.values():
                spec.update(other, override)
            return
        for module_id, spec in other.rl_module_specs.items():
            if module_id in self.rl_module_specs:
                self.rl_module_specs[module_id].update(spec, override)
            else:
                self.rl_module_specs[module_id] = spec

    def copy(self) -> Self:
        """Return a copy whose set of modules can be changed independently (the specs are shared)."""
        new = copy.copy(self)
        new.rl_module_specs = dict(self.rl_module_specs)
        return new

    def as_multi_rl_module_spec(self) -> Self:
        """Return this spec."""
        return self

    @classmethod
    def from_module(cls, module: multi_rl_module.MultiRLModule) -> Self:
        """Return a spec that builds modules like this one (without the weights)."""
        return cls(
            {module_id: RLModuleSpec.from_module(m) for module_id, m in module.items()},
            multi_rl_module_class=type(module),
            observation_space=module.observation_space,
            action_space=module.action_space,
            inference_only=module.inference_only or None,
            model_config=module.model_config or None,
        )

    def __getitem__(self, module_id: str) -> RLModuleSpec:
        try:
            return self.rl_module_specs[module_id]
        except KeyError:
            raise KeyError(
                f"no spec for module {module_id!r}.{did_you_mean(module_id, self.rl_module_specs)}"
            ) from None

    def __contains__(self, module_id: object) -> bool:
        return module_id in self.rl_module_specs

    def __repr__(self) -> str:
        return f"MultiRLModuleSpec({self.rl_module_specs!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain values, like :meth:`RLModuleSpec.to_dict`."""
        outer = RLModuleSpec(
            observation_space=self.observation_space,
            action_space=self.action_space,
            model_config=self.model_config,
            load_state_path=self.load_state_path,
        ).to_dict()
        return {
            "multi_rl_module_class": class_name(self.given_class),
            "observation_space": outer["observation_space"],
            "action_space": outer["action_space"],
            "inference_only": self.inference_only,
            "model_config": outer["model_config"],
            "load_state_path": outer["load_state_path"],
            "modules_to_load": None if self.modules_to_load is None else sorted(self.modules_to_load),
            "rl_module_specs": {
                module_id: spec.to_dict() for module_id, spec in self.rl_module_specs.items()
            },
        }

    @classmethod
    def from_dict(
        cls,
        plain: Mapping[str, Any],
        *,
        multi_rl_module_class: type[multi_rl_module.MultiRLModule] | None = None,
        module_classes: Mapping[str, type[RLModule]] | None = None,
        trust: Trust | Collection[str] = (),
    ) -> Self:
        """Create a spec from the result of ``to_dict``. Classes may be given; see :meth:`RLModuleSpec.from_dict`."""
        named = plain.get("multi_rl_module_class", _DEFAULT_CLASS)
        if multi_rl_module_class is None and named != _DEFAULT_CLASS:
            multi_rl_module_class = find_code(named, Trust.of(trust), multi_rl_module.MultiRLModule)
        outer = RLModuleSpec.from_dict(
            {key: plain.get(key) for key in ("observation_space", "action_space", "model_config")}
        )
        classes = module_classes or {}
        return cls(
            {
                module_id: RLModuleSpec.from_dict(spec, module_class=classes.get(module_id), trust=trust)
                for module_id, spec in plain["rl_module_specs"].items()
            },
            multi_rl_module_class=multi_rl_module_class,
            observation_space=outer.observation_space,
            action_space=outer.action_space,
            inference_only=plain.get("inference_only"),
            model_config=outer.model_config,
            load_state_path=plain.get("load_state_path"),
            modules_to_load=plain.get("modules_to_load"),
        )
