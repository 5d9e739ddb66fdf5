"""RLModuleSpec: everything needed to build a module anywhere."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

import gymnasium as gym

from rlzmq.config.model_config import DefaultModelConfig, model_config_to_dict, refuse_catalog
from rlzmq.config.plain import SPEC_TAG
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import LazyModule
from rlzmq.core.signatures import check_takes
from rlzmq.core.spaces import space_from_plain, space_to_plain
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, Trust, class_name, find_code
from rlzmq.core.update_plan import derive_seed

if TYPE_CHECKING:
    from rlzmq.modules import rl_module
    from rlzmq.modules.rl_module import RLModule
else:  # it imports torch, which only the modules themselves need
    rl_module = LazyModule("rlzmq.modules.rl_module")

__all__ = ["ModuleClass", "RLModuleSpec", "seeded"]

T = TypeVar("T")

# Named by strings, not imported: a single-agent run needs no MultiRLModuleSpec, a custom module no default models.
_DEFAULT_CLASS = "rlzmq.modules.default_models.actor_critic:DefaultActorCriticModule"
_MULTI_CLASS = "rlzmq.modules.multi_rl_module_spec:MultiRLModuleSpec"


class ModuleClass(Generic[T]):
    """A spec's attribute for a class of modules. If it is set to the class's name, reading it imports the class.

    Processes that only hand a spec on need no torch.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, spec: None, owner: type) -> None: ...

    @overload
    def __get__(self, spec: object, owner: type) -> T: ...

    def __get__(self, spec: object | None, owner: type) -> Any:
        if spec is None:
            return None  # a dataclass reads its field's default
        value = vars(spec)[self._name]
        if isinstance(value, str):
            value = vars(spec)[self._name] = find_code(value, CALLER, rl_module.RLModule)
        return value

    def __set__(self, spec: object, value: T | str) -> None:
        vars(spec)[self._name] = value


