"""The learner role: one rank of the learner group in a process of its own.

                 event loop                          learner thread
broker ──SHARDs──►  LearnerLink ──exact batch──►  learner.update  ◄── collectives ──► other ranks
broker ◄──DONE────  LearnerLink ◄──results──────
broker ◄─WEIGHTS──  LearnerLink ◄──snapshot─────  (rank 0)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

__all__ = ["LearnerRole", "make_learner"]


def make_learner(config: Any, module_spec: Any, rank: int = 0, num_ranks: int = 1) -> Any:
    """A built Learner of the class that a config asks for, in this process."""
    learner = config.resolved_learner_class(
        config=config, module_spec=module_spec, rank=rank, num_ranks=num_ranks
    )
    learner.build()
    return learner


class LearnerRole:
    """What runs in a learner's process.

    Plain methods run on the actor's own thread, which is the only one that touches the learner;
    `async` ones run on its event loop.

    Args:
        config: The run's config.
        module_spec: The MultiRLModuleSpec with its spaces.
        rank: This learner's rank.
        num_ranks: Of the whole group.
    """

    def __init__(self, config: Any, module_spec: Any, rank: int = 0, num_ranks: int = 1) -> None:
        import torch

        torch.set_num_threads(config.torch_num_threads)
        self.config = config
        self.rank = rank
        self.learner = make_learner(config, module_spec, rank, num_ranks)
        self._layouts: dict[Any, Any] = {}
        self._synced_module_ids: list[str] | None = None
        self._link: Any = None
        self._run_blocking: Any = None

    # -- on the actor's thread ------------------------------------------------------------------

    def join_group(self, rank: int, num_ranks: int, store_path: str, generation: int) -> None:
        """Form the process group of a generation with the other ranks of this machine.

        Args:
            rank: This learner's rank.
            num_ranks: Of the whole group.
            store_path: A file that all ranks see and that is not there yet.
            generation: +1 whenever the group is formed anew.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from rlzmq.learners.distributed import loopback_interface

        self.rank = rank
        self.learner.setup_distributed(
            rank=rank,
            world_size=num_ranks,
            store=FileStore(store_path, num_ranks),
            timeout_s=self.config.learner_timeout_s,
            generation=generation,
            interface=loopback_interface(),
        )
        self.learner.broadcast_state(0)

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """See Learner.update."""
        return self.learner.update(**kwargs)  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """See Learner.get_state."""
        return self.learner.get_state()  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See Learner.set_state."""
        self.learner.set_state(state)

    def get_inference_weights(self, module_ids: list[str] | None = None) -> tuple[Any, int]:
        """(snapshot of what runners need, version).

        Args:
            module_ids: Only of these modules; None: all.
        """
        key = None if module_ids is None else tuple(module_ids)
        if key not in self._layouts:
            from rlzmq.modules.weights import WeightsLayout

            module = self.learner.module
            self._layouts[key] = WeightsLayout.of(module, inference_only=True, module_ids=module_ids)
        return self._layouts[key].snapshot(self.learner.module), self.learner.weights_seq_no

    def change_modules(self, change: Callable[[Any], Any], synced_module_ids: list[str] | None) -> None:
        """``change(learner)`` adds or removes modules; then the weights are published in their new layout.

        Args:
            change: Called between two updates.
            synced_module_ids: Of which modules runners need the weights; None: all.
        """
        change(self.learner)
        self._layouts.clear()
        self._synced_module_ids = synced_module_ids
        if self._link is not None:
            self._link.change_layout(synced_module_ids)

    def close(self) -> None:
        """Leave the process group, if there is one."""
        self.learner.leave_distributed()

    # -- on the event loop ----------------------------------------------------------------------

    def use_actor_thread(self, run: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]) -> None:
        """Called by the actor's host: what runs a function on the actor's thread."""
        self._run_blocking = lambda function: asyncio.ensure_future(run(function))

    async def connect(self, link: Mapping[str, Any], rank: int, num_ranks: int, generation: int) -> None:
        """Begin to take shards from the broker.

        Args:
            link: Addresses and identity, as `runtime.broker_pipeline` hands them out.
            rank, num_ranks, generation: Of the process group that stands.
        """
        from rlzmq.runtime.learner_link import LearnerLink

        self._link = LearnerLink(
            self.learner, self._run_blocking, is_multi_agent=self.config.is_multi_agent, **link
        )
        self._link.change_layout(self._synced_module_ids)
        await self._link.start()
        self._link.form(generation=generation, rank=rank, num_ranks=num_ranks)

    async def form(self, rank: int, num_ranks: int, generation: int, num_env_steps_before: int) -> None:
        """The group stands anew, or holds another state: register again under this generation."""
        self._link.num_env_steps_before = num_env_steps_before
        self._link.form(generation=generation, rank=rank, num_ranks=num_ranks)

    async def run_until_failure(self) -> None:
        """Return when the connection to the broker has ended; raise what ended it, where training failed."""
        if self._link is not None:
            await self._link.ended

    async def disconnect(self) -> None:
        """Say goodbye to the broker."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.stop()

    async def stop(self) -> None:
        """Called when the actor ends: leave the broker, then release what the process holds."""
        await self.disconnect()
        await self._run_blocking(self.close)
