"""AsyncAlgorithm: a run from configuration to results, as coroutines.

    plan ──► pipeline.run_update ──report──► results ──► callbacks, evaluation, checkpoints

The pipeline is one of two with the same face: serial (everything in this process) or through the
broker (any number of runner and learner processes).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.algorithms.checkpoint_keeper import CheckpointKeeper
from rlzmq.algorithms.checkpoints import (
    check_algorithm_class,
    config_to_go_on_with,
    latest_checkpoint,
    read_algorithm,
    read_component,
    write_algorithm,
)
from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.module_changes import ModuleChanges, modules_to_store, stored_spec
from rlzmq.algorithms.policy import Policy
from rlzmq.algorithms.results import ResultBuilder, merge_into
from rlzmq.algorithms.state_tree import select, to_parts, to_tree, wants
from rlzmq.core.callbacks import CallbackList
from rlzmq.core.errors import CheckpointError, ClosedError
from rlzmq.core.frozen import freeze_known, thaw
from rlzmq.core.log_level import apply_log_level
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.suggest import did_you_mean
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runtime.module_configs import ModuleConfigs
from rlzmq.runtime.reports import Accounting
from rlzmq.runtime.session import Session

__all__ = ["AsyncAlgorithm"]


class AsyncAlgorithm:
    """Trains, evaluates, saves and restores.

    Use it as an async context manager, so that every process ends with the block:

    Example::

        async with PPOConfig().environment("CartPole-v1").build_async() as algo:
            async for result in algo.results():
                if result["env_runners"]["episode_return_mean"] >= 450:
                    break

    Args:
        config: Validated and frozen, as ``config.build_async()`` passes it.

    Attributes:
        config: The run's config.
        iteration: Training iterations done.
        metrics: The MetricsLogger whose values join each result.
        env_runner_group, eval_env_runner_group, learner_group: The processes (or local objects).
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.iteration = 0
        apply_log_level(config)
        self.metrics = MetricsLogger(root=True, stats_cls_lookup=config.custom_stats_cls_lookup)
        self.callbacks = CallbackList(config)
        self.session = Session(config)
        self._results = ResultBuilder(config, self.metrics)
        self._evaluation = Evaluation(config, self.session)
        self._algorithm: Any = self  # what callbacks are given; the sync face puts itself here
        self._is_stopped = False
        self._modules = ModuleChanges(config)
        self._policies: dict[Any, tuple[int, Policy]] = {}
        self._keeper = CheckpointKeeper(self)
        self._is_cut_short = False

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start processes, build modules, bring weights everywhere.

        Raises:
            ConfigurationError, RlzmqError: What is wrong; whatever was started is stopped again.
        """
        try:
            await self.session.start()
            self.session.learner_group.algorithm = self
            await self._evaluation.start()
        except BaseException:
            await self.stop()
            raise
        await self._call("on_algorithm_init", metrics_logger=self.metrics)

    async def stop(self) -> None:
        """End every process of the run. May be called twice."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            await self._evaluation.stop()
        finally:
            await self.session.stop()
            self._keeper.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- training -------------------------------------------------------------------------------

    async def train(self) -> dict[str, Any]:
        """One iteration: training steps until the minima of `config.reporting()` are met.

        Returns:
            The result dict, under RLlib's keys.
        """
        self.begin_iteration()
        while True:
            start = time.perf_counter()
            returned = await self.training_step()
            self.after_training_step(returned, time.perf_counter() - start)
            if self.iteration_is_complete():
                break
        return await self.finish_iteration()

    async def training_step(self) -> Any:
        """One update of exactly `total_train_batch_size` env steps. Override for other algorithms.

        An override may use ``await self.env_runner_group.sample(…)``,
        ``await self.learner_group.update(episodes=…)`` and ``await self.sync_weights()``; it
        returns None and reports through `self.metrics`.
        """
        report = await self.session.run_update(self._results.num_env_steps_trained_lifetime)
        self._results.add_update(report)

    async def results(self) -> AsyncIterator[dict[str, Any]]:
        """Train for as long as the caller iterates."""
        while True:
            yield await self.train()

    async def sync_weights(self) -> None:
        """Give all runners the learners' current weights (for custom training steps)."""
        await self.session.sync_weights()

    def begin_iteration(self) -> None:
        """The first part of `train`."""
        self._check_running()
        self._results.begin_iteration()

    def after_training_step(self, returned: Any, seconds: float) -> None:
        """What follows each training step of an iteration."""
        if returned is not None:
            raise ValueError(
                f"training_step() returned a {type(returned).__name__}; expected None: report values through "
                "self.metrics.log_value(…)."
            )
        for metas in self.session.take_sampled_metas():
            self._results.add_fragments(metas)
        for results, num_env_steps in self.session.take_learner_results():
            self._results.add_learner_results(results, num_env_steps)
        self._results.add_training_step(seconds)

    def iteration_is_complete(self) -> bool:
        """Whether the minima of `config.reporting()` are met, or `cut_iteration_short` was called."""
        config, results = self.config, self._results
        return self._is_cut_short or (
            results.time_this_iter_s >= (config.min_time_s_per_iteration or 0.0)
            and results.num_env_steps_this_iter >= (config.min_sample_timesteps_per_iteration or 0)
            and results.num_training_step_calls * config.total_train_batch_size
            >= (config.min_train_timesteps_per_iteration or 0)
        )

    def cut_iteration_short(self) -> None:
        """The running iteration ends with the update at hand. May be called by a signal handler."""
        self._is_cut_short = True

    async def finish_iteration(self) -> dict[str, Any]:
        """The last part of `train`: evaluation when it is due, the result, callbacks."""
        self.iteration += 1
        recreated = self.session.take_recreated_runners()
        if recreated:
            await self._call(
                "on_env_runners_recreated",
                metrics_logger=self.metrics,
                env_runner_group=self.session.env_runner_group,
                env_runner_indices=recreated,
                is_evaluation=False,
            )
        interval = self.config.evaluation_interval
        due = interval is not None and self.iteration % interval == 0 and not self._is_cut_short
        self._is_cut_short = False
        evaluation = await self.evaluate() if due else None
        fault_tolerance = {**self.session.fault_tolerance(), **self._keeper.counters()}
        result = self._results.build(self.iteration, self.session.accounting, fault_tolerance)
        result["config_seed"] = self.config.seed
        if evaluation is not None:
            merge_into(evaluation, result.get("evaluation", {}))  # what callbacks logged
            result["evaluation"] = evaluation
        await self._call("on_train_result", metrics_logger=self.metrics, result=result)
        await self._log_result(result)
        await self._keeper.after_iteration(result)
        return result

    def log_result(self, result: dict[str, Any]) -> Any:
        """Called with each iteration's result, after the callbacks. Override it to send results elsewhere."""

    async def _log_result(self, result: dict[str, Any]) -> None:
        outcome = await in_calling_thread(lambda: self._algorithm.log_result(result))
        if inspect.isawaitable(outcome):
            await outcome

    async def evaluate(self) -> dict[str, Any]:
        """One evaluation round with the current weights and connector states.

        Returns:
            ``{"env_runners": {episode_return_mean, …}}``.
        """
        self._check_running()
        await self._call("on_evaluate_start", metrics_logger=self.metrics)
        metrics = await self._evaluation.run(self._algorithm)
        await self._call("on_evaluate_end", metrics_logger=self.metrics, evaluation_metrics=metrics)
        return metrics

    async def _call(self, hook: str, **kwargs: Any) -> None:
        """The user's callbacks, where they may use the face of the algorithm that they are given."""
        if self.callbacks.has(hook):
            await in_calling_thread(lambda: self.callbacks.call(hook, algorithm=self._algorithm, **kwargs))

    # -- parts ----------------------------------------------------------------------------------

    @property
    def env_runner_group(self) -> Any:
        """The AsyncEnvRunnerGroup that samples."""
        return self.session.env_runner_group

    @property
    def eval_env_runner_group(self) -> Any:
        """The AsyncEnvRunnerGroup that evaluates (None before the first round)."""
        return self._evaluation.env_runner_group

    @property
    def learner_group(self) -> Any:
        """The AsyncLearnerGroup."""
        return self.session.learner_group

    @property
    def env_runner(self) -> Any:
        """The EnvRunner in this process; None if all runners are processes of their own."""
        return self.session.env_runner_group.local_env_runner

    @property
    def eval_env_runner(self) -> Any:
        """The evaluation EnvRunner in this process; None before the first round, and if all are processes."""
        group = self.eval_env_runner_group
        return None if group is None else group.local_env_runner

    @property
    def env_to_module_connector(self) -> Any:
        """The env-to-module pipeline of `env_runner`; without one, an equal one with the merged states."""
        return self._connector("env_to_module_connector")

    @property
    def module_to_env_connector(self) -> Any:
        """The module-to-env pipeline, likewise."""
        return self._connector("module_to_env_connector")

    def _connector(self, name: str) -> Any:
        self._check_running()
        if self.env_runner is not None:
            return getattr(self.env_runner, name.removesuffix("_connector"))
        spaces = {"__env_single__": self.session.spaces, "__env__": self.session.spaces}
        pipeline = getattr(self.config, f"build_{name}")(env=None, spaces=spaces)
        if state := self.session.get_connector_state().get(name):
            pipeline.set_state(state)
        return pipeline

    @property
    def accounting(self) -> Accounting:
        """Every env step of the run: sampled = trained + dropped (by reason) + pending."""
        return self.session.accounting

    async def get_module(self, module_id: str = "default_policy") -> Any:
        """An RLModule with the current weights, in this process.

        Raises:
            KeyError: No such module.
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

        Its first weights follow from the seed and its id, or are those of ``module_spec.load_state_path``;
        give it others with ``learner_group.set_weights({module_id: weights})`` and `sync_weights`.
        Episodes that run go on with the modules that their agents are mapped to already.

        Args:
            module_id: Its id.
            module_spec: What differs from the algorithm's default module; None: nothing. Spaces that
                it leaves open are those of the agents mapped to it, or those that all agents share.
            config_overrides: Settings for this module alone, such as ``{"lr": 1e-4}``.
            new_agent_to_module_mapping_fn: ``fn(agent_id, episode) -> module id`` from now on.
            new_should_module_be_updated: New `policies_to_train`.
            add_to_learners: False: it is never trained and keeps its first weights.
            add_to_env_runners: Whether the training runners have it.
            add_to_eval_env_runners: Whether the evaluation runners have it.

        Returns:
            The specs of the learners' modules.

        Raises:
            ValueError: There is a module of this id.
            ConfigurationError: The run is single-agent, a setting is wrong, or the module's spaces cannot be
                told. Nothing has changed then.
        """
        self._check_running()
        places = {
            "learners": add_to_learners,
            "env_runners": add_to_env_runners,
            "eval_env_runners": add_to_eval_env_runners,
        }
        added = self._modules.added(
            self.session.spaces,
            module_id,
            module_spec,
            places=[place for place, is_there in places.items() if is_there],
            config_overrides=config_overrides,
            new_agent_to_module_mapping_fn=new_agent_to_module_mapping_fn,
            new_should_module_be_updated=new_should_module_be_updated,
        )
        self._modules.has_own_rule |= new_should_module_be_updated is not None
        return await self._change_modules(*added)

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
        """Remove a module, between two iterations; episodes that run with it are dropped.

        Args:
            module_id: Its id.
            new_agent_to_module_mapping_fn: ``fn(agent_id, episode) -> module id`` from now on; it must not
                name the removed module any more.
            new_should_module_be_updated: New `policies_to_train`.
            remove_from_learners, remove_from_env_runners, remove_from_eval_env_runners: Where from.

        Returns:
            The specs of the learners' modules.

        Raises:
            KeyError: There is no such module.
            ConfigurationError: Agents are mapped to it still, or too few would be left. Nothing has
                changed then.
        """
        self._check_running()
        places = {
            "learners": remove_from_learners,
            "env_runners": remove_from_env_runners,
            "eval_env_runners": remove_from_eval_env_runners,
        }
        removed = self._modules.removed(
            self.session.spaces,
            module_id,
            places=[place for place, is_asked in places.items() if is_asked],
            new_agent_to_module_mapping_fn=new_agent_to_module_mapping_fn,
            new_should_module_be_updated=new_should_module_be_updated,
        )
        self._modules.has_own_rule |= new_should_module_be_updated is not None
        return await self._change_modules(*removed)

    async def _change_modules(
        self, configs: ModuleConfigs, change: Callable[[Any], Any]
    ) -> MultiRLModuleSpec:
        await self.session.change_modules(configs, change)
        await self._evaluation.change_modules(
            configs.eval_env_runners, configs.synced_module_ids("eval_env_runners")
        )
        self._modules.configs = configs
        self.config = self._algorithm.config = configs.run
        self._policies.clear()
        return self.session.learner_group.module_spec  # type: ignore[no-any-return]

    async def _adopt_modules(self, stored: Mapping[str, Any]) -> None:
        """Add, remove and freeze modules until there are those that a checkpoint has."""
        specs = stored.get("specs") or {}
        ids = self.config.module_ids
        for module_id in [mid for mid in specs if mid not in ids]:
            spec = stored_spec(self.config, module_id, specs[module_id])
            overrides = stored.get("overrides", {}).get(module_id)
            await self.add_module(module_id, spec, config_overrides=overrides)
        for module_id in [mid for mid in ids if specs and mid not in specs]:
            await self.remove_module(module_id)
        change = self._modules.trained_as(stored)
        if change is not None:
            await self._change_modules(*change)

    # -- acting ---------------------------------------------------------------------------------

    async def get_policy(self, *, module_id: str | None = None, agent_id: Any = None) -> Policy:
        """The current weights with their connectors, to act with; it stays as it is when training goes on.

        Args:
            module_id, agent_id: See `Policy`.

        Raises:
            KeyError: There is no such module or agent.
        """
        self._check_running()
        session = self.session
        spaces = {"__env_single__": session.spaces}
        modules = self.config.get_multi_rl_module_spec(spaces=spaces, inference_only=True).build(
            seed=self.config.seed
        )
        modules.set_state(await session.learner_group.get_weights())
        return Policy(
            self.config,
            modules,
            spaces=session.spaces,
            connector_state=session.get_connector_state(),
            module_id=module_id,
            agent_id=agent_id,
        )

    async def compute_action(
        self,
        observation: Any,
        *,
        explore: bool = False,
        reward: Any = 0.0,
        begins_episode: bool = False,
        module_id: str | None = None,
        agent_id: Any = None,
    ) -> Any:
        """The env's action for an observation, with the current weights and connectors.

        Args:
            observation, explore, reward: See `Policy.compute_action`.
            begins_episode: Whether it is an episode's first observation: states, previous frames and
                actions are forgotten. They are, too, whenever the weights have changed.
            module_id, agent_id: See `Policy`.

        Raises:
            ValueError: The observation does not fit the observation space.
        """
        key, change = (module_id, agent_id), self.session.num_weight_changes
        cached = self._policies.get(key)
        if cached is None or cached[0] != change:
            cached = change, await self.get_policy(module_id=module_id, agent_id=agent_id)
            self._policies[key] = cached
        policy = cached[1]
        if begins_episode:
            policy.reset()
        return policy.compute_action(observation, explore=explore, reward=reward)

    # -- checkpoints ----------------------------------------------------------------------------

    async def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
    ) -> dict[str, Any]:
        """What a checkpoint holds, as a tree: ``state["learner_group"]["learner"]["rl_module"]["p0"]``, ….

        Args:
            components: Only these, as paths such as ``"learner_group/learner/rl_module/p0"``; None: all.
            not_components: Without these.

        Raises:
            ValueError: An unknown component.
        """
        self._check_running()

        def is_wanted(name: str) -> bool:
            return wants(name, components, not_components)

        parts = await self.session.get_state(with_runners=is_wanted("env_runners"))
        if is_wanted("eval_env_runners") or is_wanted("evaluation"):
            parts |= await self._evaluation.get_state()
        parts["algorithm"] = {
            "iteration": self.iteration,
            "results": self._results.get_state(),
            "metrics": freeze_known(self.metrics.get_state()),
        }
        parts["modules"] = modules_to_store(
            self.config, self.session.spaces, has_own_rule=self._modules.has_own_rule
        )
        return select(to_tree(parts), components, not_components)

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`'s output: modules, learners, runners, connectors and counters.

        With one env runner (or none) and one learner, the run goes on bit for bit as the one that the
        state was taken of: see docs/reliability.md.

        Args:
            state: All of it, or some components, or parts of them: the others stay as they are. Weights of one
                module, say: ``{"learner_group": {"learner": {"rl_module": {"p0": weights}}}}``.

        Raises:
            ValueError: An unknown component.
            KeyError: Weights of a module that is not there.
        """
        self._check_running()
        parts = to_parts(state)
        if "modules" in parts:
            await self._adopt_modules(parts["modules"])
        else:
            self._check_modules(parts.get("learner_group/learner", {}).get("rl_module", {}))
        await self.session.set_state(parts)
        own = parts.get("algorithm", {})
        self.iteration = own.get("iteration", self.iteration)
        if "results" in own:
            self._results.set_state(own["results"])
        if "metrics" in own:
            self.metrics.set_state(thaw(own["metrics"]))
        await self._evaluation.set_state(parts)
        if "algorithm" in parts:
            await self._call("on_checkpoint_loaded")

    def _check_modules(self, module_ids: Iterable[str]) -> None:
        known = self._modules.configs.learners.module_ids
        for module_id in module_ids:
            if module_id not in known:
                raise KeyError(f"the learners have no module {module_id!r}.{did_you_mean(module_id, known)}")

    async def save_to_path(self, path: str | Path | None = None) -> str:
        """Write a checkpoint, atomically.

        Args:
            path: Its directory (replaced if it exists); None: a new one in the temporary directory.

        Returns:
            The absolute path.

        Raises:
            CheckpointError: It could not be written; a former checkpoint at `path` is untouched.
        """
        state = to_parts(await self.get_state())
        written = write_algorithm(path, self._algorithm, self.config, state)
        await self.session.note_checkpoint(state)
        return written

    async def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Take over a checkpoint's state, or one component of it; the config stays this algorithm's own.

        Args:
            path: A checkpoint, or a run directory: its newest whole one. With `component` also a path into one, or
                a module's own checkpoint: what is there becomes this component.
            component: E.g. ``"learner_group/learner/rl_module/p0"``; all others stay as they are.

        Raises:
            CheckpointError: No whole checkpoint of a known version lies there; nothing has changed.
        """
        self._check_running()
        await self.set_state(read_algorithm(path) if component is None else read_component(path, component))

    @classmethod
    async def from_checkpoint(
        cls, path: str | Path, *, config: Any = None, trust_code: bool = False
    ) -> AsyncAlgorithm:
        """A started algorithm that goes on from a checkpoint.

        Args:
            path: The checkpoint's directory.
            config: In place of the stored one.
            trust_code: Whether functions and classes that the stored config names are imported.

        Raises:
            CheckpointError: It is torn, altered, of an unknown version, or of a class of its own.
        """
        state = read_algorithm(path)
        if cls is AsyncAlgorithm:
            check_algorithm_class(path, cls)
        chosen = config_to_go_on_with(path, state, config, trust_code=trust_code)
        algorithm = cls(chosen._for_build(None, True))
        await algorithm.start()
        try:
            await algorithm.set_state(state)
        except BaseException:
            await algorithm.stop()
            raise
        return algorithm

    def keep_checkpoints(
        self, directory: str | Path, *, every_s: float | None = None, num: int | None = None
    ) -> None:
        """From now on `train` writes checkpoints by itself, as ``directory/000123`` (by iteration).

        Each is taken between two updates and written on a thread while training goes on. A write that
        fails is logged and counted (``num_failed_checkpoints``); the others stay as they are.

        Args:
            directory: Of the checkpoints, e.g. ``"runs/mine/checkpoints"``.
            every_s: Seconds between two of them; None: ``config.checkpoint_every_s``.
            num: How many of the newest stay, the best by mean return beside them; None:
                ``config.checkpoint_keep``.
        """
        config = self.config
        self._keeper.keep(
            directory,
            every_s=config.checkpoint_every_s if every_s is None else every_s,
            num=config.checkpoint_keep if num is None else num,
        )

    async def save_checkpoint(self) -> Path:
        """Write one where `keep_checkpoints` says, now; its path.

        Raises:
            CheckpointError: It could not be written; former ones are untouched.
        """
        self._check_running()
        return await self._keeper.write()

    @classmethod
    async def resume(
        cls, directory: str | Path, *, config: Any = None, trust_code: bool = False
    ) -> AsyncAlgorithm:
        """A started algorithm that goes on in a run directory, and keeps its checkpoints there.

        It begins with the newest whole checkpoint in it, or anew where there is none.

        Args:
            directory: Of the run; checkpoints are in ``checkpoints/`` below it.
            config: For a run that begins anew, and in place of the stored one.
            trust_code: Whether functions and classes that the stored config names are imported.

        Raises:
            CheckpointError: There is no checkpoint, and `config` is None.
        """
        newest = latest_checkpoint(directory)
        if newest is not None:
            algorithm = await cls.from_checkpoint(newest, config=config, trust_code=trust_code)
        elif config is None:
            raise CheckpointError(f"{directory} holds no whole checkpoint. Pass config=… to begin anew.")
        else:
            algorithm = cls(config._for_build(None, True))
            await algorithm.start()
        algorithm.keep_checkpoints(Path(directory) / "checkpoints")
        return algorithm

    def _check_running(self) -> None:
        if self._is_stopped:
            raise ClosedError("This algorithm was stopped. Build a new one, or use from_checkpoint().")