@dataclasses.dataclass
class RLModuleSpec:
    """The description from which a module is built.

    Args:
        module_class: A subclass of RLModule, or its name ("package.module:Class"), which is imported when the class is
            used; None: the default actor-critic module.
        observation_space: One agent's observation space after the env-to-module pipeline.
        action_space: One agent's action space.
        inference_only: Whether to build only the parts that acting needs.
        learner_only: Whether env runners do not build the module.
        model_config: A dict or a DefaultModelConfig.
        catalog_class: Has no effect: there are no catalogs, and `model_config` defines the default models.
        load_state_path: Checkpoint to load weights from: a module's, an algorithm's, or one module of the latter (see
            :meth:`RLModule.from_checkpoint`).

    Example:
        >>> spec = RLModuleSpec(observation_space=env.observation_space, action_space=env.action_space)
        >>> module = spec.build(seed=0)
    """

    plain_tag: ClassVar[str] = SPEC_TAG

    module_class: ModuleClass[type[RLModule] | None] = ModuleClass()
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    inference_only: bool = False
    learner_only: bool = False
    model_config: dict[str, Any] | DefaultModelConfig | None = None
    catalog_class: dataclasses.InitVar[Any] = None
    load_state_path: str | None = None

    def __post_init__(self, catalog_class: object) -> None:
        refuse_catalog(catalog_class)
        cls: Any = vars(self)["module_class"]
        if not isinstance(cls, str | None) and not (
            isinstance(cls, type) and issubclass(cls, rl_module.RLModule)
        ):
            raise ConfigurationError(
                f"RLModuleSpec(module_class=…): expected a subclass of RLModule, got {cls!r}"
            )

    def build(self, *, seed: int | None = None, module_id: str = "") -> Any:
        """Build the module.

        Args:
            seed: Seed of the run. The initial weights follow from it and ``module_id``, and torch's global random
                state is unchanged. None: they follow from the global random state.
            module_id: The module's id, for the seed and for error messages.

        Raises:
            ConfigurationError: A space is missing, or the default models have no such setting.
            UnsupportedSpaceError: If the default models cannot handle a space.
        """
        module_class = self.module_class or find_code(_DEFAULT_CLASS, CALLER)
        names = ("observation_space", "action_space", "inference_only", "learner_only", "model_config")
        check_takes(module_class.__init__, f"{module_class.__name__}.__init__", "self", by_name=names)
        with seeded(seed, module_id):
            try:
                module = module_class(**{name: getattr(self, name) for name in names})
            except Exception as error:
                self._explain(error, module_class, module_id)
                raise
        module.module_id = module_id
        if self.load_state_path is not None:
            module.restore_from_path(self.load_state_path)
        return module

    def _explain(self, error: Exception, module_class: type[RLModule], module_id: str) -> None:
        """Raise a clearer error if ``setup()`` failed because of a missing space; otherwise add a note to the error."""
        name = f"module {module_id!r}" if module_id else "module"
        missing = [key for key in ("action_space", "observation_space") if getattr(self, key) is None]
        if missing and isinstance(error, AttributeError | TypeError | ConfigurationError):
            raise ConfigurationError(
                f"{name} ({module_class.__name__}): its RLModuleSpec has no {' and no '.join(missing)}. Give "
                f"it with RLModuleSpec({missing[0]}=…), or in config.environment({missing[0]}=…)"
            ) from error
        if module_id:
            error.add_note(f"while building {name} ({module_class.__name__})")

    def update(self, other: RLModuleSpec, override: bool = True) -> None:
        """Update from another spec.

        Args:
            other: Another spec (or a MultiRLModuleSpec with a single one).
            override: Whether the other's settings take precedence; False fills unset fields only.
                ``model_config`` dicts are merged key by key either way.
        """
        for field in dataclasses.fields(RLModuleSpec):
            mine, theirs = vars(self)[field.name], vars(other)[field.name]
            if field.name == "model_config":
                if theirs is None or mine is None:
                    merged = mine if theirs is None else theirs
                else:
                    first, second = (mine, theirs) if override else (theirs, mine)
                    merged = {**model_config_to_dict(first), **model_config_to_dict(second)}
                self.model_config = merged
            elif theirs is not None and (mine is None or mine is False or (override and theirs is not False)):
                setattr(self, field.name, theirs)

    def get_model_config(self) -> dict[str, Any]:
        """Return ``model_config`` in the form that the module receives."""
        return model_config_to_dict(self.model_config)

    def copy(self) -> Self:
        """Return a copy that can be changed independently (spaces and settings are shared)."""
        return copy.copy(self)

    def as_multi_rl_module_spec(self) -> Any:
        """Return a MultiRLModuleSpec with this spec as ``"default_policy"``."""
        return find_code(_MULTI_CLASS, CALLER)(rl_module_specs={"default_policy": self})

    @classmethod
    def from_module(cls, module: RLModule) -> Self:
        """Return a spec that builds modules like this one (without the weights)."""
        return cls(
            module_class=type(module),
            observation_space=module.observation_space,
            action_space=module.action_space,
            inference_only=module.inference_only,
            learner_only=module.learner_only,
            model_config=module.model_config,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain values, with the class as ``"module:qualname"``.

        Raises:
            NotPlainError: A space is not one of Gymnasium's own.
            ConfigurationError: A DefaultModelConfig contains an initializer without a name.
        """
        return {
            "module_class": None if (cls := vars(self)["module_class"]) is None else class_name(cls),
            "observation_space": space_to_plain(self.observation_space),
            "action_space": space_to_plain(self.action_space),
            "inference_only": self.inference_only,
            "learner_only": self.learner_only,
            "model_config": None if self.model_config is None else self.get_model_config(),
            "load_state_path": None if self.load_state_path is None else str(Path(self.load_state_path)),
        }

    @classmethod
    def from_dict(
        cls,
        plain: Mapping[str, Any],
        *,
        module_class: type[RLModule] | None = None,
        trust: Trust | Collection[str] = (),
    ) -> Self:
        """Create a spec from the result of ``to_dict``.

        Args:
            plain: The plain values.
            module_class: The class to use; None: the class that `plain` names.
            trust: Packages whose classes `plain` may name, besides rlzmq's own.

        Raises:
            ConfigurationError: A key is unknown, or the class is not trusted, cannot be found or is not an RLModule.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for key in plain:
            if key not in known:
                raise ConfigurationError(f"RLModuleSpec has no field {key!r}.{did_you_mean(key, known)}")
        named = plain.get("module_class")
        if module_class is None and named is not None:
            module_class = find_code(named, Trust.of(trust), rl_module.RLModule)
        return cls(
            module_class=module_class,
            observation_space=space_from_plain(plain.get("observation_space")),
            action_space=space_from_plain(plain.get("action_space")),
            inference_only=bool(plain.get("inference_only", False)),
            learner_only=bool(plain.get("learner_only", False)),
            model_config=plain.get("model_config"),
            load_state_path=plain.get("load_state_path"),
        )


@contextlib.contextmanager
def seeded(seed: int | None, module_id: str) -> Iterator[None]:
    """Derive torch's (CPU) random state from the seed and the id in the block, and restore it afterwards."""
    if seed is None:
        yield
        return
    import torch

    with torch.random.fork_rng(devices=[]):
        # A module without a name is the one that single-agent code calls "default_policy".
        crc = zlib.crc32((module_id or "default_policy").encode())
        torch.manual_seed(derive_seed(seed, "module", crc))
        yield
