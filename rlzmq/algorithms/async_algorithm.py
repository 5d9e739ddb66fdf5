"""AsyncAlgorithm: a run, with coroutine methods. `AsyncAlgorithm.train` is the order of the steps in an iteration.

training step ──reports──► complete? ──► evaluation ──► result ──► callbacks ──► checkpoints
      ▲                       │ no           ▲
      └───────────────────────┘              │
evaluation runners, if parallel to training ─┘

| part                                   | owns                                                        |
|----------------------------------------|-------------------------------------------------------------|
| `session`                              | runners, learners and the pipeline between them             |
| `Iterations`                           | the count of iterations, reports of training steps, results |
| `Evaluation`                           | the evaluation runners and rounds                           |
| `RunModules`                           | the modules of learners and runners                         |
| `CheckpointKeeper`                     | automatic checkpoints                                       |
| `CallbackDispatch`                     | the calls of callbacks                                      |
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rlzmq.actors.host import awaited
from rlzmq.algorithms.checkpoints import (
    COMPONENTS,
    CheckpointKeeper,
    check_algorithm_class,
    checkpoint_place,
    online_state,
    read_algorithm,
    read_component,
    run_to_resume,
    starts_online_run,
    to_parts,
    write_algorithm,
)
from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.results import Iterations, merge_into
from rlzmq.algorithms.run_modules import RunModules
from rlzmq.algorithms.stored_config import Given
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import trace
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.checkpoint import chosen_parts, select, to_tree
from rlzmq.core.errors import ClosedError, Interrupted, StandstillError
from rlzmq.core.imports import LazyModule
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.process import LastWords, apply_log_level, end_process
from rlzmq.core.run_dir import RunDir
from rlzmq.core.tracebacks import shorten
from rlzmq.driver.process_config import PLACES, NewRules
from rlzmq.driver.session import Session
from rlzmq.driver.synchronous import CallbackDispatch, drive, needs_processes
from rlzmq.driver.updates import Accounting
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

if TYPE_CHECKING:
    from rlzmq.algorithms import policy
else:  # it imports torch, which this process needs only to act
    policy = LazyModule("rlzmq.algorithms.policy")

__all__ = ["AsyncAlgorithm"]

_LAST_CHECKPOINT_S = 10.0
_LOOK_S = 0.1
_EXIT_HUNG = 70  # as after any other error of user code


class AsyncAlgorithm:
    """A run with coroutine methods: trains, evaluates, saves and restores.

    Use it as an async context manager, which stops all processes at the end of the block:

    Example::

        async with PPOConfig().environment("CartPole-v1").build_async() as algo:
            async for result in algo.results():
                if result["env_runners"]["episode_return_mean"] >= 450:
                    break

    Args:
        config: The config, validated and frozen, from ``config.build_async()``.

    Attributes:
        metrics: The MetricsLogger whose values join each result.
        session: Owner of the env runners and learners.
    """

    def __init__(self, config: BaseConfig) -> None:
        apply_log_level(config)
        if config.trace is not None:
            trace.create(config.trace, "driver")
        self.metrics: MetricsLogger = MetricsLogger(
            root=True, stats_cls_lookup=config.custom_stats_cls_lookup
        )
        self._watch = CallWatch(config.slow_call_warning_s, config.driver_call_timeout_s, self._end_hung)
        self._watch.start("rlzmq-calls")
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.session: Session = Session(config, self._watch)
        with self._watch.call("the constructor of the callbacks"):
            self._dispatch = CallbackDispatch(self, config, self._watch)
        # Whether what a training step raises may be no error; what this package's calls of the user's code are.
        self._has_own_step = type(self).training_step is not AsyncAlgorithm.training_step
        self._is_set_up = False
        self._is_stopped = False
        self._iterations = Iterations(config, self.session, self.metrics)
        self._counters = self._iterations.counters
        self._evaluation = Evaluation(config, self.session, self._dispatch, self.metrics)
        self._modules = RunModules(config, self.session, self._evaluation)
        # The policies of `compute_action`, and what their weights were: changes from outside, version.
        self._policies: tuple[tuple[int, int], dict[Any, policy.Policy]] = ((-1, 0), {})
        self._keeper = CheckpointKeeper(self, self._iterations.drain)
        self._last_evaluation: dict[str, Any] = {}

    # -- lifecycle -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the processes, build the modules, and send the weights to all runners.

        Raises:
            ConfigurationError, RlzmqError: The start failed; processes already started are stopped.
        """
        if needs_processes(self.config):
            self._event_loop = asyncio.get_running_loop()
        try:
            await self.session.start()
            self.session.learner_group.algorithm = self
            await self._evaluation.start()
            self._is_set_up = True
            await self._dispatch.call("on_algorithm_init", metrics_logger=self.metrics)
        except BaseException as error:
            self._is_set_up = False  # callbacks see no end of what did not begin
            await self.stop()
            shorten(error)
            raise

    async def stop(self) -> None:
        """Stop every process of the run. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            if self._is_set_up:
                await self._dispatch.call("on_algorithm_end", metrics_logger=self.metrics)
        finally:
            try:
                await self._evaluation.stop()
            finally:
                try:
                    await self.session.stop()
                finally:
                    self._keeper.close()
                    self._watch.close()
                if self.session.config.trace is not None:
                    trace.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "An algorithm owns processes, sockets and files, and cannot be pickled or copied. Pickle its config and "
            "build there, or save a checkpoint and act with Policy.load(path)."
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.stop()
        if error is not None:
            shorten(error)

    # -- training -------------------------------------------------------------------------------

    async def train(self) -> dict[str, Any]:
        """Run one iteration: training steps until the minima of `config.reporting()` are met.

        Returns:
            The result dict, under RLlib's keys.
        """
        self._check_running()
        config, iterations, evaluation = self.session.config, self._iterations, self._evaluation
        iterations.begin()
        number = iterations.num_done + 1
        is_due = _is_due(config.evaluation_interval, number)
        in_parallel = is_due and evaluation.is_parallel
        try:
            if in_parallel:
                await self._begin_parallel_round()
            while True:
                start = time.perf_counter()
                step = self.training_step()
                returned = await (awaited(step) if self._has_own_step else step)
                end = time.perf_counter()
                iterations.add_training_step(returned, end - start)
                if trace.is_on:
                    trace.span("training_step", start, end)
                if iterations.is_complete() or (in_parallel and evaluation.has_failed):
                    break
            if in_parallel:
                evaluation.end()
            iterations.end()
            if self.session.env_runner_group.recreated:
                await self._tell_recreated()
            metrics: dict[str, Any] = {}
            if is_due:
                metrics |= await self._evaluated(evaluation.finish() if in_parallel else self.evaluate())
            if _is_due(config.offline_evaluation_interval, number) and not iterations.is_cut_short:
                metrics |= await evaluation.run_offline()
            iterations.is_cut_short = False
        except StandstillError:
            await self._keeper.write_if_possible(_LAST_CHECKPOINT_S)
            raise
        finally:
            if in_parallel:
                await evaluation.abandon()
                iterations.release_logged()
        return await self._finish(metrics)

    async def training_step(self) -> Any:
        """Run one update of at least `total_train_batch_size` env steps. Custom algorithms override this.

        An override may use ``await self.env_runner_group.sample(…)``, ``await self.learner_group.update(episodes=…)``
        and ``await self.sync_weights()``. It returns None and reports through `self.metrics`.
        """
        pipeline = self.session.pipeline
        if self.session.learner_group.is_changed:
            await self.session.restart()
        batch = await pipeline.sample()  # here; or by runners, at most `staleness` batches ahead
        update = await pipeline.update(batch)  # minibatches, losses, gradients, optimizers
        await pipeline.publish(update)  # to runners: the new weights and connector states
        self._iterations.add_update(update)

    async def _tell_recreated(self) -> None:
        """Call the callbacks about runners that were replaced in this iteration."""
        group = self.session.env_runner_group
        recreated, group.recreated[:] = [*group.recreated], []
        await self._dispatch.call(
            "on_env_runners_recreated",
            metrics_logger=self.metrics,
            env_runner_group=group,
            env_runner_indices=recreated,
            is_evaluation=False,
        )

    async def _evaluated(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the result of an evaluation round; {} if the iteration is cut short in the meantime."""
        iterations = self._iterations
        if iterations.is_cut_short:
            work.close()
            return {}
        if not self.session.config.evaluation_num_env_runners:
            try:
                return await work
            except Interrupted:
                if not iterations.is_cut_short:
                    raise
                return {}
        task = asyncio.ensure_future(work)
        try:
            while not iterations.is_cut_short:
                if (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                    return task.result()
            return {}
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    async def _begin_parallel_round(self) -> None:
        if self._evaluation.calls_custom_function:
            # The function may be called, and log, on another thread than this loop's.
            self._iterations.hold_logged()
        await self._evaluation.begin(self._iterations.last_training_s)

    async def _finish(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        session = self.session
        start = time.perf_counter()
        fault_tolerance = session.fault_tolerance()
        if self._keeper.is_on:
            fault_tolerance |= self._keeper.counters()
        result = self._iterations.build_result(fault_tolerance)
        result["config_seed"] = session.config.seed
        session.pipeline.bottleneck = "{stage}: {advice}".format_map(result["bottleneck"])
        if evaluation:
            merge_into(evaluation, result.get("evaluation", {}))  # values logged by callbacks
            result["evaluation"] = self._last_evaluation = evaluation
        elif self._last_evaluation:
            merge_into(result.setdefault("evaluation", {}), copy.deepcopy(self._last_evaluation))
        await self._dispatch.call("on_train_result", metrics_logger=self.metrics, result=result)
        if getattr(self._dispatch.algorithm.log_result, "__func__", None) is not AsyncAlgorithm.log_result:
            await self._dispatch.log_result(result)
        if self._keeper.is_on:
            await self._keeper.after_iteration(result, evaluation)
        if trace.is_on:
            trace.span("report", start, time.perf_counter(), training_iteration=result["training_iteration"])
        return result

    async def results(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the results of successive iterations, as long as the caller iterates."""
        while True:
            yield await self.train()

    async def sync_weights(self) -> None:
        """Send the learners' current weights to all runners, for custom training steps."""
        await self._iterations.drain()
        await self.session.sync_weights()

    def cut_iteration_short(self) -> None:
        """End the current iteration after the current update, without an evaluation. A signal handler may call this."""
        self._iterations.cut_short()
        self._evaluation.interrupt()

    def log_result(self, result: dict[str, Any]) -> Any:
        """Handle the result of an iteration, after the callbacks. By default, do nothing; override to log results."""

    async def evaluate(self) -> dict[str, Any]:
        """Run one evaluation round with the current weights and connector states.

        Returns:
            ``{"env_runners": {episode_return_mean, …}}``.
        """
        self._check_running()
        return await self._evaluation.run()

    async def evaluate_offline(self) -> dict[str, Any]:
        """Evaluate the current weights on recorded data that an offline algorithm does not train on.

        Returns:
            ``{"offline_eval_runners": {module_id: {"total_eval_loss": …}, …}}``, or with `offline_evaluation_type` "is"
            or "pdis" ``{"offline_eval_runners": {"episode_return_mean": …, …}}``.

        Raises:
            ConfigurationError: ``evaluation_config`` has no ``input_`` of its own, or its data do not fit.
            AttributeError: The algorithm does not train on recorded data.
        """
        self._check_running()
        await self._iterations.drain()
        return await self._evaluation.run_offline()

    # -- parts ----------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The run's frozen config, with its current modules."""
        return self._modules.configs.run

    @property
    def iteration(self) -> int:
        """Number of completed training iterations."""
        return self._iterations.num_done

    @property
    def callbacks(self) -> Any:
        """All callbacks of the config."""
        return self._dispatch.callbacks

    @property
    def env_runner_group(self) -> Any:
        """The AsyncEnvRunnerGroup that samples."""
        return self.session.env_runner_group

    @property
    def eval_env_runner_group(self) -> Any:
        """The AsyncEnvRunnerGroup that evaluates; None before the first round."""
        return self._evaluation.env_runner_group

    @property
    def learner_group(self) -> Any:
        """The AsyncLearnerGroup."""
        return self.session.learner_group

    @property
    def env_runner(self) -> Any:
        """The EnvRunner in this process; None if all runners are separate processes."""
        return self.session.env_runner_group.local_env_runner

    @property
    def eval_env_runner(self) -> Any:
        """The evaluation EnvRunner in this process; None before the first round or if all are separate processes."""
        group = self.eval_env_runner_group
        return None if group is None else group.local_env_runner

    @property
    def env_to_module_connector(self) -> Any:
        """The env-to-module pipeline of `env_runner`; if that is None, an equal pipeline with the merged states."""
        self._check_running()
        return self.session.get_pipeline("env_to_module")

    @property
    def module_to_env_connector(self) -> Any:
        """The module-to-env pipeline of `env_runner`; if that is None, an equal pipeline with the merged states."""
        self._check_running()
        return self.session.get_pipeline("module_to_env")

    @property
    def accounting(self) -> Accounting:
        """Every env step of the run: sampled = trained + dropped (by reason) + pending."""
        return self.session.accounting

    async def get_module(self, module_id: str = "default_policy") -> Any:
        """Return an RLModule in this process with the current weights.

        It is a serial run's own module, otherwise a copy, which the next call and each restore bring up to date.

        Raises:
            KeyError: There is no such module.
            ClosedError: The algorithm was stopped.
        """
        self._check_running()
        return await self.session.get_module(module_id)

    # -- modules --------------------------------------------------------------------------------

    async def add_module(
        self,
        module_id: str,
        module_spec: RLModuleSpec | None = None,
        *,
        config_overrides: Mapping[str, Any] | None = None,
        new_agent_to_module_mapping_fn: Callable[..., Any] | None = None,
        new_should_module_be_updated: Any = None,
        add_to_learners: bool = True,
        add_to_env_runners: bool = True,
        add_to_eval_env_runners: bool = True,
    ) -> MultiRLModuleSpec:
        """Add a module to a multi-agent run, between two iterations.

        Its initial weights follow from the seed and its id, or are loaded from ``module_spec.load_state_path``.
        Replace them with ``learner_group.set_weights({module_id: weights})`` and `sync_weights`. Agents in ongoing
        episodes keep their modules.

        Args:
            module_id: Id of the new module.
            module_spec: Differences from the algorithm's default module; None: no differences. Missing spaces are
                those of the agents mapped to it, or those shared by all agents.
            config_overrides: Settings for this module only, such as ``{"lr": 1e-4}``.
            new_agent_to_module_mapping_fn: New ``fn(agent_id, episode) -> module id``.
            new_should_module_be_updated: New `policies_to_train`.
            add_to_learners: Whether the learners have it. If not, it is not trained and keeps its initial weights.
            add_to_env_runners: Whether the env runners that sample have it.
            add_to_eval_env_runners: Whether the evaluation runners have it.

        Returns:
            The specs of the learners' modules.

        Raises:
            ValueError: There is already a module with this id.
            ConfigurationError: The run is single-agent, a setting is invalid, the module's spaces cannot be
                determined, or the algorithm cannot train it.
            In all cases nothing has changed.
        """
        self._check_running()
        await self._iterations.drain()
        return await self._modules.add(
            module_id,
            module_spec,
            places=_chosen(add_to_learners, add_to_env_runners, add_to_eval_env_runners),
            config_overrides=config_overrides,
            rules=NewRules(new_agent_to_module_mapping_fn, new_should_module_be_updated),
        )

    async def remove_module(
        self,
        module_id: str,
        *,
        new_agent_to_module_mapping_fn: Callable[..., Any] | None = None,
        new_should_module_be_updated: Any = None,
        remove_from_learners: bool = True,
        remove_from_env_runners: bool = True,
        remove_from_eval_env_runners: bool = True,
    ) -> MultiRLModuleSpec:
        """Remove a module, between two iterations. Ongoing episodes that use it are dropped.

        Args:
            module_id: Id of the module.
            new_agent_to_module_mapping_fn: New ``fn(agent_id, episode) -> module id``. It must not return the removed
                module.
            new_should_module_be_updated: New `policies_to_train`.
            remove_from_learners, remove_from_env_runners, remove_from_eval_env_runners: Where to
                remove it.

        Returns:
            The specs of the learners' modules.

        Raises:
            KeyError: There is no such module.
            ConfigurationError: Agents are still mapped to the module, or too few modules would remain. Nothing has
                changed.
        """
        self._check_running()
        await self._iterations.drain()
        return await self._modules.remove(
            module_id,
            places=_chosen(remove_from_learners, remove_from_env_runners, remove_from_eval_env_runners),
            rules=NewRules(new_agent_to_module_mapping_fn, new_should_module_be_updated),
        )

    # -- acting ---------------------------------------------------------------------------------

    async def get_policy(self, *, module_id: str | None = None, agent_id: Hashable = None) -> policy.Policy:
        """Return a Policy with the current weights and connectors. Further training does not change it.

        Args:
            module_id, agent_id: See `Policy`.

        Raises:
            KeyError: There is no such module or agent.
        """
        self._check_running()
        session = self.session
        config, spaces = session.config, {"__env_single__": session.spaces}
        modules = config.get_multi_rl_module_spec(spaces=spaces, inference_only=True).build(seed=config.seed)
        modules.set_state(await session.learner_group.get_weights())
        return policy.Policy(
            config,
            modules,
            spaces=session.spaces,
            connector_state=session.get_connector_state(),
            module_id=module_id,
            agent_id=agent_id,
            num_env_steps_sampled=session.accounting.sampled,
        )

    async def compute_action(
        self,
        observation: Any,
        *,
        explore: bool = False,
        reward: Any = 0.0,
        begins_episode: bool = False,
        module_id: str | None = None,
        agent_id: Hashable = None,
    ) -> Any:
        """Return the env action for an observation, with the current weights and connectors.

        Args:
            observation, explore, reward: See `Policy.compute_action`.
            begins_episode: Whether it is the first observation of an episode. Module state, previous frames and
                actions are then cleared, as they are whenever the weights have changed.
            module_id, agent_id: See `Policy`.

        Raises:
            ValueError: The observation does not fit the observation space.
        """
        self._check_running()
        weights = self.session.learner_group.num_changes, self._iterations.weights_version
        if self._policies[0] != weights:
            self._policies = weights, {}
        kept = self._policies[1]
        key = module_id, agent_id
        if key not in kept:
            kept[key] = await self.get_policy(module_id=module_id, agent_id=agent_id)
        if begins_episode:
            kept[key].reset()
        return kept[key].compute_action(observation, explore=explore, reward=reward)

    # -- checkpoints ----------------------------------------------------------------------------

    async def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint's content as a tree: ``state["learner_group"]["learner"]["rl_module"]["p0"]``, ….

        Args:
            components: Components to return, as paths such as ``"learner_group/learner/rl_module/p0"``; None: all.
            not_components: Components to leave out.

        Raises:
            ValueError: A component is unknown.
        """
        self._check_running()
        chosen = chosen_parts(COMPONENTS, components, not_components, whose="an Algorithm's state")
        await self._iterations.drain()
        parts = await self.session.get_state(with_replay="learner_group" in chosen)
        if "eval_env_runner" in chosen:
            parts |= await self._evaluation.get_state()
        parts["algorithm"] = self._iterations.get_state()
        parts["modules"] = self._modules.get_state()
        return select(to_tree(parts), components, not_components)

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`: modules, learners, runners, connectors and counters.

        Env runners begin new episodes; everything else continues exactly (docs/reliability.md).

        Args:
            state: The whole state, some components, or parts of them; all others are unchanged. Example for the
                weights of one module: ``{"learner_group": {"learner": {"rl_module": {"p0": weights}}}}``.

        Raises:
            ValueError: A component is unknown.
            KeyError: The state has weights of a module that the run lacks.
        """
        self._check_running()
        parts = to_parts(state)
        await self._iterations.drain()
        if "modules" in parts:
            await self._modules.set_state(parts["modules"])
        else:
            self._modules.check(parts.get("learner_group/learner", {}).get("rl_module", {}))
        await self.session.set_state(parts)
        self._iterations.set_state(parts.get("algorithm", {}))
        await self._evaluation.set_state(parts)
        if "algorithm" in parts:  # the state of a whole run
            self._last_evaluation = {}
            await self._dispatch.call("on_checkpoint_loaded")

    async def save_to_path(self, path: str | Path | None = None) -> str:
        """Write a checkpoint atomically.

        Args:
            path: The checkpoint's directory (replaced if it exists). None: a new one in the temporary directory, which
                no run removes; its path is also logged.

        Returns:
            The absolute path.

        Raises:
            CheckpointError: The checkpoint could not be written; an earlier one at `path` is unchanged.
        """
        state = to_parts(await self.get_state())
        return write_algorithm(path, self._dispatch.algorithm, self.config, state)

    async def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Restore a checkpoint's state, or one component of it. The config of this algorithm is unchanged.

        If the checkpoint is an offline algorithm's and this one samples, its weights and optimizers are the start of
        this run, whose counts stay at zero: CQL and IQL continue as SAC, BC and MARWIL as PPO, APPO or IMPALA.

        Args:
            path: A checkpoint, or a run directory, whose newest intact checkpoint is used. With `component`, also a
                path into a checkpoint, or a module's checkpoint, whose content becomes this component.
            component: A component, e.g. ``"learner_group/learner/rl_module/p0"``; all others are unchanged.

        Raises:
            CheckpointError: There is no intact checkpoint of a known version, or it lacks a network that this
                algorithm acts with. Nothing has changed.
        """
        self._check_running()
        await self._restore(
            path, read_algorithm(path).state if component is None else read_component(path, component)
        )

    async def _restore(self, path: str | Path, state: Mapping[str, Any]) -> None:
        place = checkpoint_place(path)
        if starts_online_run(place, self.config):
            learner = (await self.get_state("learner_group/learner"))["learner_group"]["learner"]
            modules = await self.session.get_modules()
            state = online_state(state, modules, learner["optimizer"], str(place))
        elif "algorithm" in state:  # all of it, not a component
            self._keeper.resumed_from = place
        await self.set_state(state)

    @classmethod
    async def from_checkpoint(
        cls,
        path: str | Path,
        *,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> AsyncAlgorithm:
        """Return a started algorithm that continues from a checkpoint (see Algorithm.from_checkpoint)."""
        stored = read_algorithm(path)
        if cls is AsyncAlgorithm:
            check_algorithm_class(path, cls)
        chosen = stored.config_to("resume", Given(config, trust, module_class, settings))
        algorithm = cls(chosen._for_build(None, True))
        await algorithm.start()
        try:
            await algorithm._restore(path, stored.state)
        except BaseException:
            await algorithm.stop()
            raise
        return algorithm

    def keep_checkpoints(
        self,
        directory: str | Path | RunDir,
        *,
        every_s: float | None = None,
        num: int | None = None,
    ) -> None:
        """Make `train` write checkpoints automatically, as ``directory/000123`` (by iteration).

        The first is written after the next iteration. Until `stop` no other process may drive a run in this directory
        (if its name is ``checkpoints``, in its parent).

        Their state is taken between two updates and written on a thread while training continues. A failed write
        is logged and counted (``num_failed_checkpoints``); earlier checkpoints are unchanged.

        Args:
            directory: Directory of the checkpoints, e.g. ``"runs/mine/checkpoints"``, or a `RunDirectory`.
            every_s: Seconds between two checkpoints; None: ``config.checkpoint_every_s``.
            num: Number of newest checkpoints to keep besides the one with the best mean return; None:
                ``config.checkpoint_keep``.

        Raises:
            ConfigurationError: Another driver has the directory, or the checkpoints in it are another run's.
        """
        self._keeper.keep(directory, every_s=every_s, num=num)

    async def save_checkpoint(self) -> Path:
        """Write a checkpoint to the directory of `keep_checkpoints` now, and return its path.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are unchanged.
        """
        self._check_running()
        return await self._keeper.write()

    async def save_interrupted(self, within_s: float) -> Path | None:
        """Write a checkpoint after `train` was interrupted, without the update in progress. Only `stop` may follow.

        Args:
            within_s: Seconds to get the state. Then it is given up with a warning, e.g. because a learner still trains.

        Returns:
            The checkpoint, in the directory of `keep_checkpoints`, or None if this iteration has none.
        """
        await self.session.pipeline.drain(gives_up=True)
        if self.iteration:
            await self._keeper.write_if_possible(within_s)
        newest = self._keeper.newest
        return newest if newest is not None and int(newest.name) == self.iteration else None

    @classmethod
    async def resume(
        cls,
        directory: str | Path,
        *,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> AsyncAlgorithm:
        """Return a started algorithm that continues the run in a directory (see Algorithm.resume)."""
        with run_to_resume(directory, config) as (newest, run_dir):
            if newest is not None:
                algorithm = await cls.from_checkpoint(
                    newest, config=config, trust=trust, module_class=module_class, **settings
                )
            else:
                assert config is not None
                algorithm = cls(config._for_build(None, True))
                await algorithm.start()
            try:
                algorithm.keep_checkpoints(run_dir)
            except BaseException:
                await algorithm.stop()
                raise
        return algorithm

    def _end_hung(self, text: str) -> None:
        """End the process, with a last checkpoint if possible; called on the watching thread when user code hangs."""
        print(f"rlzmq: {text}", file=sys.__stderr__, flush=True)
        work = self.save_interrupted(_LAST_CHECKPOINT_S)
        with contextlib.suppress(Exception):
            if self._event_loop is None:
                drive(work)
            else:
                asyncio.run_coroutine_threadsafe(work, self._event_loop).result(_LAST_CHECKPOINT_S + 1.0)
        newest = self._keeper.newest
        where = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
        why = text.partition("\n")[0].rstrip(":")
        end_process(_EXIT_HUNG, LastWords("", f"rlzmq: ended, since {why}; {where}"))

    def _check_running(self) -> None:
        if self._is_stopped:
            raise ClosedError("This algorithm was stopped. Build a new one, or use from_checkpoint().")
        if not self._is_set_up:
            raise ClosedError(
                "This algorithm was not started. Use `async with config.build_async() as algo:`, or first "
                "`await algo.start()`."
            )


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _chosen(*are_chosen: bool) -> list[str]:
    return [place for place, is_chosen in zip(PLACES, are_chosen, strict=True) if is_chosen]
