"""Runs a function as each rank of a learner group, in real processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlzmq.core.process import loopback_interface
from rlzmq.learners.distributed import RankGroup
from rlzmq.learners.learner import Learner

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rlzmq.learners.ranks", "tests.learners.cases"])
_joined: list[Learner] = []  # of this process


class DiedError(Exception):
    """The rank's process ended without returning."""


def without_memory(self: RankGroup, row_bytes: int) -> None:
    """`RankGroup.share_rows` on hosts whose ranks share no memory."""


def form_group(
    path: Path, rank: int, world_size: int, *, generation: int = 0, timeout_s: float = 30.0
) -> RankGroup:
    store = dist.FileStore(str(path / f"store_{generation}"), world_size)
    return RankGroup(
        rank=rank,
        world_size=world_size,
        store=store,
        timeout_s=timeout_s,
        generation=generation,
        interface=loopback_interface(),
    )


def join(
    learner: Learner, path: Path, rank: int, world_size: int, generation: int = 0, timeout_s: float = 30.0
) -> None:
    """Make a learner a rank of the group that meets at `path`; it leaves when the rank's function has ended."""
    _joined.append(learner)
    learner.ranks.join(
        rank=rank,
        world_size=world_size,
        store=dist.FileStore(str(path / f"store_{generation}"), world_size),
        generation=generation,
        timeout_s=timeout_s,
        forming_timeout_s=30.0,
        interface=loopback_interface(),
    )


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, may_die: bool = False) -> list[Any]:
    """``[function(rank, world_size, *args) for each rank]``, each in its own process.

    A rank's exception is raised here with its traceback; with `may_die`, a dead rank's result is a DiedError.
    """
    running: list[tuple[Any, Connection]] = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_main, args=(theirs, function, rank, world_size, args), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    results: list[Any] = []
    try:
        for rank, (_, pipe) in enumerate(running):
            if not pipe.poll(60):
                raise TimeoutError(f"rank {rank} did not answer within 60 s")
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = may_die, DiedError(f"rank {rank}")
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results.append(value)
    finally:
        for process, pipe in running:
            process.join(10 if len(results) == world_size else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
    return results


def _main(pipe: Connection, function: Callable[..., Any], rank: int, world_size: int, args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        result = function(rank, world_size, *args)
        for learner in _joined:
            learner.ranks.leave()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
