"""Settings of learners and training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from rlzmq.config.settings import (
    Connector,
    Fraction,
    LearningRate,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    ignored,
    setting,
    settings,
)

__all__ = ["FrameworkSettings", "LearnersSettings", "TrainingSettings"]


def _amp_dtype(value: Any) -> Any:
    """Return the name of a torch dtype.

    Raises:
        PydanticCustomError: It is float16.
    """
    name = str(value).removeprefix("torch.")
    if name in ("float16", "half"):
        raise PydanticCustomError(
            "float16",
            "losses in float16 have to be scaled, which learners do not do; bfloat16 has the range of float32 and "
            "needs no scaling",
        )
    return name if str(value).startswith("torch.") else value


AmpDtype = Annotated[Literal["bfloat16"], BeforeValidator(_amp_dtype)]


@settings
class _LearnerCodeSettings:
    """User code that learners run.

    Args:
        learner_class: The Learner class (None: the algorithm's default).
        learner_connector: Callable ``(observation_space, action_space)`` that returns a connector piece or a list of
            pieces.
        add_default_connectors_to_learner_pipeline: Whether the default connector pieces follow those of
            `learner_connector`.
        learner_config_dict: Free-form settings for custom learners, read as ``self.config.learner_config_dict``.
    """

    learner_class: type | None = None
    learner_connector: Connector = None
    add_default_connectors_to_learner_pipeline: bool = True
    learner_config_dict: dict[str, Any] = setting(default={})


@settings
class LearnersSettings(_LearnerCodeSettings):
    """Learner processes.

    Args:
        num_learners: Number of learner processes (DDP ranks); 0: the driver's process trains.
        num_gpus_per_learner: GPUs per learner; more than 0 selects CUDA and NCCL. "auto": a GPU each if this machine
            has one for every learner, otherwise none.
        num_cpus_per_learner: Ignored; see torch_num_threads.
        max_requests_in_flight_per_learner: Ignored, as updates run one after the other.
        local_gpu_idx: Index of the GPU that a learner in the driver's process uses.
        torch_num_threads: Number of torch threads in each runner and learner process. "auto": 1; but a learner on the
            CPU whose modules have convolutions trains with up to 8: its share of the cores, less one for each env
            runner if they sample meanwhile (`staleness` >= 1).
    """

    num_learners: NonNegativeInt = 0
    num_gpus_per_learner: NonNegative | Literal["auto"] = 0.0
    num_cpus_per_learner: NonNegative | Literal["auto"] = ignored(
        default="auto", others=(0, 1), instead="set learners(torch_num_threads=…)."
    )
    max_requests_in_flight_per_learner: PositiveInt = ignored(
        default=3, instead="an update begins when the previous one is committed."
    )
    local_gpu_idx: NonNegativeInt = 0
    torch_num_threads: PositiveInt | Literal["auto"] = "auto"


@settings
class TrainingSettings(_LearnerCodeSettings):
    """Training hyperparameters. Each algorithm adds its own.

    Args:
        gamma: Discount factor in [0, 1].
        lr: Learning rate, or a schedule ``[(0, v0), (t1, v1), …]`` over lifetime env steps.
        grad_clip: Gradient clipping threshold (None: no clipping).
        grad_clip_by: The quantity that `grad_clip` limits: each value, the norm of each tensor, or the global norm.
        train_batch_size: Env steps per update over all learners.
        train_batch_size_per_learner: Env steps per update and learner; takes precedence over `train_batch_size`.
        num_epochs: Number of passes over each train batch.
        minibatch_size: Rows per gradient step (None: the whole batch).
        shuffle_batch_per_epoch: Whether the rows are reshuffled before each epoch.
        staleness: Number of updates that the env runners may sample ahead of training. With 0, each update trains
            only on data sampled with the weights it starts from; otherwise no trained step is more than this many
            weights versions old.
    """

    gamma: Fraction = 0.99
    lr: LearningRate = 0.001
    grad_clip: NonNegative | None = None
    grad_clip_by: Literal["value", "norm", "global_norm"] = "global_norm"
    train_batch_size: PositiveInt = 32
    train_batch_size_per_learner: PositiveInt | None = None
    num_epochs: PositiveInt = 1
    minibatch_size: PositiveInt | None = None
    shuffle_batch_per_epoch: bool = False
    staleness: NonNegativeInt = 0


@settings
class FrameworkSettings:
    """Torch options.

    Args:
        framework: "torch", the only choice.
        torch_skip_nan_gradients: Has no effect; accepted for compatibility with RLlib. Steps with non-finite
            gradients are always skipped and counted.
        torch_ddp_kwargs: Additional arguments for DistributedDataParallel. If there are any, learner ranks use it even
            if they could exchange gradients in shared memory. ``find_unused_parameters`` is not needed and has no
            effect.
        torch_amp_dtype: Data type in which learners run networks' forward and backward passes, by ``torch.autocast``:
            "bfloat16" (mixed precision); None: float32. Weights, gradients, optimizers, losses, and the last layer of
            the default models' heads stay float32, and so does acting. On GPUs it needs compute capability 8.0
            (Ampere). "float16" is not supported: its losses have to be scaled.
        torch_compile_learner: Compile parts of the learner with ``torch.compile``; the first updates then take
            seconds to minutes longer.
        torch_compile_learner_what_to_compile: "forward_train": the training forward pass of each module;
            "complete_update": forward pass, losses and their gradients on a minibatch, with a single learner only.
        torch_compile_learner_dynamo_backend: "inductor" (needs a C++ compiler on the CPU, Triton on a
            GPU), "aot_eager", "eager", …
        torch_compile_learner_dynamo_mode: Mode of the backend, e.g. "reduce-overhead" (None: its default).
        torch_compile_worker: Ignored: env runners use a fused inference path that needs no compiler.
    """

    framework: Literal["torch"] = setting(default="torch", kw_only=False)
    torch_skip_nan_gradients: bool = False
    torch_ddp_kwargs: dict[str, Any] = setting(default={})
    torch_amp_dtype: AmpDtype | None = None
    torch_compile_learner: bool = False
    torch_compile_learner_what_to_compile: Literal["forward_train", "complete_update"] = "forward_train"
    torch_compile_learner_dynamo_backend: str = "inductor"
    torch_compile_learner_dynamo_mode: str | None = None
    torch_compile_worker: bool = ignored(
        default=False, instead="env runners use a fused inference path that needs no compiler."
    )
