"""AsyncLearnerGroup: one local learner, or several learner processes, as one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import read_part, write_part
from rlzmq.core.errors import PeerLostError
from rlzmq.core.imports import LazyModule
from rlzmq.core.names import LEARNER_PATH
from rlzmq.core.patience import FIRST_S
from rlzmq.driver.formation import LEARNER_ROLE, LearnerFormation, form_group
from rlzmq.driver.process_config import config_for_learners, weights_to_load
from rlzmq.driver.supervision import Place, Supervisor
from rlzmq.episodes.episode_batch import num_env_steps_of
from rlzmq.modules.saving import read_module_states
from rlzmq.replay.replay_buffer import divide_states

__all__ = ["AsyncLearnerGroup", "shard_episodes"]


def shard_episodes(episodes: object, num_ranks: int) -> tuple[list[list[Any]], int]:
    """Cut episodes into `num_ranks` lists of equally many env steps, in order.

    An episode that crosses a border is sliced there. Its first part is then not done, and the rest is in the next
    rank's shard.

    Args:
        episodes: Episodes, an EpisodeBatch, or a list of EpisodeBatches.
        num_ranks: ≥ 1.

    Returns:
        (The shards, env steps over all of them: the largest multiple of `num_ranks`.)

    Raises:
        ValueError: There are fewer env steps than ranks.
    """
    items = _flat(episodes)
    total = sum(len(item) for item in items)
    per_rank = total // num_ranks
    if per_rank == 0:
        raise ValueError(
            f"{total} env steps cannot be shared by {num_ranks} learners: pass at least {num_ranks} steps."
        )
    shards: list[list[Any]] = [[] for _ in range(num_ranks)]
    rank, room = 0, per_rank
    for item in items:
        start = 0
        while start < len(item) and rank < num_ranks:
            stop = min(start + room, len(item))
            shards[rank].append(item if (start, stop) == (0, len(item)) else item[start:stop])
            room -= stop - start
            start = stop
            if room == 0:
                rank, room = rank + 1, per_rank
    return shards, per_rank * num_ranks


def shard_batch(batch: Mapping[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    """Cut a train batch into `num_ranks` batches of equally many rows, in order. Surplus rows are left out.

    Args:
        batch: Module id → column → array or tensor ``[rows, ...]`` (or just column → …).
        num_ranks: ≥ 1.

    Raises:
        ValueError: A module has fewer rows than there are ranks.
    """

    def part(value: Any, rank: int) -> Any:
        if isinstance(value, Mapping):
            return {name: part(item, rank) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(part(item, rank) for item in value)
        per_rank = len(value) // num_ranks
        if per_rank == 0:
            raise ValueError(
                f"{len(value)} rows cannot be shared by {num_ranks} learners: pass at least {num_ranks} rows."
            )
        return value[rank * per_rank : (rank + 1) * per_rank]

    return [part(batch, rank) for rank in range(num_ranks)]


def _flat(episodes: Any) -> list[Any]:
    flat: list[Any] = []
    for item in episodes:
        if isinstance(item, Sequence) and not hasattr(item, "get_rewards"):
            flat.extend(item)  # an EpisodeBatch
        else:
            flat.append(item)
    return flat


if TYPE_CHECKING:
    from rlzmq.modules import weights as module_weights
    from rlzmq.roles import learner_role
else:  # they import torch, which only a local learner needs here
    module_weights = LazyModule("rlzmq.modules.weights")
    learner_role = LazyModule("rlzmq.roles.learner_role")


class AsyncLearnerGroup:
    """Trains one module on equal shards of each batch.

    Args:
        config: Number of learners and their class.
        module_spec: The MultiRLModuleSpec with its spaces.
        system: The ActorSystem that spawns them. Without one there is a single local learner, and the group's
            coroutines never wait.
        door: The RemoteLearnerListener for learners on other machines, if any are expected.

    Attributes:
        local_learner: The Learner in this process, or None.
        generation: Number of the process group; increases by 1 whenever the group is re-formed.
        supervisor, formation: Start the ranks again that end, and form their group; None for a local learner.
        num_changes: Number of times that weights or, in a run, connector states were changed from outside.
        is_changed: Whether the run's pipeline has to be told of such a change; see `Session.restart`.
        synced_module_ids: The modules whose weights runners need; None: all.
        algorithm: The AsyncAlgorithm that owns the learners; None for a standalone group.
        trained: Results of the ranks and env steps of each `update` call; whoever counts them empties the list.
    """

    config: BaseConfig
    module_spec: Any

    def __init__(self, config: BaseConfig, module_spec: Any, *, system: Any = None, door: Any = None) -> None:
        self.config = config
        self.module_spec = module_spec
        self._system = system
        self._door = door
        self.local_learner: Any = None
        self.generation: int = 0
        self.num_changes: int = 0
        self.is_changed: bool = False
        self.synced_module_ids: list[str] | None = None
        self.algorithm: Any = None
        self.supervisor: Supervisor | None = None
        self.formation: LearnerFormation | None = None
        self.trained: list[tuple[list[dict[str, Any]], int]] = []

    @property
    def handles(self) -> list[Any]:
        """The ranks' actor handles in rank order; empty for a local group."""
        return self.formation.handles if self.formation is not None else []

    @property
    def num_learners(self) -> int:
        """Number of ranks: the remote ones, or the local one."""
        return len(self.handles) or 1

    def _note_change(self) -> None:
        self.num_changes += 1
        self.is_changed = True
        if self.formation is not None:
            self.formation.is_untouched = False

    async def start(self) -> None:
        """Create the learners and form their process group."""
        num = self.config.num_learners
        if self._system is None:
            self.local_learner = learner_role.make_learner(self.config, self.module_spec)
            return
        self.supervisor = Supervisor(
            self._spawn,
            setting="restart_failed_learners",
            is_on=self.config.restart_failed_learners,
            may_go_on=True,
        )
        self.formation = LearnerFormation(self.config, self.supervisor, self._join_ranks)
        await self.formation.begin(max(num, 1))

    async def _spawn(self, place: Place) -> Any:
        rank, incarnation, name = place.index, place.incarnation, f"learner-{place.index}"

        def is_spared() -> bool:
            return self.formation is not None and self.formation.has_only_weights(name)

        if self._door is not None:
            handle = await self._door.take(self.config, rank, replaces=incarnation > 0)
            self._system.watch(handle, place.patience, is_spared)
            return handle
        local = self.config.num_learners == 0
        handle = await self._system.spawn(
            LEARNER_ROLE,
            self.config if local else config_for_learners(self.config),
            self.module_spec,
            rank,
            max(self.config.num_learners, 1),
            incarnation,
            is_local=local,
            name=name,
            in_process=local,
            deadline_s=self.config.process_start_timeout_s,
            patience=place.patience,
            is_spared=is_spared,
        )
        if self.synced_module_ids is not None:
            ids = self.synced_module_ids
            await handle.apply(lambda role: role.change_modules(lambda learner: None, ids))
        return handle

    async def _join_ranks(self, handles: Sequence[Any], registers: bool = True) -> None:
        """Form the next generation from these ranks, in rank order. All get the newest state among them."""
        # Their store belongs to the driver (a file or a server), so it outlives every rank.
        self.generation += 1
        if self._door is not None:
            store = self._door.store_address
        else:
            store = str(self._system.run_directory.path / f"learners-{self.generation}")
        await form_group(
            handles,
            store,
            self.generation,
            deadline_s=self.config.learner_timeout_s + FIRST_S,  # a collective has to fail first
            registers=registers,
        )

    # -- updates --------------------------------------------------------------------------------

    async def update(
        self,
        /,
        *,
        batch: Mapping[str, Any] | None = None,
        episodes: Sequence[Any] | None = None,
        timesteps: Mapping[str, int] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Train one update on these episodes, or this train batch, shared equally by all ranks.

        Args:
            batch: A train batch (see `Learner.update`). Every rank trains the same number of its rows.
            episodes: Episodes, or an EpisodeBatch. They are cut so that every rank trains the same number of env
                steps (at most num_learners - 1 steps are left out, and counted).
            timesteps: Lifetime counters for schedules.
            options: ``num_epochs``, ``minibatch_size``, ``shuffle_batch_per_epoch``.

        Returns:
            ``{module id: {metric: value}}`` of each rank.

        Raises:
            ValueError: Not exactly one source of data is given, or there are fewer env steps than ranks.
        """
        if (batch is None) == (episodes is None):
            raise ValueError(
                "LearnerGroup.update: expected either batch or episodes, got "
                f"{'none' if batch is None else 'both'}."
            )
        self._note_change()
        options["timesteps"] = dict(timesteps) if timesteps else None
        if self.local_learner is not None:
            results = [self.local_learner.update(batch=batch, episodes=episodes, **options)]
            num_steps = _num_steps_of(batch=batch, episodes=episodes)
        else:
            results, num_steps = await self._update_ranks(batch, episodes, options)
        self.trained.append((results, num_steps))
        return results

    async def _update_ranks(
        self, batch: Any, episodes: object, options: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], int]:
        """Train one update on all ranks; if one dies, the others train larger shares."""
        assert self.formation is not None
        await self.formation.admit()
        start: list[int] = []

        async def attempt(handles: Sequence[Any]) -> tuple[list[dict[str, Any]], int]:
            version = await handles[0].ping()
            start.append(version)
            name, shards, num_steps = _shards(batch, episodes, len(handles))
            if version > start[0]:
                return [], num_steps  # committed before a rank died with its results
            results = await asyncio.gather(
                *(
                    handle.update(**{name: shard}, **options)
                    for handle, shard in zip(handles, shards, strict=True)
                ),
                return_exceptions=True,
            )
            failures = [result for result in results if isinstance(result, BaseException)]
            for failure in sorted(failures, key=lambda failure: isinstance(failure, PeerLostError)):
                raise failure  # prefer an error of the user's code to its consequences
            return list(results), num_steps  # type: ignore[arg-type]

        return await self.formation.call(attempt)  # type: ignore[no-any-return]

    async def evaluate_offline(self) -> dict[str, Any]:
        """Let rank 0 of an offline algorithm evaluate on held-out data; see OfflineLearner.evaluate_offline."""
        if self.local_learner is not None:
            return self.local_learner.evaluate_offline()  # type: ignore[no-any-return]
        return await self._on_rank_0(  # type: ignore[no-any-return]
            lambda handle: handle.apply(lambda role: role.learner.evaluate_offline())
        )

    def fault_tolerance(self) -> dict[str, int]:
        """Return the number of living ranks, of replaced ranks, and of re-formations of the group."""
        assert self.supervisor is not None
        assert self.formation is not None
        return {
            "num_healthy_learners": len(self.handles) if self.config.num_learners else 0,
            "num_learner_restarts": self.supervisor.num_restarts,
            "num_learner_group_reforms": self.formation.num_reforms,
            "num_learner_rollbacks": self.formation.num_rollbacks,
        }

    # -- state ----------------------------------------------------------------------------------

    async def get_state(self) -> dict[str, Any]:
        """Return rank 0's learner state, which equals that of all ranks."""
        state: dict[str, Any] = await self._on_rank_0(lambda learner: learner.get_state())
        self._remember(state)
        return state

    def _remember(self, state: Mapping[str, Any]) -> None:
        """Keep a whole state, to be restored if no rank is left."""
        if self.formation is not None and "weights_seq_no" in state:
            self.formation.remember(dict(state))

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Load this state on every rank."""
        self._note_change()
        self._remember(state)
        await self._on_all(lambda handle: handle.set_state(dict(state)))

    async def get_sources(self) -> list[dict[str, Any]]:
        """Return the state of each rank's batch source, by rank."""
        states = await self._on_all(lambda learner: learner.get_state("source"))
        return [state["source"] for state in states]

    async def set_sources(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Restore the ranks' batch sources. If the number of ranks differs, the contents of replay buffers are divided.

        Args:
            states: Result of `get_sources`, possibly of another group.

        Returns:
            Whether they were restored. Positions in files cannot be used with another number of ranks.
        """
        num_ranks = self.num_learners
        fitting = list(states) if len(states) == num_ranks else divide_states(states, num_ranks)
        if fitting is None:
            return False
        if self.local_learner is not None:
            self.local_learner.set_state({"source": fitting[0]})
            return True

        async def set_all(handles: Sequence[Any]) -> None:
            # A rank that died in the meantime begins with an empty source.
            pairs = zip(handles, fitting, strict=False)
            await asyncio.gather(*(handle.set_state({"source": dict(state)}) for handle, state in pairs))

        assert self.formation is not None
        await self.formation.call(set_all)
        return True

    async def save_to_path(self, path: str | Path | None = None) -> str:
        """Write rank 0's state as a checkpoint (see Checkpointable.save_to_path)."""
        return write_part(path, LEARNER_PATH, await self.get_state(), type(self))

    async def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint on every rank.

        Args:
            path: A checkpoint written by `save_to_path` or by a Learner, an algorithm's checkpoint, or a path into one.
            component: Only this part is at `path`; ``"learner/rl_module/p0"`` also accepts a module's own
                checkpoint.

        Raises:
            CheckpointError: There is no such checkpoint, or it is incomplete or altered.
        """
        part = (component or "").strip("/").removeprefix("learner").strip("/")
        name, _, module_id = part.partition("/")
        if name == "rl_module":
            await self.set_weights(read_module_states(path, module_id or None))
        else:
            await self.set_state(read_part(path, LEARNER_PATH, part))

    async def get_weights(self) -> dict[str, Any]:
        """Return rank 0's weights, ``{module id: {name: array}}``."""
        state = await self.get_state()
        return state["rl_module"]  # type: ignore[no-any-return]

    async def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Load these weights on every rank; optimizers keep their state."""
        await self.set_state({"rl_module": dict(weights)})

    async def load_module_state(
        self,
        *,
        multi_rl_module_ckpt_dir: str | Path | None = None,
        modules_to_load: Collection[str] | None = None,
        rl_module_ckpt_dirs: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Load weights from checkpoints on every rank; optimizers keep their state.

        Args:
            multi_rl_module_ckpt_dir: An algorithm's checkpoint, or a MultiRLModule's.
            modules_to_load: Ids of the modules to load; None: all modules of the learners.
            rl_module_ckpt_dirs: Module id → checkpoint of a module, or path to one in an algorithm's; takes precedence.

        Raises:
            CheckpointError: A module is missing from the checkpoint.
            KeyError: The learners have no such module.
        """
        weights = weights_to_load(
            self.module_spec,
            multi_rl_module_ckpt_dir=multi_rl_module_ckpt_dir,
            modules_to_load=modules_to_load,
            rl_module_ckpt_dirs=rl_module_ckpt_dirs,
        )
        await self.set_weights(weights)

    async def add_module(
        self,
        *,
        module_id: str,
        module_spec: Any,
        config_overrides: Mapping[str, Any] | None = None,
        new_should_module_be_updated: Any = None,
    ) -> Any:
        """Add a module to a standalone group's learners, between two updates (for a run, see `Algorithm.add_module`).

        Args:
            module_id: Id of the new module.
            module_spec: Its RLModuleSpec.
            config_overrides: Settings for this module only.
            new_should_module_be_updated: New `policies_to_train`.

        Returns:
            The specs of the learners' modules.

        Raises:
            ValueError: There is already a module with this id.
        """
        options = {
            "config_overrides": config_overrides,
            "new_should_module_be_updated": new_should_module_be_updated,
        }
        if self.algorithm is not None:
            return await self.algorithm.add_module(
                module_id, module_spec, add_to_env_runners=False, add_to_eval_env_runners=False, **options
            )
        specs = self.module_spec.as_multi_rl_module_spec().copy()
        specs.add_modules({module_id: module_spec}, override=False)
        per_module = dict(self.config.algorithm_config_overrides_per_module)
        if config_overrides:
            per_module[module_id] = dict(config_overrides)
        return await self._change_alone(
            specs,
            lambda learner: learner.add_module(module_id=module_id, module_spec=module_spec, **options),
            algorithm_config_overrides_per_module=per_module,
            policies_to_train=new_should_module_be_updated,
        )

    async def remove_module(self, module_id: str, *, new_should_module_be_updated: object = None) -> Any:
        """Remove a module from the learners of a standalone group, between two updates.

        Args:
            module_id: Id of the module.
            new_should_module_be_updated: New `policies_to_train`.

        Returns:
            The specs of the learners' modules.

        Raises:
            KeyError: There is no such module.
        """
        options = {"new_should_module_be_updated": new_should_module_be_updated}
        if self.algorithm is not None:
            return await self.algorithm.remove_module(
                module_id, remove_from_env_runners=False, remove_from_eval_env_runners=False, **options
            )
        specs = self.module_spec.as_multi_rl_module_spec().copy()
        specs[module_id]  # raises KeyError if there is no such module
        specs.remove_modules(module_id)
        return await self._change_alone(
            specs,
            lambda learner: learner.remove_module(module_id, **options),
            policies_to_train=new_should_module_be_updated,
        )

    async def _change_alone(self, specs: Any, change: Callable[[Any], Any], **settings: Any) -> Any:
        """Change the modules of a standalone group; settings that are None stay as they are."""
        config = self.config.copy(copy_frozen=False)
        for name, value in settings.items():
            if value is not None:
                setattr(config, name, value)
        config.freeze()
        await self.change_modules(config, specs, change, self.synced_module_ids)
        return self.module_spec

    async def change_modules(
        self,
        config: BaseConfig,
        module_spec: object,
        change: Callable[[Any], Any],
        synced_module_ids: list[str] | None,
    ) -> None:
        """Add or remove modules on every rank, between two updates.

        Args:
            config, module_spec: The config and the spec with the new modules.
            change: ``change(learner)`` adds or removes them.
            synced_module_ids: Modules whose weights runners need; None: all.
        """
        self._note_change()
        self.config, self.module_spec, self.synced_module_ids = config, module_spec, synced_module_ids
        if self.formation is not None:
            self.formation.last_resort = None  # it has other modules
        if self.local_learner is not None:
            change(self.local_learner)
            return

        def on_role(role: Any, change: Callable[[Any], Any], synced_module_ids: list[str] | None) -> None:
            role.change_modules(change, synced_module_ids)

        await self._on_all(lambda handle: handle.apply(on_role, change, synced_module_ids))

    async def get_inference_weights(self, module_ids: list[str] | None = None) -> tuple[Any, int]:
        """Return (snapshot of the weights that runners need, version).

        Args:
            module_ids: Ids of the modules to include; None: all modules of training runners.
        """
        module_ids = self.synced_module_ids if module_ids is None else module_ids
        if self.local_learner is not None:
            learner = self.local_learner
            layout = module_weights.WeightsLayout.of(
                learner.module, inference_only=True, module_ids=module_ids
            )
            return layout.snapshot(learner.module), learner.weights_seq_no
        snapshot, version = await self._on_rank_0(lambda handle: handle.get_inference_weights(module_ids))
        return snapshot, version

    async def _on_rank_0(self, call: Callable[[Any], Any]) -> Any:
        """Await ``call(handle)`` for the current rank 0, and repeat it if it dies; or call it for the local learner."""
        if self.local_learner is not None:
            return call(self.local_learner)
        assert self.formation is not None
        return await self.formation.call(lambda handles: call(handles[0]))

    async def _on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Await ``call(handle)`` for all ranks concurrently, and repeat it if one dies; or for the local one."""
        if self.local_learner is not None:
            return [call(self.local_learner)]
        if self.formation is None:
            return []

        async def call_all(handles: Sequence[Any]) -> list[Any]:
            return list(await asyncio.gather(*(call(handle) for handle in handles)))

        return await self.formation.call(call_all)  # type: ignore[no-any-return]

    async def foreach_learner(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call ``func(learner)`` on every rank; return the results in rank order.

        If it changes weights, call `sync_weights` afterwards.
        """
        if self.local_learner is not None:
            return [func(self.local_learner)]

        def on_role(role: Any) -> object:
            return func(role.learner)

        return await self._on_all(lambda handle: handle.apply(on_role))

    async def shutdown(self) -> None:
        """End the learners."""
        self.local_learner = None
        if self.supervisor is not None and self.formation is not None:
            await self.formation.stop()
            self.formation.handles.clear()
            await self.supervisor.end()


def _shards(batch: Any, episodes: Any, num_ranks: int) -> tuple[str, list[Any], int]:
    """Return (argument name of `Learner.update`, one shard per rank, number of steps in all shards)."""
    if batch is None:
        of_episodes, num_steps = shard_episodes(episodes, num_ranks)
        return "episodes", of_episodes, num_steps
    shards = shard_batch(batch, num_ranks)
    return "batch", shards, sum(_num_steps_of(batch=shard) for shard in shards)


def _num_steps_of(*, batch: Any = None, episodes: Any = None) -> int:
    if batch is not None:
        return max((_num_rows(value) for value in batch.values()), default=0)
    return num_env_steps_of(episodes)


def _num_rows(value: Any) -> int:
    while isinstance(value, Mapping):
        value = next(iter(value.values()), ())
    return len(value)
