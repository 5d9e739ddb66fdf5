"""Reading and writing of algorithms' checkpoints: their components and config.

{"learner_group": {"learner": …, "replay-0": …}, …}        the tree
{"learner_group/learner": …, "learner_group/replay-0": …}  its parts

`CheckpointKeeper` writes automatic checkpoints, with the state taken between updates and the files on a thread::

    an iteration's end ──due?──► get_state, copied ──► a thread: space? write, fsync, rename, remove old ones
                                                        │ fails
                                                        └──► log, counter; training continues

Only one write runs at a time. A checkpoint that becomes due during a write waits for the end of the next iteration. The
learners' state is also copied to the driver's memory at intervals, to recover from the death of all learners.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlzmq.algorithms.registry import ALGORITHMS, config_class_named
from rlzmq.algorithms.stored_config import PLACES, Given, Purpose, StoredConfig
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults
from rlzmq.core.checkpoint import (
    chosen_parts,
    find_inside,
    local_path,
    open_checkpoint,
    read_checkpoint,
    read_manifest,
    read_part,
    write_checkpoint,
)
from rlzmq.core.errors import CheckpointError, ConfigurationError, RlzmqError, printable
from rlzmq.core.run_dir import RunDir, checkpoints_at, find_checkpoint
from rlzmq.driver.synchronous import needs_processes
from rlzmq.modules.saving import read_module_states

if TYPE_CHECKING:
    from rlzmq.modules.multi_rl_module import MultiRLModule

__all__ = [
    "COMPONENTS",
    "CheckpointKeeper",
    "StoredAlgorithm",
    "check_algorithm_class",
    "checkpoint_place",
    "latest_checkpoint",
    "load_policy",
    "online_state",
    "read_algorithm",
    "read_component",
    "run_to_resume",
    "starts_online_run",
    "to_components",
    "to_parts",
    "with_stored_seed",
    "write_algorithm",
]


COMPONENTS = (
    "accounting",
    "algorithm",
    "env_runner",
    "eval_env_runner",
    "learner_group",
    "modules",
)
_GROUP = "learner_group"  # each of its entries is a separate part


def to_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a (partial) tree. Entries that are parts already are unchanged.

    Raises:
        ValueError: A component is unknown.
    """
    chosen_parts(COMPONENTS, list(state), whose="an Algorithm's state")
    parts: dict[str, Any] = {}
    for name, value in state.items():
        if name == _GROUP:
            parts |= {f"{name}/{rest}": part for rest, part in value.items()}
        else:
            parts[name] = value
    return parts


_log = logging.getLogger("rlzmq.checkpoints")

_Config = TypeVar("_Config", bound=BaseConfig)
_CONFIG = "config"
_CONFIG_CLASS = ("config", "config_class")
_NEEDED = ("algorithm", "learner_group/learner", "env_runner", "accounting")
_MODULES = "learner_group/learner/rl_module"


def write_algorithm(
    path: str | Path | None, algorithm: object, config: BaseConfig, state: Mapping[str, Any]
) -> str:
    """Write state and config as one checkpoint and return its absolute path.

    Without `path`, it is written to a new directory in the temporary directory. The path is logged, and the directory
    is removed if writing fails.
    """
    components, about = to_components(algorithm, config, state)
    written = str(write_checkpoint(path, components, about=about))
    if path is None:
        _log.warning(
            "checkpoint  %s (in the temporary directory, which the system may empty; pass save_to_path a path to "
            "keep it)",
            written,
        )
    return written


