"""MultiRLModule: several modules by id, as used by learners and env runners."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, ClassVar, Self

import gymnasium as gym
from torch import nn

from rlzmq.config.plain import MULTI_SPEC_TAG
from rlzmq.core.class_names import class_from_name, class_name
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.modules.rl_module import RLModule, TorchRLModule
from rlzmq.modules.saving import restore_module, set_whole_state
from rlzmq.modules.spec import RLModuleSpec

__all__ = ["MultiRLModule", "MultiRLModuleSpec"]


class MultiRLModule(RLModule):
    """Modules by id. Forward passes run each module on its part of the batch.

    Args:
        rl_module_specs: Module id -> RLModuleSpec; ``setup()`` builds them.
        seed: See :meth:`RLModuleSpec.build`.
        observation_space, action_space, inference_only, learner_only, model_config: See RLModule. With
            ``inference_only``, every module is built inference-only, and learner-only modules are left out.

    Iteration yields the ids, in the order in which the modules were added. Subclasses that share networks between
    modules override ``setup()`` and the ``_forward*`` methods; the modules are in ``self._rl_modules``.
    """

    is_multi = True

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        *,
        inference_only: bool | None = None,
        learner_only: bool = False,
        model_config: Any = None,
        rl_module_specs: Mapping[str, RLModuleSpec] | None = None,
        seed: int | None = None,
    ) -> None:
        self.rl_module_specs: dict[str, RLModuleSpec] = dict(rl_module_specs or {})
        self._rl_modules: dict[str, Any] = {}
        self._seed = seed
        super().__init__(
            observation_space,
            action_space,
            inference_only=inference_only,
            learner_only=learner_only,
            model_config=model_config,
        )

    def setup(self) -> None:
        """Build the modules from ``rl_module_specs``."""
        for module_id, spec in self.rl_module_specs.items():
            if self.inference_only:
                if spec.learner_only:
                    continue
                if not spec.inference_only:
                    spec = spec.copy()
                    spec.inference_only = True
            self._put(module_id, spec.build(seed=self._seed, module_id=module_id))

    def _put(self, module_id: str, module: RLModule) -> None:
        if not isinstance(module, RLModule) and not hasattr(module, "unwrapped"):
            raise TypeError(f"module {module_id!r}: expected an RLModule, got {type(module).__name__}")
        inner = module.unwrapped()
        if not inner.module_id:
            inner.module_id = module_id
        self._rl_modules[module_id] = module
        self._is_stateful = None

    # -- modules by id -------------------------------------------------------------------------

    def add_module(self, module_id: str, module: RLModule, *, override: bool = False) -> None:
        """Add a module. Allowed at any time, also during training.

        Args:
            module_id: Id of the module.
            module: The built module.
            override: Whether to replace an existing module with this id.

        Raises:
            ValueError: The id is taken, or is not a non-empty string.
        """
        if not isinstance(module_id, str) or not module_id:
            raise ValueError(f"a module id is a non-empty string, got {module_id!r}")
        if module_id in self._rl_modules and not override:
            raise ValueError(f"there is a module {module_id!r} already; use override=True to replace it")
        self._put(module_id, module)
        if isinstance(module.unwrapped(), TorchRLModule):
            self.rl_module_specs[module_id] = RLModuleSpec.from_module(module)

    def remove_module(self, module_id: str, *, raise_err_if_not_found: bool = True) -> None:
        """Remove a module.

        Raises:
            KeyError: There is no module with this id (unless ``raise_err_if_not_found`` is False).
        """
        if module_id not in self._rl_modules:
            if raise_err_if_not_found:
                raise self._unknown(module_id)
            return
        del self._rl_modules[module_id]
        self.rl_module_specs.pop(module_id, None)
        self._is_stateful = None

    def foreach_module(
        self, func: Callable[..., Any], *, return_dict: bool = False, **kwargs: Any
    ) -> list[Any] | dict[str, Any]:
        """Call ``func(module_id, module, **kwargs)`` for every module; return the results as a list or by id."""
        results = {module_id: func(module_id, m, **kwargs) for module_id, m in self._rl_modules.items()}
        return results if return_dict else list(results.values())

    def keys(self) -> KeysView[str]:
        """Return the module ids."""
        return self._rl_modules.keys()

    def values(self) -> ValuesView[Any]:
        """Return the modules."""
        return self._rl_modules.values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of id and module."""
        return self._rl_modules.items()

    def get(self, module_id: str, default: Any = None) -> Any:
        """Return the module with this id, or ``default``."""
        return self._rl_modules.get(module_id, default)

    def __getitem__(self, module_id: str) -> Any:
        try:
            return self._rl_modules[module_id]
        except KeyError:
            raise self._unknown(module_id) from None

    def __contains__(self, module_id: object) -> bool:
        return module_id in self._rl_modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._rl_modules)

    def __len__(self) -> int:
        return len(self._rl_modules)

    def __bool__(self) -> bool:
        return True

    def _unknown(self, module_id: str) -> KeyError:
        return KeyError(f"no module {module_id!r}.{did_you_mean(module_id, self._rl_modules)}")

    # -- forward passes ------------------------------------------------------------------------

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_each("forward_inference", batch, kwargs)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_each("forward_exploration", batch, kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_each("forward_train", batch, kwargs)

    def _forward_each(self, method: str, batch: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        modules = self._rl_modules
        return {
            module_id: getattr(modules[module_id], method)(module_batch, **kwargs)
            for module_id, module_batch in batch.items()
            if module_id in modules
        }

    def forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return module id -> outputs for every module in the batch. Unknown ids are ignored."""
        return self._forward_inference(batch, **kwargs)

    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return module id -> outputs, like :meth:`forward_inference`."""
        return self._forward_exploration(batch, **kwargs)

    # -- facts and torch -----------------------------------------------------------------------

    def is_stateful(self) -> bool:
        """Return whether any module is stateful."""
        stateful = self._is_stateful
        if stateful is None:
            stateful = self._is_stateful = any(m.unwrapped().is_stateful() for m in self._rl_modules.values())
        return stateful

    def get_initial_state(self) -> dict[str, Any]:
        """Return module id -> initial state (``{}`` for stateless modules)."""
        return {module_id: m.unwrapped().get_initial_state() for module_id, m in self._rl_modules.items()}

    def as_multi_rl_module(self) -> Self:
        return self

    def _torch_modules(self) -> list[tuple[str, nn.Module]]:
        return [(mid, m) for mid, m in self._rl_modules.items() if isinstance(m, nn.Module)]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all modules, shared ones only once."""
        seen: set[int] = set()
        for _, module in self._torch_modules():
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield pairs of ``"module_id/parameter"`` and parameter."""
        for module_id, module in self._torch_modules():
            for name, parameter in module.named_parameters():
                yield f"{module_id}/{name}", parameter

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all modules, like ``torch.nn.Module.to``."""
        for _, module in self._torch_modules():
            module.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set training mode on all modules."""
        for _, module in self._torch_modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode on all modules."""
        return self.train(False)

    # -- state ---------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """Return module id -> weights as numpy arrays.

        Args:
            components: Module ids, or paths ``"module_id/parameter"``; None: all.
            not_components: Module ids or paths to leave out.
            inference_only: Whether to leave out learner-only modules and the parts that only learners need.
        """
        wanted, without = _by_module(components), _by_module(not_components) or {}
        state = {}
        for module_id, module in self._rl_modules.items():
            module = module.unwrapped()
            if (wanted is not None and module_id not in wanted) or without.get(module_id, True) is None:
                continue
            if inference_only and module.learner_only:
                continue
            state[module_id] = module.get_state(
                None if wanted is None else wanted[module_id],
                not_components=without.get(module_id),
                inference_only=inference_only,
            )
        return state

    def set_state(self, state: Mapping[str, Any], *, strict: bool | None = None) -> None:
        """Load the weights of the modules in ``state``. Unknown ids are ignored.

        Args:
            state: Module id -> argument of that module's `RLModule.set_state`.
            strict: See `TorchRLModule.set_state`.
        """
        for module_id, module_state in state.items():
            if module_id in self._rl_modules:
                set_whole_state(self._rl_modules[module_id].unwrapped(), module_state, strict=strict)


def _by_module(paths: str | Collection[str] | None) -> dict[str, list[str] | None] | None:
    """Return module id -> its parameters' names, or None for the whole module."""
    if paths is None:
        return None
    grouped: dict[str, list[str] | None] = {}
    for path in (paths,) if isinstance(paths, str) else paths:
        module_id, slash, name = path.partition("/")
        if not slash:
            grouped[module_id] = None
        elif (names := grouped.setdefault(module_id, [])) is not None:
            names.append(name)
    return grouped


class MultiRLModuleSpec:
    """The description from which a MultiRLModule is built.

    Args:
        rl_module_specs: Module id -> spec.
        multi_rl_module_class: A subclass of MultiRLModule.
        observation_space, action_space: Passed to the class.
        inference_only: Whether to build every module inference-only and leave learner-only ones out; None: as each
            spec defines.
        model_config: Passed to the class, for subclasses that use it.
        load_state_path: Checkpoint of a MultiRLModule to load weights from.
        modules_to_load: Ids of the modules whose weights are loaded; None: all modules that both have.
    """

    plain_tag: ClassVar[str] = MULTI_SPEC_TAG

    def __init__(
        self,
        rl_module_specs: Mapping[str, RLModuleSpec] | None = None,
        *,
        multi_rl_module_class: type[MultiRLModule] = MultiRLModule,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        inference_only: bool | None = None,
        model_config: Any = None,
        load_state_path: str | None = None,
        modules_to_load: Collection[str] | None = None,
    ) -> None:
        if not (isinstance(multi_rl_module_class, type) and issubclass(multi_rl_module_class, MultiRLModule)):
            raise ConfigurationError(
                f"multi_rl_module_class: expected a subclass of MultiRLModule, got {multi_rl_module_class!r}"
            )
        self.multi_rl_module_class = multi_rl_module_class
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only = inference_only
        self.model_config = model_config
        self.load_state_path = load_state_path
        self.modules_to_load = modules_to_load
        self.rl_module_specs: dict[str, RLModuleSpec] = {}
        self.add_modules(rl_module_specs or {})

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
    def from_module(cls, module: MultiRLModule) -> Self:
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
            "multi_rl_module_class": class_name(self.multi_rl_module_class),
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
        multi_rl_module_class: type[MultiRLModule] | None = None,
        module_classes: Mapping[str, type[RLModule]] | None = None,
    ) -> Self:
        """Create a spec from the result of ``to_dict``. Classes may be given instead of being imported by name."""
        if multi_rl_module_class is None:
            named = plain.get("multi_rl_module_class", class_name(MultiRLModule))
            multi_rl_module_class = class_from_name(named, MultiRLModule)
        outer = RLModuleSpec.from_dict(
            {key: plain.get(key) for key in ("observation_space", "action_space", "model_config")}
        )
        classes = module_classes or {}
        return cls(
            {
                module_id: RLModuleSpec.from_dict(spec, module_class=classes.get(module_id))
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
