"""Where torch runs a learner: its device and the number of threads, more than one only in updates that gain from it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.process import num_usable_cores
from rlzmq.modules.weights import has_convolutions

__all__ = [
    "auto_num_threads",
    "learner_device",
    "set_torch_threads",
    "torch_threads",
]

# Of a learner that chooses the number itself. Two were measured; minibatches of images are too small for very many.
_MAX_AUTO_THREADS = 8
_UNCHANGED = nullcontext()


def learner_device(config: BaseConfig, rank: int) -> torch.device:
    """Return the device of a learner: the CPU, or a GPU of this machine, chosen by its rank."""
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


def set_torch_threads(config: BaseConfig) -> None:
    """Set the number of torch threads with which a process starts: one if ``config.torch_num_threads`` is "auto"."""
    num_threads = 1 if config.torch_num_threads == "auto" else config.torch_num_threads
    if num_threads > 1:
        _use_one_thread_in_forks()
    torch.set_num_threads(num_threads)


def auto_num_threads(config: BaseConfig, device: torch.device, modules: Iterable[Any], num_ranks: int) -> int:
    """Return the number of torch threads that pays for each of the ranks on this host.

    Networks without convolutions are mostly faster on one.
    """
    if device.type != "cpu" or not has_convolutions(modules):
        return 1
    samples_meanwhile = config.update_plan().staleness > 0
    num_free = num_usable_cores() - (config.num_env_runners if samples_meanwhile else 0)
    return min(_MAX_AUTO_THREADS, max(1, num_free // num_ranks))


def torch_threads(num_threads: int | None) -> AbstractContextManager[None]:
    """Use this number of torch threads in the block and restore the number afterwards; None: no change."""
    if num_threads is None:
        return _UNCHANGED
    if num_threads > 1:
        _use_one_thread_in_forks()
    before = torch.get_num_threads()
    return _UNCHANGED if num_threads == before else _changed_threads(num_threads, before)


@contextmanager
def _changed_threads(num_threads: int, before: int) -> Iterator[None]:
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _use_one_thread_in_forks() -> None:
    """Make forked processes, e.g. vector envs' workers, use one torch thread: threads of the parent are missing there.

    Without this, a worker that uses torch waits for them forever.
    """
    if hasattr(os, "register_at_fork"):  # where processes fork
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
