"""LearnerBase: a learner's modules, optimizers, counters, and their state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpointable import Checkpointable
from rlzmq.core.names import ALL_MODULES, LEARNER_PATH
from rlzmq.core.seeding import derive_seed
from rlzmq.core.suggest import did_you_mean
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.learners.compiling import LearnerCompiler
from rlzmq.learners.mixed_precision import MixedPrecision
from rlzmq.learners.optimizers import DEFAULT_OPTIMIZER, OptimizerRegistry, make_adam
from rlzmq.learners.sources import BatchSource, FreshBatch
from rlzmq.modules.apis import SelfSupervisedLossAPI, ValueFunctionAPI
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.output_check import check_training_outputs
from rlzmq.modules.saving import read_module_states
from rlzmq.modules.structure import StructureCache, parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["LearnerBase"]

_COMPONENTS = (
    "rl_module",
    "optimizer",
    "weights_seq_no",
    "counters",
    "learner_connector",
    "metrics",
    "random",
    "extra",
    "source",
)
_COUNTERS = (
    "num_gradient_updates_lifetime",
    "num_env_steps_trained_lifetime",
    "num_env_steps_of_all_ranks_lifetime",
    "num_module_steps_trained_lifetime",
)
_OTHER_ALGORITHM = (
    ". Was it saved by another algorithm? Its weights alone are the component 'rl_module' (of an algorithm: "
    "'learner_group/learner/rl_module')."
)


class LearnerBase(Checkpointable):
    """The part of a Learner that owns its state. For its use, see `rlzmq.learners.learner.Learner`."""

    checkpoint_name = LEARNER_PATH

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return the interfaces that every trained module must implement, classes of `rlzmq.modules.apis`."""
        return []

    def __init__(
        self,
        *,
        config: BaseConfig,
        module_spec: Any = None,
        module: Any = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if (module_spec is None) == (module is None):
            raise ValueError("Learner: expected either module_spec or module, got both or neither.")
        self.config: BaseConfig = config
        self.rank = rank
        self.num_ranks = num_ranks
        self.module: Any = None
        self.weights_seq_no: int = 0
        self.num_gradient_updates_lifetime: int = 0
        self.num_env_steps_trained_lifetime: int = 0
        self.num_env_steps_of_all_ranks_lifetime: int = 0
        self.num_module_steps_trained_lifetime: dict[str, int] = {}
        self.device: torch.device = _device_for(config, rank)
        self._module_spec = module_spec
        self._given_module = module
        self._optimizers = OptimizerRegistry()
        self._module_configs: dict[str, BaseConfig] = {}
        self._policies_to_train = getattr(config, "policies_to_train", None)
        seed = getattr(config, "seed", None)
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        self._learner_connector: Any = None
        self.source: BatchSource = self.make_source()
        self._parameters = StructureCache(
            lambda modules: [[(p, p.numel()) for p in self.get_parameters(module)] for module in modules]
        )
        self._compiler: LearnerCompiler | None = None
        self._mixed_precision: MixedPrecision | None = None

    # -- building ----------------------------------------------------------------------------------

    def build(self) -> None:
        """Create the module, the learner connector and the optimizers. Idempotent.

        The initial weights depend only on ``config.seed`` and are equal on all ranks. torch's global random state is
        not changed.

        Raises:
            ConfigurationError: A module cannot be built, or lacks what this learner needs.
        """
        if self.module is not None:
            return
        if self._given_module is not None:
            self.module = self._given_module.as_multi_rl_module()
        else:
            spec = self._module_spec.as_multi_rl_module_spec()
            self.module = spec.build(seed=getattr(self.config, "seed", None))
        self.module.to(self.device)
        if self._setting("torch_compile_learner", False):
            self._compiler = LearnerCompiler(self.config, self.device)
        if (amp_dtype := self._setting("torch_amp_dtype", None)) is not None:
            self._mixed_precision = MixedPrecision(amp_dtype, self.device)
        observation_space, action_space = self._connector_spaces()
        self._learner_connector = self.make_learner_connector(observation_space, action_space)
        for module_id in self.module:
            self._prepare_module(module_id)
        self.configure_optimizers()

    def make_source(self) -> BatchSource:
        """Return this rank's batch source; by default, each fresh step is trained once. Algorithms override this."""
        return FreshBatch()

    def make_learner_connector(self, observation_space: Any, action_space: Any) -> Any:
        """Return the config's learner pipeline. Algorithms that add pieces extend this."""
        return self.config.build_learner_connector(observation_space, action_space, self.device)

    def _connector_spaces(self) -> tuple[Any, Any]:
        if len(self.module) == 1 and DEFAULT_MODULE_ID in self.module:
            only = self.module[DEFAULT_MODULE_ID].unwrapped()
            return only.observation_space, only.action_space
        return getattr(self.config, "observation_space", None), getattr(self.config, "action_space", None)

    @classmethod
    def check_module(cls, module_id: str, module: Any, config: BaseConfig) -> None:
        """Check that learners of this class can train a module. Also called before a module is added to a run.

        Args:
            module_id: The module's id.
            module: The RLModule.
            config: The run's config.

        Raises:
            TypeError: The module lacks an interface of `rl_module_required_apis`.
            ConfigurationError: The config's settings do not fit the module.
        """
        if isinstance(module, SelfSupervisedLossAPI) or not _is_trainable(module):
            return
        missing = [api.__name__ for api in cls.rl_module_required_apis() if not isinstance(module, api)]
        if missing:
            raise TypeError(
                f"{cls.__name__} needs module {module_id!r} ({type(module).__name__}) to be a "
                f"{' and a '.join(missing)}: add the mix-in to its base classes, "
                f"class {type(module).__name__}(TorchRLModule, {', '.join(missing)})."
            )

    def _prepare_module(self, module_id: str) -> None:
        module = self.module[module_id].unwrapped()
        self.check_module(module_id, module, self.config)
        # Shares nothing with others.
        is_alone = type(self.module)._forward_train is MultiRLModule._forward_train
        if is_alone and not isinstance(module, SelfSupervisedLossAPI) and _is_trainable(module):
            check_training_outputs(module, with_values=ValueFunctionAPI in self.rl_module_required_apis())
        if self._compiler is not None and not self._compiler.compiles_complete_update:
            self._compiler.compile_module(module)
        get_config = getattr(self.config, "get_config_for_module", None)
        self._module_configs[module_id] = self.config if get_config is None else get_config(module_id)

    def _num_parameters(self) -> dict[str, tuple[int, int]]:
        """Return module id → numbers of trainable and other parameters."""
        modules = self.module
        of_modules = self._parameters.of(module.unwrapped() for module in modules.values())
        numbers: dict[str, tuple[int, int]] = {}
        for module_id, parameters in zip(modules.keys(), of_modules, strict=True):
            num_trainable = num_fixed = 0
            for parameter, size in parameters:
                if parameter.requires_grad:
                    num_trainable += size
                else:
                    num_fixed += size
            numbers[module_id] = num_trainable, num_fixed
        return numbers

    def config_for_module(self, module_id: str) -> BaseConfig:
        """Return the config with the module's own overrides."""
        return self._module_configs[module_id]

    def configure_optimizers(self) -> None:
        """Register all optimizers after the modules are built; by default one per module."""
        for module_id in self.module:
            self.configure_optimizers_for_module(module_id, self._module_configs[module_id])

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the module's optimizers; by default one Adam for all its parameters, at ``config.lr``.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
        """
        parameters = [p for p in self.get_parameters(self.module[module_id]) if p.requires_grad]
        if parameters:
            self.register_optimizer(
                module_id=module_id,
                optimizer=make_adam(parameters, 0.0),
                params=parameters,
                lr_or_lr_schedule=config.lr,
            )

    def register_optimizer(
        self,
        *,
        module_id: str = ALL_MODULES,
        optimizer_name: str = DEFAULT_OPTIMIZER,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        lr_or_lr_schedule: float | Sequence[Sequence[float]] | None = None,
        every: int = 1,
    ) -> None:
        """Add an optimizer; call it from `configure_optimizers_for_module`.

        Args:
            module_id: The module whose updates step the optimizer; by default, the optimizer steps with every
                minibatch.
            optimizer_name: Unique within the module.
            optimizer: A torch optimizer.
            params: The optimizer's parameters.
            lr_or_lr_schedule: A number, or ``[(0, v0), (t1, v1), …]`` over lifetime env steps; None: keep the
                optimizer's own learning rate.
            every: The optimizer steps with every so many minibatches only, from the first on (delayed updates, as
                TD3's). A loss for it may be left out of the others: `steps_optimizer` says which they are.

        Raises:
            ValueError: The name is taken, or `params` are not the optimizer's parameters.
            ConfigurationError: The schedule is malformed.
        """
        self._optimizers.register(module_id, optimizer_name, optimizer, params, lr_or_lr_schedule, every)

    def rl_module_is_compatible(self, module: Any) -> bool:
        """Return whether the module has parameters to train: whether it is a ``torch.nn.Module``."""
        return isinstance(module, torch.nn.Module)

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE_ID, optimizer_name: str = DEFAULT_OPTIMIZER
    ) -> Optimizer:
        """Return one of the module's optimizers.

        Raises:
            KeyError: There is no optimizer of this name.
        """
        return self._optimizers.get(module_id, optimizer_name)

    def get_optimizers_for_module(self, module_id: str = ALL_MODULES) -> list[tuple[str, Optimizer]]:
        """Return the module's optimizers as (name, optimizer)."""
        return [(entry.name, entry.optimizer) for entry in self._optimizers.of_module(module_id)]

    def get_parameters(self, module: Any) -> list[Tensor]:
        """Return the parameters of one module; [] for a plain RLModule, which has no networks."""
        module = module.unwrapped()
        return list(module.parameters()) if isinstance(module, nn.Module) else []

    def get_param_ref(self, param: Tensor) -> Tensor:
        """Return the key of a parameter in gradient dicts: the parameter itself."""
        return param

    def filter_param_dict_for_optimizer(
        self, param_dict: Mapping[Tensor, Any], optimizer: Optimizer
    ) -> dict[Tensor, Any]:
        """Return the entries of a parameter → value dict that belong to one optimizer."""
        return {
            p: param_dict[p] for group in optimizer.param_groups for p in group["params"] if p in param_dict
        }

    def add_module(
        self,
        *,
        module_id: str,
        module_spec: Any,
        config_overrides: Mapping[str, Any] | None = None,
        new_should_module_be_updated: Any = None,
    ) -> None:
        """Add a module with its optimizers. All ranks must do this between the same two updates.

        Args:
            module_id: The module's id, which must be new.
            module_spec: Its RLModuleSpec.
            config_overrides: Settings for this module only.
            new_should_module_be_updated: New ``policies_to_train``: ids, or ``fn(module_id, batch) -> bool``.

        Raises:
            ValueError: A module with this id exists.
        """
        self._check_built()
        if module_id in self.module:
            raise ValueError(
                f"the Learner already has a module {module_id!r}: remove it first, or use another id."
            )
        module = module_spec.build(seed=self._seed, module_id=module_id)
        self.module.add_module(module_id, module.to(self.device))
        if config_overrides:
            overrides = dict(self.config.algorithm_config_overrides_per_module)
            self.config = self.config.copy(copy_frozen=False)
            self.config.algorithm_config_overrides_per_module = overrides | {
                module_id: dict(config_overrides)
            }
        self._prepare_module(module_id)
        self.configure_optimizers_for_module(module_id, self._module_configs[module_id])
        if new_should_module_be_updated is not None:
            self._policies_to_train = new_should_module_be_updated
        self._on_modules_changed()

    def remove_module(self, module_id: str, *, new_should_module_be_updated: Any = None) -> None:
        """Remove a module and its optimizers. All ranks must do this between the same two updates.

        Raises:
            KeyError: There is no such module.
        """
        self._check_built()
        self.module.remove_module(module_id)
        self._optimizers.remove(module_id)
        self._module_configs.pop(module_id, None)
        if new_should_module_be_updated is not None:
            self._policies_to_train = new_should_module_be_updated
        self._set_source_modules()
        self._on_modules_changed()

    def _set_source_modules(self) -> None:
        """Pass the set of modules to a source that stores steps by module.

        If `policies_to_train` is a function, it may choose any of them, depending on the data.
        """
        if not self.source.divides_by_module:
            return
        module_ids = [
            module_id for module_id, (num_trainable, _) in self._num_parameters().items() if num_trainable
        ]
        is_open = callable(self._policies_to_train)
        trained = [mid for mid in module_ids if is_open or self.should_module_be_updated(mid)]
        self.source.set_modules(module_ids, trained)

    def should_module_be_updated(self, module_id: str, multi_agent_batch: Any = None) -> bool:
        """Return whether ``config.policies_to_train`` includes the module (None: every module).

        Args:
            module_id: The module.
            multi_agent_batch: Module id → train batch, for functions that depend on the data.
        """
        trained = self._policies_to_train
        if trained is None:
            return True
        return bool(trained(module_id, multi_agent_batch)) if callable(trained) else module_id in trained

    def _on_modules_changed(self) -> None:
        """React to an added or removed module."""

    # -- state -------------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """Return everything that an equal Learner needs to continue exactly like this one: named arrays, plain values.

        Args:
            components: Only these components: "rl_module" (or "rl_module/<module_id>"), "optimizer",
                "weights_seq_no", "counters", "learner_connector", "metrics", "random" (the seed of each update's
                random numbers), "extra", "source" (the content of the batch source, which differs per rank); None:
                all but "source".
            not_components: Components to leave out.
            inference_only: Whether to leave out the modules' parts that only learners need.

        Raises:
            ValueError: A component is unknown.
        """
        self._check_built()
        paths = _paths(components, [name for name in _COMPONENTS if name != "source"])
        skipped = set(_paths(not_components, []))
        state: dict[str, Any] = {}
        for path in paths:
            name, _, rest = path.partition("/")
            if name in skipped:
                continue
            if name == "rl_module":
                one = self.module.get_state(rest or None, inference_only=inference_only)
                state.setdefault(name, {}).update(one)
            elif name == "optimizer":
                state[name] = self._optimizers.get_state(self._parameter_names())
            elif name == "weights_seq_no":
                state[name] = self.weights_seq_no
            elif name == "counters":
                state[name] = self._get_counters()
            elif name == "learner_connector":
                pipeline = self._learner_connector
                state[name] = {} if pipeline is None else pipeline.get_state()
            elif name == "metrics":
                state[name] = self._get_metrics_state()
            elif name == "random":
                state[name] = {"seed": self._seed}
            elif name == "source":
                state[name] = self.source.get_state()
            else:
                state[name] = self.get_extra_state()
        return state

    def state_of_counters(self) -> dict[str, Any]:
        """Return the components of `get_state` that each update changes, besides weights, optimizers and source."""
        return {
            "weights_seq_no": self.weights_seq_no,
            "counters": self._get_counters(),
            "metrics": self._get_metrics_state(),
            "extra": self.get_extra_state(),
        }

    def _get_counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        counters["num_module_steps_trained_lifetime"] = {**self.num_module_steps_trained_lifetime}
        if self.source.progress is not None:
            counters["source_progress"] = self.source.progress.get_state()
        return counters

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the components of a state from `get_state`. Missing components keep their state.

        Raises:
            ValueError: A component is unknown, the weights do not fit, or the counts are another algorithm's.
            KeyError: The optimizer state is for other modules or optimizers.
        """
        self._check_built()
        _paths(list(state), [])
        if "counters" in state:
            self._check_counts(state["counters"])
        if "rl_module" in state:
            self.module.set_state(state["rl_module"])
        if "optimizer" in state:
            self._optimizers.set_state(state["optimizer"], self._parameter_names())
        if "weights_seq_no" in state:
            self.weights_seq_no = int(state["weights_seq_no"])
        if "counters" in state:
            counters = state["counters"]
            for counter in _COUNTERS:
                value = counters[counter]
                setattr(self, counter, dict(value) if isinstance(value, Mapping) else int(value))
            if self.source.progress is not None and "source_progress" in counters:
                self.source.progress.set_state(counters["source_progress"])
        if state.get("learner_connector") and self._learner_connector is not None:
            self._learner_connector.set_state(state["learner_connector"])
        if "metrics" in state:
            self._set_metrics_state(state["metrics"])
        if "random" in state:
            self._seed = int(state["random"]["seed"])
        if "extra" in state:
            try:
                self.set_extra_state(state["extra"])
            except KeyError as error:
                raise ValueError(
                    f"{self._does_not_fit} lacks {error} in 'extra'{_OTHER_ALGORITHM}"
                ) from error
        if state.get("source"):
            self.source.set_state(state["source"])

    def _check_counts(self, counters: Mapping[str, Any]) -> None:
        missing = [name for name in _COUNTERS if name not in counters]
        if self.source.progress is not None and "source_progress" in counters:
            wanted = self.source.progress.get_state()
            missing += [name for name in wanted if name not in counters["source_progress"]]
        if missing:
            raise ValueError(f"{self._does_not_fit} lacks the counts {', '.join(missing)}{_OTHER_ALGORITHM}")

    @property
    def _does_not_fit(self) -> str:
        return f"{type(self).__name__}: the state does not fit; it"

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint, or a part of it.

        Args:
            path: A checkpoint written by `save_to_path`, an algorithm's checkpoint, or a path into one.
            component: Only this part is at `path`; ``"rl_module/p0"`` also accepts a module's own checkpoint.

        Raises:
            CheckpointError: There is no such checkpoint, or it is incomplete or altered.
        """
        name, _, module_id = (component or "").strip("/").partition("/")
        if name != "rl_module":
            super().restore_from_path(path, component)
            return
        states = read_module_states(path, module_id or None)
        self.set_state({"rl_module": {module_id: states} if module_id else states})

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Return a built Learner with the state of a checkpoint.

        Args:
            path: See `restore_from_path`.
            args, kwargs: Arguments of the constructor. They are needed because a checkpoint contains states but no
                code.
        """
        learner = cls(*args, **kwargs)
        learner.build()
        learner.restore_from_path(path)
        return learner

    def _get_metrics_state(self) -> Any:
        return {}

    def _set_metrics_state(self, state: Any) -> None:
        """Do nothing. Learners with metrics override this."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return a subclass's state beyond modules and optimizers as plain values and arrays. Override both methods."""
        return {}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `get_extra_state`."""

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for _, module in self.module.items():
            module = module.unwrapped()
            if isinstance(module, nn.Module):
                names.update((id(p), name) for name, p in module.named_parameters())
        return names

    # -- internals ---------------------------------------------------------------------------------

    @property
    def _module(self) -> Any:
        """Alias of `module` for losses written for RLlib, which use ``self._module[module_id]``."""
        return self.module

    def _setting(self, name: str, default: Any) -> Any:
        return self.config.get(name, default)

    def _check_built(self) -> None:
        if self.module is None:
            raise RuntimeError(f"{type(self).__name__}: call build() first.")

    def _precision(self) -> AbstractContextManager[None]:
        """Run networks in ``config.torch_amp_dtype`` in the block."""
        return nullcontext() if self._mixed_precision is None else self._mixed_precision.on(self.module)

    @contextmanager
    def _random_stream(self) -> Iterator[None]:
        """Set torch's global random state for one update (dropout, noise in a loss) and restore it afterwards.

        The state depends only on seed, rank and weights version, so a repeated update draws the same numbers.
        """
        seed = derive_seed(self._seed, "learner", self.rank, self.weights_seq_no)
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0])
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def _is_trainable(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(p.requires_grad for p in parameters_of(module))


def _paths(components: str | Sequence[str] | None, default: list[str]) -> list[str]:
    paths = (
        default if components is None else [components] if isinstance(components, str) else list(components)
    )
    for path in paths:
        name = path.partition("/")[0]
        if name not in _COMPONENTS:
            raise ValueError(f"a Learner's state has no component {name!r}.{did_you_mean(name, _COMPONENTS)}")
    return paths


def _device_for(config: BaseConfig, rank: int) -> torch.device:
    wanted, num_learners = getattr(config, "num_gpus_per_learner", 0), getattr(config, "num_learners", 0)
    num_gpus = torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0
    is_auto = wanted == "auto"
    if is_auto:  # NCCL needs a GPU for each rank, and ranks on other machines must decide alike
        wanted = num_gpus >= max(1, num_learners) and not getattr(config, "num_remote_learners", 0)
    if not wanted:
        return torch.device("cpu")
    if not num_gpus:
        raise RuntimeError(
            f"num_gpus_per_learner={wanted}, but torch sees no CUDA device here: "
            "set num_gpus_per_learner=0 or install a CUDA build of torch."
        )
    local = getattr(config, "local_gpu_idx", 0) if num_learners == 0 else rank
    device = torch.device("cuda", local % num_gpus)
    if is_auto:
        name = torch.cuda.get_device_name(device)
        print(f"learner {rank} trains on {name} ({device}): num_gpus_per_learner is 'auto'", file=sys.stderr)
    return device
