"""RLModule: a neural network that maps observations to actions and loss inputs.

A custom module in ten lines::

    class MyModule(TorchRLModule):
        def setup(self):
            self.net = torch.nn.Sequential(
                torch.nn.Linear(self.observation_space.shape[0], self.model_config["hidden"]),
                torch.nn.ReLU(),
                torch.nn.Linear(self.model_config["hidden"], self.action_space.n),
            )

        def _forward(self, batch, **kwargs):
            return {Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS])}

The public ``forward_*`` methods are called once per vector step. They add only a few cheap checks (below 1 µs together)
to the private ``_forward*`` methods.

What else a module offers is an interface, such as `ValueFunctionAPI`. A module lists its interfaces as additional base
classes, ``class MyModule(TorchRLModule, ValueFunctionAPI)``. A learner declares those that it needs, and reports a
missing one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.base_config import BaseConfig
from rlzmq.config.model_config import model_config_to_dict, refuse_catalog
from rlzmq.core.signatures import TellsUncalled, check_takes
from rlzmq.core.trust import CALLER, find_code
from rlzmq.episodes.columns import Columns
from rlzmq.modules.distributions import Distribution, action_dist_cls_for
from rlzmq.modules.saving import load_module, restore_module, save_module

__all__ = [
    "InferenceOnlyAPI",
    "QNetAPI",
    "RLModule",
    "SelfSupervisedLossAPI",
    "TargetNetworkAPI",
    "TorchRLModule",
    "ValueFunctionAPI",
]


class ValueFunctionAPI(ABC):
    """A module with state values, for PPO, IMPALA, APPO and MARWIL."""

    @abstractmethod
    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return the state values of a train batch.

        Args:
            batch: The train batch, with at least ``obs`` (and ``state_in`` if stateful).
            embeddings: The column ``embeddings`` of the module's own forward pass, which saves computing it again.

        Returns:
            Float ``[B]`` (``[B, T]`` if stateful), without a trailing dimension of 1.
        """


class InferenceOnlyAPI(ABC):
    """A module with parts that only learners need. Env runners build and receive it without them."""

    @abstractmethod
    def get_non_inference_attributes(self) -> list[str]:
        """Return attributes that acting does not need; dotted paths are allowed: ``["vf", "encoder.critic"]``.

        They are deleted after ``setup()`` if ``inference_only``, and left out of ``get_state(inference_only=True)``.
        Names that do not exist (yet) are ignored.
        """


class TargetNetworkAPI(ABC):
    """A module with target networks, for DQN, SAC and APPO.

    Attributes:
        networks_with_target: Names of attributes that have a target network, possibly (). That of ``qfs`` is
            ``target_qfs``.
    """

    networks_with_target: ClassVar[Sequence[str] | None] = None

    def make_target_networks(self) -> None:
        """Create the target networks as copies, at the end of `setup`."""
        for name in self.networks_with_target or ():
            setattr(self, f"target_{name}", copy.deepcopy(getattr(self, name)).requires_grad_(False))

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs ``(main network, target network)`` of the same architecture.

        Raises:
            NotImplementedError: The class names no networks.
        """
        if self.networks_with_target is None:
            raise NotImplementedError(
                f"{type(self).__name__}: set networks_with_target, or override this method."
            )
        return [(getattr(self, name), getattr(self, f"target_{name}")) for name in self.networks_with_target]

    @abstractmethod
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> Any:
        """Compute the target networks' outputs on a train batch, without gradients."""


