"""The learner role: one rank of the learner group in its own process.

                 event loop                          learner thread
broker ──SHARDs──►  LearnerLink ──exact batch──►  learner.update  ◄── collectives ──► other ranks
broker ◄──DONE────  LearnerLink ◄──results──────
broker ◄─WEIGHTS──  LearnerLink ◄──snapshot─────  (rank 0)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults, trace
from rlzmq.core.errors import DeadlineError, PeerLostError
from rlzmq.core.imports import import_for_ranks
from rlzmq.core.process import apply_log_level, keep_freed_memory, limit_memory
from rlzmq.learners.torch_threads import set_torch_threads
from rlzmq.modules.weights import WeightsLayout, has_convolutions
from rlzmq.roles.hang_watch import UpdateWatch
from rlzmq.roles.learner.arrival_log import ArrivalLog
from rlzmq.roles.learner.formation import (
    connecting_timeout_s,
    guarded_connections,
    interface_for,
    open_store,
)
from rlzmq.roles.learner.learner_link import LearnerLink
from rlzmq.roles.peer_link import PeerRole
from rlzmq.wire.values import pack_blob, unpack_blob

__all__ = ["LearnerRole", "make_learner"]


def make_learner(config: BaseConfig, module_spec: object, rank: int = 0, num_ranks: int = 1) -> Any:
    """Return a built Learner of the class given by the config."""
    learner = config.learner_class(config=config, module_spec=module_spec, rank=rank, num_ranks=num_ranks)
    learner.build()
    return learner


class LearnerRole(PeerRole):
    """The actor in a learner's process.

    Plain methods run on the actor's thread, the only one that uses the learner; `async` methods run on
    its event loop.
    """

    def __init__(
        self,
        config: BaseConfig,
        module_spec: Any,
        rank: int = 0,
        num_ranks: int = 1,
        incarnation: int = 0,
        *,
        is_local: bool = False,
    ) -> None:
        set_torch_threads(config)
        apply_log_level(config)
        faults.arm(f"learner-{rank}", incarnation)
        trace.join(config.trace, f"learner {rank}")
        faults.at("learner.start")
        limit_memory(config.learner_memory_limit_bytes, "learner_memory_limit_bytes")
        if num_ranks > 1:
            import_for_ranks()
        self.config = config
        self.rank: int = rank
        self.learner: Any = make_learner(config, module_spec, rank, num_ranks)
        if has_convolutions(self.learner.module.values()):
            keep_freed_memory()  # their activations are large
        self._layouts: dict[Any, Any] = {}
        self._synced_module_ids: list[str] | None = None
        self._arrivals: Any = None
        self._called_off: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        learner = self.learner
        self.update_watch: UpdateWatch = UpdateWatch(
            config,
            f"learner-{rank}",
            lambda: learner.progress,
            lambda: learner.ranks.is_waiting,
            lambda: learner.ranks.group is None,
            self._report_hang if is_local else None,
        )
        faults.at("learner.started")

    # -- on the actor's thread ------------------------------------------------------------------

    def join_group(self, rank: int, num_ranks: int, store_path: str, generation: int) -> None:
        """Form the process group of a generation with the other ranks.

        Args:
            rank: This learner's rank.
            num_ranks: Size of the group.
            store_path: A file that all ranks can access and that does not exist yet, or ``tcp://host:port``
                of the driver's TCPStore if ranks are on several machines.
            generation: Increases whenever the group is re-formed.
        """
        self.rank = rank
        with guarded_connections():
            self.learner.ranks.join(
                rank=rank,
                world_size=num_ranks,
                store=open_store(store_path, num_ranks),
                timeout_s=self.config.learner_timeout_s,
                forming_timeout_s=connecting_timeout_s(self.config),
                generation=generation,
                interface=interface_for(store_path),
                is_called_off=lambda: generation in self._called_off,
            )

    def _join_and_agree(
        self, rank: int, num_ranks: int, store_path: str, generation: int, memory: bytes, num_env_steps: int
    ) -> tuple[bytes, int]:
        """Form the group; all ranks adopt the newest state among them, and the memory of its rank."""
        self.join_group(rank, num_ranks, store_path, generation)
        source = self.learner.ranks.adopt_newest_state()
        if self.learner.ranks.group is None:
            return memory, num_env_steps
        packed = self.learner.ranks.group.broadcast_bytes(pack_blob([memory, num_env_steps]), source)
        memory, num_env_steps = unpack_blob(packed)
        return memory, num_env_steps

    def ping(self) -> int:
        """Return the weights version, after earlier calls on the actor's thread."""
        return int(self.learner.weights_seq_no)

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """See Learner.update."""
        with self.update_watch.call("an update"):
            return self.learner.update(**kwargs)  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """See Learner.get_state."""
        return self.learner.get_state()  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See Learner.set_state."""
        self.learner.set_state(state)

    def get_source(self) -> dict[str, Any]:
        """Return the state of the batch source."""
        return self.learner.get_state("source")["source"]  # type: ignore[no-any-return]

    def get_inference_weights(self, module_ids: list[str] | None = None) -> tuple[Any, int]:
        """Return (snapshot of the inference weights, version).

        Args:
            module_ids: Modules to include; None: all.
        """
        key = None if module_ids is None else tuple(module_ids)
        if key not in self._layouts:
            module = self.learner.module
            self._layouts[key] = WeightsLayout.of(module, inference_only=True, module_ids=module_ids)
        return self._layouts[key].snapshot(self.learner.module), self.learner.weights_seq_no

    def change_modules(self, change: Callable[[Any], Any], synced_module_ids: list[str] | None) -> None:
        """Call ``change(learner)``, which adds or removes modules, and publish weights in the new layout.

        Args:
            change: Called between two updates.
            synced_module_ids: Modules whose weights runners need; None: all.
        """
        change(self.learner)
        self._layouts.clear()
        self._synced_module_ids = synced_module_ids
        if self._link is not None:
            self._link.change_layout(synced_module_ids)

    def close(self) -> None:
        """Leave the process group and close the arrival log, if any."""
        self.update_watch.close()
        self.learner.ranks.leave()
        trace.flush()
        if self._arrivals is not None:
            self._arrivals.close()

    # -- on the event loop ----------------------------------------------------------------------

    async def connect(self, link: Mapping[str, Any]) -> None:
        """Connect to the broker; registration follows once the group is formed (`form`, or `rejoin`).

        Raises:
            ConfigurationError: ``config.record_dir`` cannot be used.
        """
        faults.at("learner.connect")
        if self.config.record_dir is not None:
            self._arrivals = ArrivalLog(self.config.record_dir, link["run_id"], self.config)
        self._loop = asyncio.get_running_loop()
        self._link = LearnerLink(
            self.learner,
            self._run_blocking,
            watch=self.update_watch,
            of_agents=self.config.is_multi_agent,
            arrivals=self._arrivals,
            **link,
        )
        self._link.change_layout(self._synced_module_ids)
        await self._link.start()

    async def form(
        self, rank: int, num_ranks: int, generation: int, num_env_steps_before: int, begins_lineage: bool
    ) -> None:
        """Register under a new generation after the group was formed; updates in flight are discarded.

        Args:
            rank, num_ranks: This learner's rank and the group's size.
            generation: Higher than all earlier ones.
            num_env_steps_before: Env steps trained in the run so far.
            begins_lineage: The driver has sent a RESET of this generation.
        """
        self._link.num_env_steps_before = num_env_steps_before
        self._link.form(generation=generation, rank=rank, num_ranks=num_ranks, begins_lineage=begins_lineage)

    async def rejoin(
        self, rank: int, num_ranks: int, store_path: str, generation: int, registers: bool = True
    ) -> int:
        """Form a new generation with the other ranks; all adopt the newest state among them.

        An update being trained ends or fails first. If the call is cancelled, this rank stops waiting for the
        others at once, or when its attempt to connect to them has failed.

        Args:
            rank, num_ranks, store_path, generation: See `join_group`.
            registers: Register with the broker at once. False: `form` follows, and nothing is trained before it.

        Returns:
            The weights version that all ranks hold now.

        Raises:
            PeerLostError: Not all ranks joined.
            Exception: This rank's training had failed.
        """
        link = self._link
        memory, num_env_steps = b"", 0
        if link is not None:
            link.begin_forming()
            await self._run_blocking(lambda: None)  # its results are noted when this returns
            if link.ended.done():
                await link.ended  # raises the link's error
            memory, num_env_steps = link.core.export_memory(), link.num_env_steps_before
        faults.at("learner.join")
        try:
            memory, num_env_steps = await self._run_blocking(
                lambda: self._join_and_agree(rank, num_ranks, store_path, generation, memory, num_env_steps)
            )
        except asyncio.CancelledError:
            self._called_off.add(generation)
            raise
        if link is not None and registers:
            link.num_env_steps_before = num_env_steps
            link.form(generation=generation, rank=rank, num_ranks=num_ranks, memory=memory)
        return int(self.learner.weights_seq_no)

    async def run_until_failure(self) -> tuple[str, str]:
        """Return (reason, detail) once the connection to the broker has ended.

        Raises:
            PeerLostError: Another rank was lost; `rejoin` re-forms the group.
            Exception: Training failed.
        """
        link = self._link
        if link is None:
            return "", ""
        await asyncio.wait((link.ended, link.group_lost), return_when=asyncio.FIRST_COMPLETED)
        if not link.ended.done():
            raise PeerLostError(link.group_lost.result())
        return await link.ended  # type: ignore[no-any-return]

    def _report_hang(self, error: DeadlineError) -> None:
        """End the link because user code hangs; called on the watching thread."""
        link = self._link
        if self._loop is not None and link is not None:
            self._loop.call_soon_threadsafe(link.fail, error)
