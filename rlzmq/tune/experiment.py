"""Experiment: runs the trials of a search in processes, as many at a time as there are cores.

    study (Optuna) ── claim ──► trial ── waits for cores ──► TrialProcess ── result ──► stopper, scheduler
          ▲                       ▲                               │                           │
          └─ end, report ─────────┴── pause, killed, failed ──────┴───────── next iteration ◄─┘

| consumes | produces | waits for | unblocked by |
|---|---|---|---|
| waiting entries of the study | trial processes | free cores | a trial that ends or pauses |
| results of trial processes | decisions, files, ended entries | the next result | the trial, or its process's end |
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import to_json
from rlzmq.config.search_space import GridSearch, SearchObject, find_search_objects, replace_values
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import opener
from rlzmq.core.process import num_usable_cores
from rlzmq.core.update_plan import derive_seed
from rlzmq.telemetry.runs import number_at, value_at
from rlzmq.telemetry.view import View
from rlzmq.tune.result_grid import Result, ResultGrid, TrialError
from rlzmq.tune.schedulers import (
    CONTINUE,
    Decision,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
    metric_and_mode,
)
from rlzmq.tune.search import BasicVariantGenerator, config_value, resolve
from rlzmq.tune.settings import RunConfig, TuneConfig
from rlzmq.tune.stopper import NoopStopper, make_stopper, missing_metrics
from rlzmq.tune.study import Claim, EndedTrial, Study
from rlzmq.tune.trial import Trial
from rlzmq.tune.trial_api import TrialContext
from rlzmq.tune.trial_process import TrialProcess

__all__ = ["Experiment"]

_log = logging.getLogger("rlzmq.tune")

T = TypeVar("T")

_TICK_S = 2.0  # between heartbeats, and between checks of other machines' progress
_STOP_S = 5.0  # that a trial has for its clean-up before it is killed
_STUDY_FILE = "study.db"


class Experiment:
    """One driver's share of a search.

    Args:
        trainable: An Algorithm class, a Trainable class or a function.
        trainable_name: Its name.
        param_space: A config or dict with search objects.
        tune_config, run_config: The settings.
        path: The experiment's directory.
        resources: Resources of one trial, ``{"cpu": n}``; None: derived from its config.
        view: Displays the trials.

    Raises:
        ConfigurationError: The settings are incompatible.
    """

    def __init__(
        self,
        trainable: object,
        trainable_name: str,
        param_space: Any,
        tune_config: TuneConfig,
        run_config: RunConfig,
        path: Path,
        resources: Mapping[str, float] | None,
        view: View[Sequence[Trial]],
    ) -> None:
        self._trainable = trainable
        self._trainable_name = trainable_name
        self._param_space = param_space
        self._tune = tune_config
        self._run_config = run_config
        self._path = path
        limits = param_space if isinstance(param_space, BaseConfig) else BaseConfig()
        self._watch = CallWatch(limits.slow_call_warning_s)
        self._resources = resources
        self._view = view
        self._space: dict[str, SearchObject] = find_search_objects(param_space)
        self._searcher = tune_config.search_alg or BasicVariantGenerator()
        self._stopper = make_stopper(run_config.stop)
        self._scheduler: TrialScheduler = tune_config.scheduler or FIFOScheduler()
        metric, mode = metric_and_mode(self._searcher, tune_config.metric, tune_config.mode)
        self._scheduler.set_search_properties(metric, mode)
        self._metric, self._mode = metric or self._scheduler.metric, mode or self._scheduler.mode
        self._num_cores = num_usable_cores()
        self._trials: list[Trial] = []
        self._tasks: dict[asyncio.Task[None], Trial] = {}
        self._is_over = False
        self._is_interrupted = False
        self._error: BaseException | None = None
        self._deadline = (
            None if tune_config.time_budget_s is None else time.monotonic() + tune_config.time_budget_s
        )
        self._store = ThreadPoolExecutor(1, thread_name_prefix="tune-study")
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="tune-callbacks")
        self._num_results, self._has_metric = 0, False
        self._check_ends()

    # -- the loop -------------------------------------------------------------------------------------------

    async def run(self, runs_again: Callable[[EndedTrial], bool]) -> ResultGrid:
        """Run until every trial has ended; return their results.

        Args:
            runs_again: Maps an ended trial to whether it runs again.

        Raises:
            ConfigurationError: Results lack the search's metric, or all metrics that end trials.
            BaseException: A trial's error, with ``fail_fast="raise"``.
        """
        self._watch.start("tune-calls")
        try:
            await self._open(runs_again)
            try:
                with self._view:
                    async with ActorSystem() as system:
                        system.preload([TrialProcess.__module__])
                        await self._run_trials(system)
            finally:
                await self._on_store(self._study.close)
            await self._call_back("on_experiment_end")
            if self._error is not None:
                raise self._error
            return await self._on_store(self._collect)
        finally:
            self._watch.close()
            self._store.shutdown()
            self._callbacks.shutdown()

    def interrupt(self) -> None:
        """Let trials save checkpoints after their current iterations; then `run` returns. For signal handlers, too."""
        self._is_interrupted = True

    async def stored_results(self) -> ResultGrid:
        """Return the results of the trials that have ended, without running any."""
        try:
            await self._open_study()
            await self._on_store(self._study.close)
            return await self._on_store(self._collect)
        finally:
            self._store.shutdown()

    async def _open_study(self) -> None:
        storage = self._tune.storage or f"sqlite:///{self._path / _STUDY_FILE}"
        arguments = storage, self._path.name, self._mode, self._searcher, self._space
        self._study: Study = await self._on_store(Study, *arguments, self._scheduler.make_pruner())

    async def _open(self, runs_again: Callable[[EndedTrial], bool]) -> None:
        await self._open_study()
        await self._on_store(self._study.check_space)
        await self._on_store(self._study.take_over_lost)
        await self._on_store(self._study.ensure_waiting, max(self._num_trials, 0))
        for ended in await self._on_store(self._study.ended):
            if runs_again(ended):
                await self._on_store(self._study.forget, ended.index)

    async def _run_trials(self, system: ActorSystem) -> None:
        ticker = asyncio.create_task(self._tick(), name="tune heartbeat")
        try:
            while True:
                await self._start_trials(system)
                if not self._tasks:
                    if (
                        self._is_over
                        or self._is_interrupted
                        or not await self._on_store(self._study.num_live)
                    ):
                        return
                    await asyncio.sleep(_TICK_S)  # trials are still running on other machines
                    continue
                running = {ticker, *self._tasks}
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._tasks.pop(task, None)
                    task.result()
        finally:
            for task in [ticker, *self._tasks]:
                task.cancel()
            await asyncio.gather(ticker, *self._tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await self._on_store(self._study.beat)
            await self._on_store(self._study.take_over_lost)
            if self._has_to_end():
                self._is_over = True
            await asyncio.sleep(_TICK_S)

    async def _start_trials(self, system: ActorSystem) -> None:
        """Start trials while there are free cores."""
        while not (self._is_over or self._is_interrupted):
            waiting = [trial for trial in self._trials if trial.is_waiting]
            if self._scheduler.starts_all or not waiting:
                claims_all = self._scheduler.starts_all
                while (claims_all or (not waiting and self._fits(1.0))) and (
                    new := await self._claim()
                ) is not None:
                    waiting.append(new)
            if not waiting:
                return
            trial = self._scheduler.choose(waiting)
            if not self._fits(self._cpus_of(trial)):
                return
            trial.status = "RUNNING"
            task = asyncio.create_task(self._run_trial(system, trial), name=trial.name)
            self._tasks[task] = trial
            self._view.show(self._trials)

    async def _claim(self) -> Trial | None:
        """Take over a waiting trial of the study, or None."""
        if self._num_trials < 0:
            await self._on_store(lambda: self._study.ensure_waiting(self._study.num_entries + 1))
        claim: Claim | None = await self._on_store(self._study.claim)
        if claim is None:
            return None
        trial = Trial(claim, self._trainable_name)
        directory, problem = trial.name, None
        try:
            trial.first_config = trial.config = self._config_of(claim)
        except ConfigurationError as error:
            problem = error
        else:
            trial.name, directory = await self._names_of(trial)
        trial.open(self._path / directory)
        self._trials.append(trial)
        if problem is not None:
            await self._end(trial, problem)
            return await self._claim()
        if trial.checkpoints:
            trial.changes = dict(trial.checkpoints[-1].changes)
            trial.last_result = trial.checkpoints[-1].result
        trial.config = replace_values(trial.first_config, trial.changes)
        self._scheduler.on_trial_add(trial)
        return trial

    async def _names_of(self, trial: Trial) -> tuple[str, str]:
        """Return the names of a trial and of its directory."""
        create_name, create_directory = self._tune.trial_name_creator, self._tune.trial_dirname_creator
        if trial.claim.names:
            name, directory = trial.claim.names
            return name, directory
        if create_name is None and create_directory is None:
            return trial.name, trial.name
        with self._watch.call("a function of TuneConfig that names trials"):
            if create_name is not None:
                trial.name = create_name(trial)
            directory = (
                re.sub("[/()]", "_", trial.name) if create_directory is None else create_directory(trial)
            )
        for setting, text in (("trial_name_creator", trial.name), ("trial_dirname_creator", directory)):
            if not isinstance(text, str) or not text.strip():
                raise ConfigurationError(f"TuneConfig({setting}=…) returned {text!r}; expected a name.")
        if "/" in directory or directory.startswith("."):
            raise ConfigurationError(
                f"TuneConfig(trial_dirname_creator=…) returned {directory!r}; expected the name of a directory."
            )
        if (self._path / directory).exists():
            directory = f"{directory}_{trial.trial_id}"
        await self._on_store(self._study.store_names, trial.claim, (trial.name, directory))
        return trial.name, directory

    # -- one trial --------------------------------------------------------------------------------------------

    async def _run_trial(self, system: ActorSystem, trial: Trial) -> None:
        """Run a trial until it ends or pauses; restart it if it fails and may do so."""
        await self._call_back("on_trial_start", trial)
        while not self._is_over:
            try:
                ends = await self._run_process(system, trial)
            except ActorLostError as error:
                trial.num_kills += 1
                most = self._run_config.failure_config.max_kills
                if 0 <= most < trial.num_kills:
                    await self._end(trial, error)
                    return
                _log.warning("%s: %s. It is restarted.", trial.name, str(error).partition("\n")[0])
            except Exception as error:
                trial.num_failures += 1
                most = self._run_config.failure_config.max_failures
                if 0 <= most < trial.num_failures:
                    await self._end(trial, error)
                    return
                _log.warning("%s raised %r. It is restarted.", trial.name, error)
            else:
                if ends:
                    await self._end(trial, None)
                return

    async def _run_process(self, system: ActorSystem, trial: Trial) -> bool:
        """Start a trial's process and take its results; return whether the trial has ended (else it pauses)."""
        while True:
            newest = trial.rewind()
            if trial.last_result.get("done"):  # its driver died before the study knew
                return True
            trial.write_config()
            handle = await system.spawn(
                TrialProcess,
                self._trainable,
                trial.config,
                TrialContext(
                    experiment_name=self._path.name,
                    trial_id=trial.trial_id,
                    trial_name=trial.name,
                    trial_dir=str(trial.path.absolute()),
                    trial_resources={"cpu": self._cpus_of(trial)},
                ),
                None if newest is None else str(trial.path / newest.name),
                {} if newest is None else newest.result,
                self._run_config.log_files,
                self._run_config.log,
                name=f"{self._trainable_name}_{trial.trial_id}-{trial.num_kills}-{trial.num_failures}",
                deadline_s=0,
            )
            trial.pid = handle.pid
            try:
                decision = await self._take_results(handle, trial)
            finally:
                await self._stop_process(handle)
            if decision.action == "pause":
                trial.status = "PAUSED"
            if decision.action == "pause" or decision.exploits is None:
                return decision.action == "stop"

    async def _take_results(self, handle: ActorHandle, trial: Trial) -> Decision:
        """Take results until the trial ends, pauses, or continues from another trial's checkpoint."""
        checkpoints = self._run_config.checkpoint_config
        ended = Decision("stop")
        while True:
            got = await handle.call("train")
            result = got["result"]
            if result is None:
                return ended
            if got["has_checkpoint"]:
                trial.last_result = result
                trial.adopt_staged(checkpoints)
            decision = self._decide(trial, result, is_pruned=await self._report(trial, result))
            result["done"] = decision.action == "stop"
            trial.log(result)
            self._check_metric(result)
            self._num_results += 1
            await self._call_back("on_trial_result", trial, result=result)
            self._view.show(self._trials)
            is_last = decision.action == "stop"
            frequency = checkpoints.checkpoint_frequency
            at_end = checkpoints.checkpoint_at_end
            if is_last and at_end is None:
                at_end = isinstance(self._trainable, type)
            is_due = bool(frequency and result["training_iteration"] % frequency == 0) or bool(
                is_last and at_end
            )
            if is_due or (decision.saves and decision.exploits is None):
                await self._save(handle, trial, is_kept=is_due)
            elif self._is_interrupted and decision.action == "continue":
                await self._save(handle, trial, is_kept=False)
                return Decision("pause")
            if decision.exploits is not None:
                decision = self._exploit(trial, decision)
            if decision.action != "continue" or decision.exploits is not None:
                return decision

    def _decide(self, trial: Trial, result: dict[str, Any], is_pruned: bool) -> Decision:
        """Return the decision about a trial after a result."""
        with self._watch.call("the search's scheduler or stopper"):
            decision = self._scheduler.on_trial_result(trial, result)
            if is_pruned and decision.action == "continue":
                decision = self._scheduler.on_trial_pruned(trial)
            try:
                is_met = self._stopper(trial.trial_id, result)
            except ConfigurationError as error:
                self._give_up(error)
                is_met = False
            if is_met or result["done"]:
                decision = Decision("stop")
            if self._stopper.stop_all() or self._has_to_end():
                self._is_over = True
        return Decision("stop") if self._is_over else decision

    def _check_metric(self, result: Mapping[str, Any]) -> None:
        """Give up if results lack the metric: no trial could be compared with another."""
        if self._metric is None or self._has_metric:
            return
        missing, text = missing_metrics("TuneConfig(metric=…)", [self._metric], result)
        self._has_metric = value_at(result, self._metric) is not None
        if missing:
            self._give_up(
                ConfigurationError(f"{text} Every result needs a number there, NaN until there is one.")
            )

    def _give_up(self, error: ConfigurationError) -> None:
        """Let all trials pause, as an interrupt does, and `run` raise an error of the settings they share."""
        self._error = self._error or error
        self._is_interrupted = True

    async def _save(self, handle: ActorHandle, trial: Trial, *, is_kept: bool) -> None:
        path = trial.new_checkpoint_path()
        if await handle.call("save", str(path)):
            trial.add_checkpoint(path, is_kept=is_kept, config=self._run_config.checkpoint_config)

    def _exploit(self, trial: Trial, decision: Decision) -> Decision:
        """Make the trial continue from another trial's checkpoint; return its next decision."""
        source = decision.exploits
        assert source is not None
        changed = replace_values(trial.first_config, {**source.changes, **decision.changes})
        iteration = trial.last_result["training_iteration"]
        result = trial.copy_checkpoint(source, decision.changes, self._run_config.checkpoint_config)
        if result is None:  # the source has not saved anything so far
            return CONTINUE
        old, trial.config = trial.config, changed
        if isinstance(self._scheduler, PopulationBasedTraining):
            self._scheduler.note_exploited(trial, result)
            if self._scheduler.log_config:
                values = [
                    {path: config_value(config, path) for path in decision.changes}
                    for config in (old, changed)
                ]
                line = [trial.name, source.name, iteration, result["training_iteration"], *to_json(values)]
                with open(self._path / "pbt_global.txt", "a", encoding="utf-8", opener=opener) as file:
                    file.write(json.dumps(line) + "\n")
        return decision

    async def _stop_process(self, handle: ActorHandle) -> None:
        try:
            await handle.stop(_STOP_S)
        except Exception as error:  # raised by the trial's clean-up; its result still counts
            _log.warning("%s could not clean up: %r", handle.name, error)
        finally:
            handle.kill()

    async def _report(self, trial: Trial, result: Mapping[str, Any]) -> bool:
        """Record the metric in the study, where dashboards and other machines see it; return whether it is pruned."""
        at = self._scheduler.time_of(result)
        value = None if self._metric is None else value_at(result, self._metric)
        if at is None or not isinstance(value, int | float):
            return False
        value = float(value) if math.isfinite(value) else math.nan  # Optuna's worst
        return await self._on_store(self._study.report, trial.claim, int(at), value)

    async def _end(self, trial: Trial, error: BaseException | None) -> None:
        """End a trial, in the study and in its directory."""
        if error is not None:
            trial.write_error(error)
            _log.error("%s failed: %s (see %s)", trial.name, _summary(error), trial.path / "error.txt")
        trial.status = "TERMINATED" if error is None else "ERROR"
        self._scheduler.on_trial_end(trial)
        value = number_at(trial.last_result, self._metric or "training_iteration")
        text = "" if error is None else _summary(error)
        counts = await self._on_store(
            self._study.end, trial.claim, trial.status, trial.path.absolute(), trial.last_result, value, text
        )
        if not counts:
            _log.warning("%s was taken over by another driver, whose result counts.", trial.name)
            self._trials.remove(trial)
        self._view.show(self._trials)
        await self._call_back("on_trial_complete" if error is None else "on_trial_error", trial)
        fail_fast = self._run_config.failure_config.fail_fast
        if error is not None and fail_fast:
            self._is_over = True
            if fail_fast == "raise":
                self._error = self._error or error

    async def _call_back(self, hook: str, trial: Trial | None = None, **info: object) -> None:
        """Call a hook of the callbacks on their thread; an error in it ends the search."""
        if trial is not None:
            info |= {"iteration": self._num_results, "trial": trial}
        for callback in self._run_config.callbacks or ():
            call = functools.partial(getattr(callback, hook), trials=list(self._trials), **info)
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._callbacks, self._watched, f"{type(callback).__name__}.{hook}", call
                )
            except Exception as error:
                error.add_note(f"Raised by {type(callback).__name__}.{hook} of RunConfig(callbacks=…).")
                self._is_over = True
                self._error = self._error or error

    def _watched(self, what: str, call: Callable[[], object]) -> None:
        with self._watch.call(what):
            call()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _config_of(self, claim: Claim) -> Any:
        """Return the config of a trial."""
        seed = derive_seed(self._study.seed, "trial", claim.index)
        config = resolve(self._param_space, self._space, claim.parameters, seed)
        if isinstance(config, BaseConfig):
            config = config.copy(copy_frozen=False)
            if config.seed is None:
                config.debugging(seed=seed)
            if config.torch_num_threads == "auto" and self._tune.max_concurrent_trials != 1:
                config.learners(torch_num_threads=1)  # the other cores belong to other trials
            config.validate()
        return config

    def _cpus_of(self, trial: Trial) -> float:
        """Return how many cores a trial occupies."""
        if self._resources is not None:
            return self._resources["cpu"]
        config = trial.config
        if not isinstance(config, BaseConfig):
            return 1.0
        evaluates = config.evaluation_num_env_runners if config.evaluation_interval else 0
        return float(max(config.num_env_runners + config.num_learners + evaluates, 1))

    def _fits(self, cpus: float) -> bool:
        """Return whether a trial can start; one that needs more cores than there are runs alone."""
        running = [trial for trial in self._trials if trial.status == "RUNNING"]
        limits = (self._tune.max_concurrent_trials or 0, self._searcher.max_concurrent)
        if any(limit and len(running) >= limit for limit in limits):
            return False
        if self._tune.max_concurrent_trials:
            return True
        return not running or sum(map(self._cpus_of, running)) + cpus <= self._num_cores

    def _has_to_end(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def _num_trials(self) -> int:
        """Return the number of trials in the search; -1: no limit."""
        num_points = 1
        for item in self._space.values():
            num_points *= len(item.values) if isinstance(item, GridSearch) else 1
        return -1 if self._tune.num_samples < 0 else self._tune.num_samples * num_points

    def _check_ends(self) -> None:
        is_algorithm = isinstance(self._trainable, type) and issubclass(self._trainable, Algorithm)
        ends = (
            not isinstance(self._stopper, NoopStopper)
            or self._deadline is not None
            or self._scheduler.ends_trials
        )
        if self._scheduler.starts_all and self._tune.num_samples < 0:
            name = type(self._scheduler).__name__
            raise ConfigurationError(f"{name} needs a population: set TuneConfig(num_samples=…) to its size.")
        if self._run_config.log and not is_algorithm:
            raise ConfigurationError(
                f"RunConfig(log={self._run_config.log!r}) writes the results of algorithms; {self._trainable_name} can "
                "call the tracker itself, or a tune.Callback can."
            )
        if self._searcher.make_sampler(0) is not None and None in (self._metric, self._mode):
            raise ConfigurationError(
                "TuneConfig(search_alg=OptunaSearch(…)) chooses values by results: set TuneConfig(metric=…, mode='max' "
                "or 'min'), too."
            )
        if is_algorithm and not ends:
            raise ConfigurationError(
                f"{self._trainable_name} never ends by itself: set RunConfig(stop=…), e.g. "
                "stop={'training_iteration': 10}, or TuneConfig(time_budget_s=…)."
            )

    async def _on_store(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function on the study's thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._store, functools.partial(function, *arguments)
        )

    def _collect(self) -> ResultGrid:
        """Return the results of all ended trials, including those of earlier drivers and other machines."""
        own = {trial.claim.index: trial for trial in self._trials}
        results = []
        for ended in self._study.ended():
            path = Path(ended.path)
            trial = own.get(ended.index)
            if not (path / "params.json").is_file():  # on another machine
                error = TrialError(ended.error) if ended.error else None
                results.append(Result(ended.result, {}, ended.path, error if trial is None else trial.error))
                continue
            # The files may have lines of a driver that was too slow.
            result = dataclasses.replace(Result.from_path(path), metrics=ended.result)
            if trial is not None:
                config = trial.config.to_dict() if isinstance(trial.config, BaseConfig) else trial.config
                result = dataclasses.replace(result, config=config, error=trial.error)
            results.append(result)
        return ResultGrid(results, str(self._path), self._metric, self._mode)


def _summary(error: BaseException) -> str:
    """Return the error's type and text."""
    return "".join(traceback.format_exception_only(error)).partition("\n")[0]
