"""AsyncAlgorithm: a run from configuration to results, as coroutines.

| part                                   | has                                                         |
|----------------------------------------|-------------------------------------------------------------|
| `session`                              | runners, learners and the pipeline between them             |
| `TrainingLoop`, `Iterations`           | the order of an iteration; what its training steps reported |
| `Evaluation`                           | the evaluation's runners and rounds                         |
| `RunModules`                           | which modules are where                                     |
| `CurrentPolicies`                      | the current weights, to act with                            |
| `RunState`, `CheckpointKeeper`         | the state as a tree; checkpoints that are written by itself |
| `Face`                                 | what the user holds, and callbacks                          |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlzmq.algorithms.callback_dispatch import Face
from rlzmq.algorithms.checkpoint_keeper import CheckpointKeeper
from rlzmq.algorithms.checkpoints import (
    check_algorithm_class,
    config_to_go_on_with,
    latest_checkpoint,
    read_algorithm,
    read_component,
    write_algorithm,
)
from rlzmq.algorithms.current_policies import CurrentPolicies
from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.iterations import Iterations
from rlzmq.algorithms.policy import Policy
from rlzmq.algorithms.run_modules import RunModules
from rlzmq.algorithms.run_state import RunState
from rlzmq.algorithms.state_tree import to_parts
from rlzmq.algorithms.training_loop import TrainingLoop
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import CheckpointError, ClosedError
from rlzmq.core.log_level import apply_log_level
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.tracebacks import ShortTraceback
from rlzmq.driver.session import Session
from rlzmq.driver.update_results import Accounting
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

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
        metrics: The MetricsLogger whose values join each result.
        session: Who samples and who learns.
    """

    def __init__(self, config: BaseConfig) -> None:
        apply_log_level(config)
        self.metrics = MetricsLogger(root=True, stats_cls_lookup=config.custom_stats_cls_lookup)
        self.session = Session(config)
        self._face = Face(self, config)
        self._is_stopped = False
        self._iterations = Iterations(config, self.session, self.metrics)
        self._evaluation = Evaluation(config, self.session, self._face, self.metrics)
        self._modules = RunModules(config, self.session, self._evaluation)
        self._state = RunState(self.session, self._evaluation, self._modules, self._iterations)
        self._policies = CurrentPolicies(self.session)
        self._keeper = CheckpointKeeper(self)
        self._loop = TrainingLoop(
            self.session, self._iterations, self._evaluation, self._keeper, self._face, self.metrics
        )

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start processes, build modules, bring weights everywhere.

        Raises:
            ConfigurationError, RlzmqError: What is wrong; whatever was started is stopped again.
        """
        with ShortTraceback():
            try:
                await self.session.start()
                self.session.learner_group.algorithm = self
                await self._evaluation.start()
            except BaseException:
                await self.stop()
                raise
            await self._face.call("on_algorithm_init", metrics_logger=self.metrics)

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
        self._check_running()
        with ShortTraceback():
            return await self._loop.train(self.training_step, self.evaluate)

    async def training_step(self) -> Any:
        """One update of exactly `total_train_batch_size` env steps. Override for other algorithms.

        An override may use ``await self.env_runner_group.sample(…)``,
        ``await self.learner_group.update(episodes=…)`` and ``await self.sync_weights()``; it
        returns None and reports through `self.metrics`.
        """
        results = self._iterations.results
        results.add_update(await self.session.run_update())

    async def results(self) -> AsyncIterator[dict[str, Any]]:
        """Train for as long as the caller iterates."""
        while True:
            yield await self.train()

    async def sync_weights(self) -> None:
        """Give all runners the learners' current weights (for custom training steps)."""
        await self.settle()
        await self.session.sync_weights()

    async def settle(self) -> None:
        """Wait until no update is under way: with `staleness` >= 1 some run ahead of `training_step`."""
        await self._iterations.settle()

    def cut_iteration_short(self) -> None:
        """The running iteration ends with the update at hand. May be called by a signal handler."""
        self._iterations.cut_short()

    def log_result(self, result: dict[str, Any]) -> Any:
        """Called with each iteration's result, after the callbacks. Override it to send results elsewhere."""

    async def evaluate(self) -> dict[str, Any]:
        """One evaluation round with the current weights and connector states.

        Returns:
            ``{"env_runners": {episode_return_mean, …}}``.
        """
        self._check_running()
        with ShortTraceback():
            return await self._evaluation.run()

    # -- parts ----------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The run's config, with the modules that it has now; frozen."""
        return self._modules.configs.run

    @property
    def iteration(self) -> int:
        """Training iterations done."""
        return self._iterations.num_done

    @property
    def callbacks(self) -> Any:
        """All callbacks of the config."""
        return self._face.callbacks

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
        self._check_running()
        return self.session.get_pipeline("env_to_module")

    @property
    def module_to_env_connector(self) -> Any:
        """The module-to-env pipeline, likewise."""
        self._check_running()
        return self.session.get_pipeline("module_to_env")

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
        await self.settle()
        return await self._modules.add(
            module_id,
            module_spec,
            places={
                "learners": add_to_learners,
                "env_runners": add_to_env_runners,
                "eval_env_runners": add_to_eval_env_runners,
            },
            config_overrides=config_overrides,
            new_agent_to_module_mapping_fn=new_agent_to_module_mapping_fn,
            new_should_module_be_updated=new_should_module_be_updated,
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
        await self.settle()
        return await self._modules.remove(
            module_id,
            places={
                "learners": remove_from_learners,
                "env_runners": remove_from_env_runners,
                "eval_env_runners": remove_from_eval_env_runners,
            },
            new_agent_to_module_mapping_fn=new_agent_to_module_mapping_fn,
            new_should_module_be_updated=new_should_module_be_updated,
        )

    # -- acting ---------------------------------------------------------------------------------

    async def get_policy(self, *, module_id: str | None = None, agent_id: Any = None) -> Policy:
        """The current weights with their connectors, to act with; it stays as it is when training goes on.

        Args:
            module_id, agent_id: See `Policy`.

        Raises:
            KeyError: There is no such module or agent.
        """
        self._check_running()
        return await self._policies.make(module_id=module_id, agent_id=agent_id)

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
        self._check_running()
        return await self._policies.compute_action(
            observation,
            explore=explore,
            reward=reward,
            begins_episode=begins_episode,
            module_id=module_id,
            agent_id=agent_id,
        )

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
        return await self._state.get(components, not_components)

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
        if await self._state.set(state):
            await self._face.call("on_checkpoint_loaded")

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
        written = write_algorithm(path, self._face.algorithm, self.config, state)
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
        cls, path: str | Path, *, config: BaseConfig | None = None, trust_code: bool = False
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
        self._keeper.keep(directory, every_s=every_s, num=num)

    async def save_checkpoint(self) -> Path:
        """Write one where `keep_checkpoints` says, now; its path.

        Raises:
            CheckpointError: It could not be written; former ones are untouched.
        """
        self._check_running()
        return await self._keeper.write()

    @classmethod
    async def resume(
        cls, directory: str | Path, *, config: BaseConfig | None = None, trust_code: bool = False
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