class QNetAPI(ABC):
    """A module with action values, for DQN."""

    @abstractmethod
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the action values of a batch with at least ``obs`` (and ``state_in`` if stateful).

        Returns:
            ``"qf_preds"``: float ``[B, num_actions]``; distributional modules add ``"atoms"``
            ``[num_atoms]``, ``"qf_logits"`` and ``"qf_probs"`` ``[B, num_actions, num_atoms]``. For stateful modules
            these have a time axis after B, and ``state_out`` is included.
        """

    def rank_actions(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return outputs whose ``qf_preds`` rank each row's actions as their values do; by default the values.

        A module may leave out what all actions of a row share.
        """
        return self.compute_q_values(batch)

    def compute_advantage_distribution(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the outputs of a dueling module's advantage stream, with the keys of ``compute_q_values``."""
        raise NotImplementedError(f"{type(self).__name__} has no advantage stream")


class SelfSupervisedLossAPI(ABC):
    """A module that defines its own loss, e.g. a curiosity model. The learner uses it instead of the learner's loss."""

    @abstractmethod
    def compute_self_supervised_loss(
        self,
        *,
        learner: Any,
        module_id: str,
        config: BaseConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """Compute the loss of one minibatch.

        Args:
            learner: The calling Learner.
            module_id: This module's id.
            config: The AlgorithmConfig with this module's overrides.
            batch: The module's minibatch.
            fwd_out: The output of ``forward_train`` for the minibatch.

        Returns:
            A scalar tensor, or a dict of named scalar tensors whose ``total_loss`` is differentiated.
        """


# Named by a string, not imported, since its file imports this one.
_MULTI_CLASS = "rlzmq.modules.multi_rl_module:MultiRLModule"
_ACTION_COLUMNS = (Columns.ACTION_DIST_INPUTS, Columns.ACTIONS)


class RLModule(TellsUncalled):
    """Base class of all modules, single and multi.

    Args:
        observation_space: One agent's observation space after the env-to-module pipeline.
        action_space: One agent's action space.
        inference_only: Whether to build only the parts that acting needs (see :class:`InferenceOnlyAPI`).
        learner_only: Whether env runners do not build the module.
        model_config: Settings for ``setup()``, a dict or a DefaultModelConfig. ``self.model_config`` is the resulting
            dict.
        catalog_class: Has no effect: there are no catalogs.

    Attributes:
        action_dist_cls: The distribution class of ``action_dist_inputs``; set it in ``setup()``. None: chosen by the
            action space.
        is_multi: Whether it is a MultiRLModule.
        module_id: Its id in its MultiRLModule, for error messages; "" if there is none.
        exploration_seed: Seed for what the module itself draws in ``_forward_exploration``, e.g. noise. It follows from
            the run's seed and is different in each env runner and for each module.
    """

    framework = "torch"
    training: bool = True
    is_multi: ClassVar[bool] = False
    action_dist_cls: type[Distribution] | None = None

    _not_called: ClassVar[Mapping[str, str]] = {
        "as_multi_rl_module": "override MultiRLModule, and set MultiRLModuleSpec(multi_rl_module_class=…)",
        "compile": "set framework(torch_compile_learner=True)",
        "unwrapped": "there are no wrappers: a MultiRLModule holds the modules themselves",
    }

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        *,
        inference_only: bool | None = None,
        learner_only: bool = False,
        model_config: Any = None,
        catalog_class: Any = None,
    ) -> None:
        refuse_catalog(catalog_class)
        if inference_only and learner_only:
            raise ValueError("a module cannot be both inference_only and learner_only")
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only: bool = bool(inference_only)
        self.learner_only = learner_only
        self.model_config: dict[str, Any] = model_config_to_dict(model_config)
        self.module_id = ""
        self.exploration_seed = 0
        self._is_stateful: bool | None = None
        passes = ("_forward_inference", "_forward_exploration", "_forward_train")
        calls_forward = any(getattr(type(self), name) is getattr(RLModule, name) for name in passes)
        own_exploration = type(self)._forward_exploration is not RLModule._forward_exploration
        explores = "_forward_exploration" if own_exploration else "_forward"
        for name in ("_forward", *passes) if calls_forward else passes:
            by_name = ("t",) if name == explores else ()
            check_takes(getattr(self, name), f"{type(self).__name__}.{name}", "batch", by_name=by_name)
        self.setup()

    # -- to override ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Create the networks. Called once, at the end of the constructor."""

    def get_initial_state(self) -> Any:
        """Return the state of a new episode: a tree of tensors or arrays without batch dimension.

        If it is not empty, the module is stateful: it then gets ``batch["state_in"]`` (``[B, ...]``) and observations
        with a time dimension (``[B, T, ...]``), and must return ``state_out`` (``[B, ...]``).
        """
        return {}

    def _forward(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Run the forward pass for all purposes, unless one of the three methods below is overridden."""
        raise NotImplementedError(
            f"{self.describe()} defines no forward pass: override _forward(batch, **kwargs), or "
            "_forward_inference, _forward_exploration and _forward_train"
        )

    def _forward_inference(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Compute the outputs for greedy acting (evaluation, ``explore=False``)."""
        return self._forward(batch, **kwargs)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs for exploration. ``kwargs`` may contain ``t``, the lifetime env steps."""
        return self._forward(batch, **kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Compute the loss inputs, with gradients."""
        return self._forward(batch, **kwargs)

    def get_inference_action_dist_cls(self) -> type[Distribution]:
        """Return the distribution class of ``action_dist_inputs`` for greedy acting.

        ``get_exploration_action_dist_cls`` and ``get_train_action_dist_cls`` return those for exploration and for the
        loss. By default, all are `action_dist_cls`, or the default of the action space.
        """
        if self.action_dist_cls is not None:
            return self.action_dist_cls
        cached: type[Distribution] | None = self.__dict__.get("_action_dist_cls")
        if cached is None:
            cached = action_dist_cls_for(self.action_space, where=self.describe())
            self.__dict__["_action_dist_cls"] = cached
        return cached

    get_exploration_action_dist_cls = get_inference_action_dist_cls
    get_train_action_dist_cls = get_inference_action_dist_cls

    # -- forward passes ------------------------------------------------------------------------

    def forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs for greedy acting, without gradients.

        Args:
            batch: Column -> tensor ``[B, ...]`` (``[B, T, ...]`` if stateful) or a tree of tensors.

        Returns:
            Column -> tensor: ``action_dist_inputs`` or ``actions``, and ``state_out`` if stateful.

        Raises:
            ValueError: A required column is missing; the text names the module and the column.
        """
        return self.check_outputs(self._forward_inference(batch, **kwargs), "_forward_inference")

    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs for exploration, without gradients, like :meth:`forward_inference`."""
        return self.check_outputs(self._forward_exploration(batch, **kwargs), "_forward_exploration")

    def forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compute the loss inputs, with gradients.

        Raises:
            RuntimeError: The module was built inference_only.
        """
        if not self.training:
            self.train()
        if self.inference_only:
            raise RuntimeError(
                f"{self.describe()} was built with inference_only=True and cannot train: build it without, "
                "or call forward_inference or forward_exploration"
            )
        return self._forward_train(batch, **kwargs)

    def check_outputs(self, outputs: dict[str, Any], method: str) -> dict[str, Any]:
        """Check that the outputs of an acting forward pass contain the columns for acting, and return them.

        ``forward_inference`` and ``forward_exploration`` call this method. Call it after using the ``_forward*``
        methods directly. A module without action space may return any columns.

        Args:
            outputs: The return value of ``method``.
            method: ``"_forward_inference"`` or ``"_forward_exploration"``, for the error message.

        Raises:
            TypeError: The outputs are not a dict.
            ValueError: Actions (or the state of a stateful module) are missing.
        """
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            raise TypeError(
                f"{self.describe()}: {method} must return a dict of columns, got {type(outputs).__name__}"
            )
        if (
            Columns.ACTION_DIST_INPUTS not in outputs
            and Columns.ACTIONS not in outputs
            and self.action_space is not None
        ):
            raise self._missing_output(outputs, _ACTION_COLUMNS, method)
        if Columns.STATE_OUT not in outputs and self.is_stateful():
            raise self._missing_output(outputs, (Columns.STATE_OUT,), method)
        return outputs

    def require_output(self, outputs: Mapping[str, Any], column: str, method: str = "_forward_train") -> Any:
        """Return one column of a forward pass's outputs.

        Raises:
            ValueError: The column is missing; the text names the module, the column and the existing columns.
        """
        if column not in outputs:
            raise self._missing_output(outputs, (column,), method)
        return outputs[column]

    def _missing_output(
        self, outputs: Mapping[str, Any], columns: tuple[str, ...], method: str
    ) -> ValueError:
        wanted = " or ".join(repr(column) for column in columns)
        got = ", ".join(repr(name) for name in outputs) or "an empty dict"
        return ValueError(
            f"{self.describe()}: {method} must return the column {wanted}, got {got}. "
            f"Return it from {type(self).__name__}.{method} or ._forward"
        )

    # -- facts ---------------------------------------------------------------------------------

    def is_stateful(self) -> bool:
        """Return whether the initial state is not empty. Calls ``get_initial_state`` once."""
        stateful = self._is_stateful
        if stateful is None:
            state = self.get_initial_state()
            is_array = isinstance(state, torch.Tensor | np.ndarray)
            stateful = self._is_stateful = is_array or bool(state)
        return stateful

    def describe(self) -> str:
        """Return the module's name for error messages: its id, if it has one, and its class."""
        name = f"module {self.module_id!r}" if self.module_id else "module"
        return f"{name} ({type(self).__name__})"

    def train(self, mode: bool = True) -> Self:
        """Set training mode, like ``torch.nn.Module.train``; a module without networks has none."""
        return self

    def unwrapped(self) -> Self:
        """Return the module itself: RLlib's learners wrap modules, these do not."""
        return self

    def as_multi_rl_module(self) -> Any:
        """Return a MultiRLModule that holds this module as ``"default_policy"``."""
        multi = find_code(_MULTI_CLASS, CALLER)(inference_only=self.inference_only)
        multi.add_module("default_policy", self)
        return multi

    # -- state ---------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """Return the weights as a dict of numpy arrays (copies)."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load weights from :meth:`get_state`."""

    def save_to_path(self, path: str | Path) -> Path:
        """Write the module as a checkpoint directory, atomically, without pickle.

        Args:
            path: The directory. An existing one is replaced.

        Returns:
            Its absolute path.
        """
        return save_module(self, path)

    def restore_from_path(self, path: str | Path) -> None:
        """Load the weights of a checkpoint of the same architecture.

        Args:
            path: See :meth:`from_checkpoint`.

        Raises:
            CheckpointError: There is no checkpoint, or it is torn or altered.
            ValueError: The weights do not fit.
        """
        restore_module(self, path)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        module_class: type[RLModule] | Mapping[str, type[RLModule]] | None = None,
        trust: Collection[str] = (),
    ) -> Self:
        """Build the module of a checkpoint, with its weights.

        Args:
            path: A result of :meth:`save_to_path`; an algorithm's checkpoint; or one module of it,
                ``checkpoint/learner_group/learner/rl_module/MODULE_ID``.
            module_class: The class to build, or those of several modules by their ids. None: the class on which the
                method is called, or, if that is RLModule or TorchRLModule, the class that the checkpoint names.
            trust: Packages whose classes the checkpoint may name, besides rlzmq's own. One that you saved on this
                machine may name any.

        Raises:
            CheckpointError: If there is no checkpoint, or it is torn or altered.
            CheckpointError: The class that the checkpoint names is not trusted, cannot be found, or is no RLModule.
        """
        if module_class is None and cls not in (RLModule, TorchRLModule):
            module_class = cls
        module: Self = load_module(path, module_class, trust)
        return module


class TorchRLModule(nn.Module, RLModule):
    """An RLModule that is a ``torch.nn.Module``. Its parameters are trained and sent.

    ``forward_inference`` and ``forward_exploration`` run in eval mode and without gradients. If the module is already
    in eval mode and under ``torch.inference_mode()``, this costs nothing. Otherwise the mode is switched and restored
    around the call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        RLModule.__init__(self, *args, **kwargs)
        if self.inference_only and isinstance(self, InferenceOnlyAPI):
            for path in self.get_non_inference_attributes():
                _delete_attribute(self, path)

    def forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if self.training or torch.is_grad_enabled():
            return self._act_switched(self._forward_inference, "_forward_inference", batch, kwargs)
        return self.check_outputs(self._forward_inference(batch, **kwargs), "_forward_inference")

    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if self.training or torch.is_grad_enabled():
            return self._act_switched(self._forward_exploration, "_forward_exploration", batch, kwargs)
        return self.check_outputs(self._forward_exploration(batch, **kwargs), "_forward_exploration")

    def _act_switched(self, forward: Any, method: str, batch: Any, kwargs: Any) -> dict[str, Any]:
        was_training = self.training
        if was_training:
            self.eval()
        try:
            with torch.no_grad():
                return self.check_outputs(forward(batch, **kwargs), method)
        finally:
            if was_training:
                self.train()

    def forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Call :meth:`forward_train`, so that tools of torch can call ``module(batch)``."""
        return self.forward_train(batch, **kwargs)

    # -- state ---------------------------------------------------------------------------------

    def inference_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state dict without the parts that only learners need (by reference, in the module's order)."""
        state: dict[str, torch.Tensor] = self.state_dict(keep_vars=True)
        skipped = self._non_inference_prefixes()
        if not skipped:
            return state
        return {name: value for name, value in state.items() if not _is_under(name, skipped)}

    def _non_inference_prefixes(self) -> tuple[str, ...]:
        if not isinstance(self, InferenceOnlyAPI):
            return ()
        return tuple(self.get_non_inference_attributes())

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, np.ndarray]:
        """Return the weights as numpy arrays (copies).

        Args:
            components: Names of parameters, or of attributes that contain them, to include; None: all.
            not_components: Names to leave out.
            inference_only: Whether to leave out the parts that only learners need.
        """
        tensors = self.inference_state_dict() if inference_only else self.state_dict(keep_vars=True)
        only = None if components is None else _as_tuple(components)
        without = _as_tuple(not_components)
        return {
            name: _to_numpy(tensor)
            for name, tensor in tensors.items()
            if (only is None or _is_under(name, only)) and not (without and _is_under(name, without))
        }

    def set_state(self, state: Mapping[str, Any], *, strict: bool | None = None) -> None:
        """Load weights.

        The parts that only learners need may be missing or superfluous, so full and inference-only modules of one
        class can exchange states. Target networks that the state lacks become copies of their trained networks in it.

        Args:
            state: Parameter name -> array or tensor.
            strict: True: all names must exist, and no unknown ones. None: the same for inference-only modules; other
                modules keep the weights that a partial state (``get_state("pi")``) lacks. False: load the names that
                fit.

        Raises:
            ValueError: A parameter is missing, unknown, or has another shape; the text names it. No weights were
                loaded.
        """
        copies = {
            target + name.removeprefix(main): value
            for main, target in self.targets_missing_in(state).items()
            for name, value in state.items()
            if _is_under(name, (main,))
        }
        state = {**state, **copies}
        own = self.state_dict(keep_vars=True)
        optional = self._non_inference_prefixes()
        missing = [name for name in own if name not in state and not _is_under(name, optional)]
        unknown = [name for name in state if name not in own and not _is_under(name, optional)]
        if strict is None and not self.inference_only:
            missing = []
        if strict is not False and (missing or unknown):
            raise ValueError(
                f"{self.describe()}: the state does not fit; missing {_listed(missing)}, "
                f"unknown {_listed(unknown)}. Was it saved by a module of another architecture?"
            )
        pairs = []
        for name, target in own.items():
            if name not in state:
                continue
            source = torch.as_tensor(state[name])
            if source.shape != target.shape:
                raise ValueError(
                    f"{self.describe()}: parameter {name!r} expects shape {tuple(target.shape)}, "
                    f"got {tuple(source.shape)}"
                )
            pairs.append((target, source))
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)

    def targets_missing_in(self, state: Collection[str]) -> dict[str, str]:
        """Return trained network → target network, by attribute, of those of which a state has only the trained one.

        Args:
            state: A state, or the names of its parameters.
        """
        if self.inference_only or not isinstance(self, TargetNetworkAPI):
            return {}
        names = {id(module): name for name, module in self.named_modules()}
        pairs = {names.get(id(main)): names.get(id(copy)) for main, copy in self.get_target_network_pairs()}
        return {
            main: copy
            for main, copy in pairs.items()
            if main
            and copy
            and [any(_is_under(n, (part,)) for n in state) for part in (main, copy)] == [True, False]
        }


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:  # numpy lacks this type; float32 holds all its values
        tensor = tensor.float()
    return tensor.numpy().copy()


def _as_tuple(names: str | Collection[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def _is_under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _delete_attribute(owner: object, path: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        owner = getattr(owner, name, None)
        if owner is None:
            return
    if hasattr(owner, last):
        delattr(owner, last)
