"""MultiRLModule: several modules by id, as used by learners and env runners."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Self

import gymnasium as gym
from torch import nn

from rlzmq.core.checkpoint import chosen_parts
from rlzmq.core.synonyms import did_you_mean
from rlzmq.modules.rl_module import RLModule, TorchRLModule
from rlzmq.modules.saving import set_whole_state
from rlzmq.modules.spec import RLModuleSpec

__all__ = ["MultiRLModule"]


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
        if not isinstance(module, RLModule):
            raise TypeError(f"module {module_id!r}: expected an RLModule, got {type(module).__name__}")
        if not module.module_id:
            module.module_id = module_id
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
        if isinstance(module, TorchRLModule):
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

    def _forward_inference(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return self._forward_each("forward_inference", batch, kwargs)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_each("forward_exploration", batch, kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
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
            stateful = self._is_stateful = any(m.is_stateful() for m in self._rl_modules.values())
        return stateful

    def get_initial_state(self) -> dict[str, Any]:
        """Return module id -> initial state (``{}`` for stateless modules)."""
        return {module_id: m.get_initial_state() for module_id, m in self._rl_modules.items()}

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
        state = {}
        chosen = chosen_parts(self._rl_modules, components, not_components)
        for module_id, (inside, outside) in chosen.items():
            module = self._rl_modules[module_id]
            if not (inference_only and module.learner_only):
                state[module_id] = module.get_state(
                    inside, not_components=outside, inference_only=inference_only
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
                set_whole_state(self._rl_modules[module_id], module_state, strict=strict)