def to_components(
    algorithm: object, config: BaseConfig, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `write_checkpoint`: components (state and config) and metadata for the manifest."""
    stored = config.to_stored(without=PLACES)
    about = {"algorithm": type(algorithm).__name__, **{key: stored.pop(key) for key in _CONFIG_CLASS}}
    return {**to_parts(state), _CONFIG: stored}, about


def latest_checkpoint(path: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or None.

    Incomplete or altered checkpoints are skipped, each with a warning.

    Args:
        path: A run directory, a directory of checkpoints, or a checkpoint.
    """
    found = find_checkpoint(path)
    for skipped, why in found.skipped:
        _log.warning("skipped the checkpoint %s: %s", skipped, printable(why))
    return found.path


@contextlib.contextmanager
def run_to_resume(directory: str | Path, config: BaseConfig | None) -> Iterator[tuple[Path | None, RunDir]]:
    """Take a run directory; yield its newest checkpoint, or None for a new run, and the directory.

    Raises:
        CheckpointError: There is no checkpoint, and no config for a new run.
        ConfigurationError: Another driver has the directory.
    """
    run_dir = RunDir(directory)
    with run_dir if config is not None or checkpoints_at(directory) else contextlib.nullcontext():
        newest = latest_checkpoint(directory)
        if newest is None and config is None:
            raise CheckpointError(
                f"{directory} holds no intact checkpoint. Pass config=… to start a new run."
            )
        yield newest, run_dir


def checkpoint_place(path: str | Path) -> Path:
    """Return the checkpoint at `path`, or the newest intact one if it is a run directory.

    Raises:
        CheckpointError: It is a run without an intact checkpoint.
    """
    place = local_path(path)
    if (place / "manifest.json").exists() or not place.is_dir():
        return place
    newest = latest_checkpoint(place)
    if newest is None and (unusable := checkpoints_at(place)):
        raise CheckpointError(
            f"{place}: none of its {len(unusable)} checkpoints can be used (the warnings say why)."
        )
    return newest or place


@dataclass(frozen=True)
class StoredAlgorithm:
    """An algorithm's checkpoint that was read and checked.

    Attributes:
        path: The checkpoint.
        config: The stored config, with what describes the modules.
        state: The components of the state.
    """

    path: Path
    config: StoredConfig
    state: dict[str, Any]

    @property
    def seed(self) -> int | None:
        """The run's seed, which its first build drew if none was set."""
        return self.config.plain.get("values", {}).get("seed")  # type: ignore[no-any-return]

    @property
    def acting_state(self) -> dict[str, Any]:
        """The part of the state that env runners act with: weights and connector states."""
        return {
            "rl_module": self.state["learner_group/learner"]["rl_module"],
            **self.state["env_runner"],
        }

    def config_to(self, purpose: Purpose, given: Given) -> BaseConfig:
        """Return the caller's config or the stored one, with the checkpoint's modules, and to resume with its seed.

        Raises:
            CheckpointError: Code is missing that the purpose needs.
        """
        config = self.config.config_to(purpose, given)
        return with_stored_seed(config, self.path) if purpose == "resume" else config


def load_policy(runner: Any, state: Mapping[str, Any]) -> None:
    """Load the `acting_state` of a checkpoint into an env runner. Acting does not change it."""
    runner.set_state(state)
    runner.env_to_module.freeze_statistics()


def read_algorithm(path: str | Path) -> StoredAlgorithm:
    """Read the checkpoint that `write_algorithm` wrote, after checking every byte.

    Args:
        path: A checkpoint, or a run directory, whose newest intact checkpoint is read.

    Raises:
        CheckpointError: The checkpoint is incomplete, altered, of an unknown version, or not that of an algorithm.
    """
    stored = open_checkpoint(checkpoint_place(path))
    state = dict(stored.components)
    config = state.pop(_CONFIG, None)
    for name in _NEEDED:
        if name not in state:
            raise CheckpointError(
                f"{stored.path} is not a checkpoint of an algorithm: it has no component {name!r}."
            )
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{stored.path} is not a checkpoint of an algorithm: it has no config.")
    plain = {**config, **{key: stored.about.get(key) for key in _CONFIG_CLASS}}
    modules = state.get("modules", {})
    return StoredAlgorithm(stored.path, StoredConfig(plain, str(stored.path), stored.is_mine, modules), state)


def check_algorithm_class(path: str | Path, chosen: type) -> None:
    """Check that a checkpoint of a custom algorithm class is resumed by a class of the same name.

    Raises:
        CheckpointError: The checkpoint was saved by a custom class of another name, whose training step would be lost.
    """
    path = checkpoint_place(path)
    about = read_manifest(path)["about"]
    saved = about.get("algorithm")
    built_in = {"Algorithm", "AsyncAlgorithm", *(name.upper() for name in ALGORITHMS)}
    if saved is not None and saved != chosen.__name__ and saved not in built_in:
        raise CheckpointError(
            f"{path} was saved by {saved} and would be resumed as {chosen.__name__}: a checkpoint does not contain the "
            f"code of custom classes. Call {saved}.from_checkpoint(…) (or .resume), or pass "
            f"config={about.get('config')}(algo_class={saved})…"
        )


def read_component(path: str | Path, component: str) -> dict[str, Any]:
    """Return a state with only this component, for `Algorithm.set_state`.

    Args:
        path: An algorithm's checkpoint (or run directory) that has this component. Or a path into one, such as
            ``checkpoint/learner_group/learner/rl_module/p0``, or a module's checkpoint, whose content is then loaded
            as this component, regardless of its name there.
        component: A component, e.g. ``"learner_group/learner/rl_module/p1"``.

    Raises:
        CheckpointError: There is no such component.
    """
    component = component.strip("/")
    place = checkpoint_place(path)
    if component == _MODULES or component.startswith(f"{_MODULES}/"):
        module_id = component.removeprefix(_MODULES).lstrip("/") or None
        return {"learner_group": {"learner": {"rl_module": read_module_states(place, module_id)}}}
    name, _, inside = component.partition("/")
    return {name: read_part(place, name, inside or None)}


def with_stored_seed(config: _Config, path: str | Path) -> _Config:
    """Return `config`, with the stored seed if it has none.

    Runners and learners that had joined the run must find the same config.
    """
    if config.seed is not None:
        return config
    seed = read_checkpoint(checkpoint_place(path), _CONFIG)[_CONFIG]["values"].get("seed")
    return config if seed is None else config.copy(copy_frozen=False).debugging(seed=seed)


_LEARNER = "learner_group/learner"
_PAIRS = "Continue CQL and IQL as SAC, BC and MARWIL as PPO, APPO or IMPALA, with the same model_config and spaces."


def starts_online_run(path: str | Path, config: BaseConfig) -> bool:
    """Return whether the checkpoint at a path is an offline algorithm's, and `config` an online one's."""
    if _is_offline(config):
        return False
    folder, _ = find_inside(path)
    try:
        saved = read_manifest(folder)["about"].get("config")
        return saved is not None and _is_offline(config_class_named(str(saved))())
    except CheckpointError:
        return False


def _is_offline(config: BaseConfig) -> bool:
    return config.update_plan().num_env_steps == 0


def online_state(
    state: Mapping[str, Any], modules: MultiRLModule, optimizers: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return what an online run takes over: the learners' weights, and the state of optimizers of the same name.

    Networks that the online modules lack (IQL's value function) and their optimizers are left out; networks that only
    they have (the temperature, after IQL) keep their initial weights. One log line names both. Target networks that
    only they have (APPO's) become copies of the loaded ones. Counts start at zero, since schedules, warm-up and replay
    ratio follow the env steps of the new run.

    Args:
        state: The offline run's state, or a part of it.
        modules: The online run's modules.
        optimizers: State of the online run's optimizers, by module id and name.
        where: The checkpoint's path, for messages.

    Raises:
        CheckpointError: The online run has no module of a saved one's id, the checkpoint lacks a network that the
            online modules act with, or its networks have other shapes.
    """
    learner = to_parts(state).get(_LEARNER, {})
    if "rl_module" not in learner:
        return dict(state)
    taken: dict[str, Any] = {"rl_module": {}, "optimizer": {}}
    left_out: set[str] = set()
    fresh: set[str] = set()
    for module_id, weights in learner["rl_module"].items():
        if module_id not in modules:
            raise CheckpointError(
                f"{where}: expected modules {sorted(modules.keys())} of this run, got {module_id!r}. Name this run's "
                "module so, or load the weights into one of its modules: learner_group.load_module_state("
                f"rl_module_ckpt_dirs={{{min(modules.keys())!r}: '{where}/{_LEARNER}/rl_module/{module_id}'}})."
            )
        own = modules[module_id]
        names = own.get_state()
        parts, saved_parts = _parts(names), _parts(weights)
        unable = sorted(_parts(own.get_state(inference_only=True)) - saved_parts)
        if unable:
            raise CheckpointError(
                f"{where}: {own.describe()} acts with {', '.join(unable)}, which the checkpoint lacks; it has "
                f"{', '.join(sorted(saved_parts))}. {_PAIRS}"
            )
        unfit = [
            f"{name} has the shape {np.shape(value)}, expected {np.shape(names[name])}"
            for name, value in weights.items()
            if name in names and np.shape(value) != np.shape(names[name])
        ]
        if unfit:
            raise CheckpointError(
                f"{where}: {own.describe()} has other networks than the checkpoint: {'; '.join(unfit[:4])}. {_PAIRS}"
            )
        taken["rl_module"][module_id] = {
            name: value for name, value in weights.items() if _part(name) in parts
        }
        left_out |= saved_parts - parts
        fresh |= parts - saved_parts - {_part(name) for name in own.targets_missing_in(weights).values()}
        mine = optimizers.get(module_id, {})
        taken["optimizer"][module_id] = {
            name: saved
            for name, saved in learner.get("optimizer", {}).get(module_id, {}).items()
            if name in mine and set(saved["state"]) <= set(names)
        }
    _log.warning(
        "%s: this run continues from recorded data with the weights%s%s%s; its counts start at 0.",
        where,
        " and the optimizers" if any(taken["optimizer"].values()) else "",
        _named("; left out: ", left_out),
        _named("; with initial weights: ", fresh),
    )
    return {
        "learner_group": {"learner": {name: value for name, value in taken.items() if any(value.values())}}
    }


def _part(name: str) -> str:
    """Return the network that a parameter belongs to."""
    return name.partition(".")[0]


def _parts(names: Iterable[str]) -> set[str]:
    return {_part(name) for name in names}


def _named(what: str, names: set[str]) -> str:
    return what + ", ".join(sorted(names)) if names else ""


# Copies of the learners' state take this share of the time at most, and are this many seconds apart at least.
_COPIES_SHARE, _MIN_COPY_EVERY_S = 0.01, 1.0


class CheckpointKeeper:
    """Writer of an AsyncAlgorithm's automatic checkpoints.

    Args:
        algorithm: The algorithm.
        drain: Waits until no update is open; called before the learners' state is read.

    Attributes:
        is_on: Whether iterations have to be told to `after_iteration`, and there are `counters`.
        newest: The newest checkpoint written by this run; None before the first.
        resumed_from: The checkpoint that this run was resumed from; None for a new run.
        num_written, num_failed: Number of checkpoints that were written, and of failed writes.
    """

    def __init__(self, algorithm: Any, drain: Callable[[], Awaitable[None]]) -> None:
        self._algorithm = algorithm
        self._drain = drain
        config = algorithm.config
        self._copies = bool(config.learner_snapshot_every_s is not None and config.num_learners)
        self.is_on: bool = self._copies
        self._run_dir: RunDir | None = None
        self._every_s: float | None = None
        self._begun_at = self._copied_at = -math.inf  # the first one is due after the first iteration
        self._copy_every_s = 0.0
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._score: float | None = None
        self.newest: Path | None = None
        self.resumed_from: Path | None = None
        self.num_written = 0
        self.num_failed = 0

    def keep(self, directory: str | Path | RunDir, *, every_s: float | None, num: int | None) -> None:
        """Start writing automatic checkpoints, the first one after the next iteration.

        Args:
            directory: Directory of the numbered checkpoints, or a run directory that may be taken already.
            every_s: Seconds between the starts of two writes; None: ``config.checkpoint_every_s``. If that is None,
                too, only `write` writes checkpoints.
            num: Number of newest checkpoints to keep besides the one with the best mean return; None:
                ``config.checkpoint_keep``.

        Raises:
            ConfigurationError: Another driver has the directory, or the checkpoints in it are another run's.
        """
        config = self._algorithm.config
        run_dir = directory if isinstance(directory, RunDir) else RunDir.of_checkpoints(directory)
        self.close()
        run_dir.take()
        try:
            run_dir.check_continued_from(self.newest or self.resumed_from)
        except ConfigurationError:
            run_dir.release()
            raise
        run_dir.keep = config.checkpoint_keep if num is None else num
        self._run_dir = run_dir
        self.is_on = True
        self._every_s = config.checkpoint_every_s if every_s is None else every_s

    def counters(self) -> dict[str, int]:
        """Return the counters for the result's ``fault_tolerance``; {} without a directory."""
        if self._run_dir is None:
            return {}
        return {"num_checkpoints": self.num_written, "num_failed_checkpoints": self.num_failed}

    async def after_iteration(self, result: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
        """Start a checkpoint, or copy the learners' state, if due. Called between two iterations.

        Args:
            result: The iteration's result.
            evaluation: Its evaluation; {} if it has none.
        """
        places = (result["env_runners"], evaluation.get("env_runners", {}))
        scores = [float(place.get("episode_return_mean", math.nan)) for place in places]
        self._score = next(filter(math.isfinite, scores), None)  # an offline run has only the latter
        now = time.monotonic()
        if self._is_due(now):
            await self._begin()
        elif self._copies and now - self._copied_at >= self._copy_every_s:
            await self._drain()
            await self._algorithm.session.learner_group.get_state()  # keeps a copy
            self._copied_at = time.monotonic()
            spared_s = max(_MIN_COPY_EVERY_S, (self._copied_at - now) / _COPIES_SHARE)
            self._copy_every_s = min(self._algorithm.config.learner_snapshot_every_s, spared_s)

    async def write(self, *, state_timeout_s: float | None = None) -> Path:
        """Write a checkpoint now, unless there is one of this iteration, and return its path.

        Args:
            state_timeout_s: Time for the processes to send their states; None: unlimited. Writing has no limit.

        Raises:
            CheckpointError: The checkpoint cannot be written. Earlier ones are unchanged.
            TimeoutError: The states did not arrive in time.
        """
        assert self._run_dir is not None
        await self._off_loop(self.wait)
        if self.newest is None or int(self.newest.name) != self._algorithm.iteration:
            waits = state_timeout_s is not None and needs_processes(self._algorithm.config)
            async with asyncio.timeout(state_timeout_s) if waits else contextlib.nullcontext():
                await self._begin()
            await self._off_loop(self.wait)
            if self._error is not None:
                raise self._error
        assert self.newest is not None
        return self.newest

    async def write_if_possible(self, timeout_s: float) -> None:
        """Write a checkpoint if the learners still respond. Called when a run fails or is interrupted."""
        if self._run_dir is None:
            return
        try:
            await self.write(state_timeout_s=timeout_s)
        except (TimeoutError, RlzmqError) as error:
            _log.warning(
                "The last checkpoint could not be written (%r): the previous one remains the newest.", error
            )

    def wait(self) -> None:
        """Wait for the current write to finish."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Wait for the current write, and release the directory. Idempotent."""
        self.wait()
        if self._run_dir is not None:
            self._run_dir.release()
            self._run_dir = None

    # -- private --------------------------------------------------------------------------------

    def _is_due(self, now: float) -> bool:
        if self._run_dir is None or self._every_s in (None, math.inf) or now - self._begun_at < self._every_s:
            return False
        return self._writing is None or not self._writing.is_alive()

    async def _begin(self) -> None:
        """Get the state, and start a thread that writes it."""
        assert self._run_dir is not None
        algorithm, run_dir = self._algorithm, self._run_dir
        self._begun_at = self._copied_at = time.monotonic()
        # Copied because the next update changes the arrays of a learner in this process.
        state = to_parts(copy.deepcopy(await algorithm.get_state()))
        components, about = to_components(algorithm._dispatch.algorithm, algorithm.config, state)
        iteration = int(algorithm.iteration)
        about |= {
            "iteration": iteration,
            "score": self._score,
            "num_env_steps_trained_lifetime": state["algorithm"]["results"]["num_env_steps_trained_lifetime"],
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

        def write() -> None:
            self._error = None
            try:
                self.newest = run_dir.write(iteration, components, about)
            except (CheckpointError, TypeError, OSError) as error:
                self._error = error
                self.num_failed += 1
                faults.record("checkpoint_failed", iteration=iteration, error=str(error))
                _log.warning("%s Training continues; earlier checkpoints are unchanged.", error)
            else:
                self.num_written += 1
                faults.record("checkpoint", iteration=iteration, path=str(self.newest))

        # `wait` joins it. A daemon, so that a hung disk does not keep the process alive.
        self._writing = threading.Thread(target=write, name="rlzmq-checkpoint", daemon=True)
        self._writing.start()

    async def _off_loop(self, function: Callable[[], None]) -> None:
        """Run a blocking function, on a thread if there is an event loop."""
        if needs_processes(self._algorithm.config):
            await asyncio.to_thread(function)
        else:
            function()
