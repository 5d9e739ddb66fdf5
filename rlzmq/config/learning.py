"""Settings of learners and training."""

from __future__ import annotations

from typing import Any, Literal

from rlzmq.config.settings import (
    Connector,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Schedule,
    fixed,
    setting,
    settings,
)

__all__ = ["FrameworkSettings", "LearnersSettings", "TrainingSettings"]


@settings
class _LearnerCodeSettings:
    """Code of the user's that learners run.

    Args:
        learner_class: The Learner class (None: the algorithm's own).
        learner_connector: Callable ``(observation_space, action_space)`` giving one piece or a list.
    """

    learner_class: type | None = None
    learner_connector: Connector = None


@settings
class LearnersSettings(_LearnerCodeSettings):
    """Who learns.

    Args:
        num_learners: Learner processes (DDP ranks); 0 learns in the driver's own process.
        num_gpus_per_learner: GPUs of each learner; more than 0 means CUDA and NCCL.
        num_cpus_per_learner: Only "auto", 0 or 1, all the same; see torch_num_threads.
        num_aggregator_actors_per_learner: Only 0: each learner runs its own pipeline.
        max_requests_in_flight_per_learner: Only 3, without a meaning here: updates follow each other.
        local_gpu_idx: Which GPU a learner in the driver's process takes.
        add_default_connectors_to_learner_pipeline: Whether the default pieces follow.
        learner_config_dict: Free-form settings for custom learners: ``self.config.learner_config_dict``.
        torch_num_threads: Torch threads of each runner and learner process.
    """

    num_learners: NonNegativeInt = 0
    num_gpus_per_learner: NonNegative = 0.0
    num_cpus_per_learner: NonNegative | Literal["auto"] = fixed(
        default="auto", others=(0, 1), instead="set learners(torch_num_threads=…)."
    )
    num_aggregator_actors_per_learner: NonNegativeInt = fixed(
        default=0, instead="each learner runs its own pipeline."
    )
    max_requests_in_flight_per_learner: PositiveInt = fixed(
        default=3, instead="an update begins when the one before is committed."
    )
    local_gpu_idx: NonNegativeInt = 0
    add_default_connectors_to_learner_pipeline: bool = True
    learner_config_dict: dict[str, Any] = setting(default={})
    torch_num_threads: PositiveInt = 1


@settings
class TrainingSettings(_LearnerCodeSettings):
    """How to learn (each algorithm adds its own settings here).

    Args:
        gamma: Discount factor in [0, 1].
        lr: Learning rate, or ``[(0, v0), (t1, v1), …]`` over lifetime env steps.
        grad_clip: Gradient clipping threshold; None: no clipping.
        grad_clip_by: What the threshold bounds: each value, each tensor's norm, the global norm.
        train_batch_size: Env steps of one update over all learners.
        train_batch_size_per_learner: Env steps of one update of each learner (wins over the other).
        num_epochs: Passes over each train batch.
        minibatch_size: Rows of one gradient step; None: the whole batch.
        shuffle_batch_per_epoch: Whether rows are shuffled anew for each epoch.
        staleness: How many updates ahead runners sample. 0: an update trains exactly on what was sampled with the
            weights it starts from; else no trained step is more than this many versions old.
    """

    gamma: Fraction = 0.99
    lr: Schedule = 0.001
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
    """Torch's settings.

    Args:
        framework: "torch", the only one.
        torch_skip_nan_gradients: Kept for RLlib's sake: steps with non-finite gradients are
            always skipped and counted.
        torch_ddp_kwargs: Further arguments of DistributedDataParallel.
        torch_compile_learner: Compile parts of the learner with ``torch.compile``: the first updates take
            seconds to minutes longer.
        torch_compile_learner_what_to_compile: The modules' training forward passes, or the whole step on a
            minibatch (forward pass, losses, gradients, optimizers; one learner only).
        torch_compile_learner_dynamo_backend: "inductor" (needs a C++ compiler on the CPU, Triton on a
            GPU), "aot_eager", "eager", …
        torch_compile_learner_dynamo_mode: Inductor's mode, e.g. "reduce-overhead"; None: its default.
        torch_compile_worker: Only False: runners act through a fused path without a compiler.
    """

    framework: Literal["torch"] = setting(default="torch", kw_only=False)
    torch_skip_nan_gradients: bool = False
    torch_ddp_kwargs: dict[str, Any] = setting(default={})
    torch_compile_learner: bool = False
    torch_compile_learner_what_to_compile: Literal["forward_train", "complete_update"] = "forward_train"
    torch_compile_learner_dynamo_backend: str = "inductor"
    torch_compile_learner_dynamo_mode: str | None = None
    torch_compile_worker: bool = fixed(
        default=False, instead="runners act through a fused path that needs no compiler."
    )
