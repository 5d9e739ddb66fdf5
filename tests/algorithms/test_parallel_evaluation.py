"""Evaluation beside training: that both run at once, how a round ends, and what is left of one that fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import PPO, ClosedError, ConfigurationError, PPOConfig
from tests.support.runs import ShortEnv, assert_accounted, small, weights_of


def meet(place: str, side: str) -> None:
    """Return once the other side is there, too: each end of a FIFO waits for the other to be opened."""
    os.close(os.open(place, os.O_RDONLY if side == "training" else os.O_WRONLY))


class Meeting(ShortEnv):
    """Does what its config says in a step of its life.

    Config: ``meet`` and ``meet_at``: where and at which step it meets another; ``fail``, ``kill``: a file whose
    first finder raises, or kills its process, at its third step.
    """

    num_steps = 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if self.num_steps == self.config.get("meet_at"):
            meet(self.config["meet"], self.config["side"])
        if self.num_steps == 3:
            if self.takes("fail"):
                raise ZeroDivisionError("the evaluation's own mistake")
            if self.takes("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def observation(self) -> Any:
        return np.full(2, self.t / 5, np.float32)

    def takes(self, what: str) -> bool:
        if what not in self.config:
            return False
        try:
            os.unlink(self.config[what])
        except FileNotFoundError:
            return False
        return True


def parallel(processes: tuple[int, int] = (0, 0), training: Any = None, **evaluating: Any) -> PPOConfig:
    """A small run with one evaluation runner.

    Args:
        processes: Env runners and learners.
        training: The training envs' config.
        evaluating: The evaluation envs' config.
    """
    evaluation = {"env_config": {**evaluating, "side": "evaluation"}}
    return small(  # type: ignore[no-any-return]
        env=Meeting,
        env_config={**(training or {}), "side": "training"},
        num_env_runners=processes[0],
        num_envs_per_env_runner=1,
        num_learners=processes[1],
        train_batch_size_per_learner=40,
        restart_failed_sub_environments=False,
        seed=3,
    ).evaluation(
        evaluation_interval=1,
        evaluation_duration=2,
        evaluation_parallel_to_training=True,
        evaluation_num_env_runners=1,
        evaluation_config=evaluation,
    )


def auto(config: PPOConfig, num_env_steps: int = 10) -> PPOConfig:
    return config.evaluation(
        evaluation_duration="auto",
        evaluation_auto_duration_min_env_steps_per_sample=num_env_steps,
        evaluation_auto_duration_max_env_steps_per_sample=num_env_steps,
    )


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def mark(tmp_path: Path) -> str:
    path = tmp_path / "mark"
    path.touch()
    return str(path)


@pytest.mark.parametrize("processes", [(0, 0), (1, 0)])
def test_training_and_evaluation_run_at_once(processes: tuple[int, int], fifo: str) -> None:
    config = parallel(processes, {"meet": fifo, "meet_at": 7}, meet=fifo, meet_at=3)
    with config.build() as algo:
        results = [algo.train() for _ in range(2)]
        versions = algo.eval_env_runner_group.foreach_env_runner(lambda runner: runner.weights_seq_no)
    assert versions == [1]  # of the second round: the weights from before that iteration
    for number, result in enumerate(results, start=1):
        evaluation = result["evaluation"]["env_runners"]
        assert (evaluation["num_episodes"], evaluation["num_episodes_lifetime"]) == (2, 2 * number)
        assert evaluation["hist_stats"]["episode_return"] == [5.0, 5.0]
        assert assert_accounted(result)["trained"] >= 40 * number


def test_auto_lasts_as_long_as_training(fifo: str) -> None:
    config = auto(parallel((1, 0), {"meet": fifo, "meet_at": 40}, meet=fifo, meet_at=35))
    with config.build() as algo:
        rounds = [algo.train()["evaluation"]["env_runners"] for _ in range(2)]
        counts = [
            algo.eval_env_runner_group.foreach_env(lambda env: env.unwrapped.num_steps) for _ in range(2)
        ]
        alone = algo.evaluate()["env_runners"]
    assert rounds[0]["num_env_steps_sampled"] >= 35  # the last training step waited for these
    assert rounds[1]["num_env_steps_sampled"] >= 10
    assert counts[0] == counts[1] == [[rounds[1]["num_env_steps_sampled_lifetime"]]]  # nobody samples on
    assert alone["num_env_steps_sampled"] == 10
    assert rounds[0]["episode_return_mean"] == 5.0


def test_training_is_the_same_with_and_without() -> None:
    def weights_after_two(config: PPOConfig) -> dict[str, Any]:
        with config.build() as algo:
            algo.train()
            algo.train()
            return weights_of(algo)

    without = weights_after_two(parallel().evaluation(evaluation_interval=None))
    np.testing.assert_equal(weights_after_two(auto(parallel())), without)


def test_rounds_keep_to_their_interval_and_other_calls_come_in_between() -> None:
    class Asks(PPO):
        def training_step(self) -> None:
            super().training_step()
            # An auto round lasts until this step is over: it lets others in all the same.
            self.seen.append(self.eval_env_runner_group.foreach_env(lambda env: env.unwrapped.config["side"]))
            if self.iteration == 1:
                self.alone = self.evaluate()["env_runners"]["num_env_steps_sampled_lifetime"]

        seen: list[Any]
        alone: int

    with Asks(auto(parallel()).evaluation(evaluation_interval=2)) as algo:
        algo.seen = []
        assert "evaluation" not in algo.train()
        evaluation = algo.train()["evaluation"]["env_runners"]
        counts = algo.get_state("eval_env_runner")["eval_env_runner"]["lifetime_counts"]
    assert algo.seen == [[["evaluation"]], [["evaluation"]]]
    # A round of one's own within an iteration comes after the iteration's.
    assert algo.alone == evaluation["num_env_steps_sampled_lifetime"] + 10
    assert counts["num_env_steps_lifetime"] == algo.alone


@pytest.mark.parametrize("make", [parallel, lambda **kw: auto(parallel(**kw))], ids=["fixed", "auto"])
def test_a_killed_evaluation_runner_is_replaced_within_the_round(
    make: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    with make(kill=mark(tmp_path)).build() as algo:
        result = algo.train()
        assert algo._async.eval_env_runner_group.num_restarts == 1
    assert result["evaluation"]["env_runners"]["num_episodes"] >= 2
    assert result["accounting"]["trained"] >= 40


@pytest.mark.parametrize("make", [parallel, lambda **kw: auto(parallel(**kw))], ids=["fixed", "auto"])
async def test_a_round_that_fails_fails_its_own_iteration(
    make: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    async with make(processes=(1, 0), fail=mark(tmp_path)).build_async() as algo:
        before = asyncio.all_tasks()
        with pytest.raises(Exception, match="the evaluation's own mistake"):
            await algo.train()
        assert asyncio.all_tasks() <= before
        assert algo.iteration == 1
        result = await algo.train()
        assert result["evaluation"]["env_runners"]["num_episodes"] >= 2
        assert result["accounting"]["trained"] >= 80


@pytest.mark.parametrize("error", [asyncio.CancelledError, ClosedError])
async def test_an_iteration_that_is_cancelled_or_stopped_leaves_no_round(
    error: type[BaseException], fifo: str
) -> None:
    """The training's runner waits for the test in its first step, while an evaluation goes on; then the interrupt."""
    config = auto(parallel((1, 0), {"meet": fifo, "meet_at": 1}))
    config.training(train_batch_size_per_learner=10_000)  # does not end before the interrupt
    async with config.build_async() as algo:
        before = asyncio.all_tasks()
        task = asyncio.create_task(algo.train())
        await asyncio.to_thread(meet, fifo, "evaluation")  # the round is under way by then
        if error is ClosedError:
            await algo.stop()
        else:
            task.cancel()
        with pytest.raises(error):
            await task
        assert not any(task.get_name().startswith("evaluation") for task in asyncio.all_tasks() - before)
        if error is asyncio.CancelledError:
            assert (await algo.evaluate())["env_runners"]["num_env_steps_sampled"] == 10


def log_ends(*, metrics_logger: Any, **kwargs: Any) -> None:
    metrics_logger.log_value("ends", 1, reduce="sum")


def test_a_custom_function_evaluates_while_training_goes_on(fifo: str) -> None:
    def evaluate(algorithm: Any, group: Any) -> Any:
        meet(fifo, "evaluation")
        episodes = group.sample(num_episodes=3)
        algorithm.metrics.log_value("mine", 4)
        return {"num_mine": len(episodes)}, 15, 15

    config = (
        parallel((1, 0), {"meet": fifo, "meet_at": 7})
        .evaluation(custom_evaluation_function=evaluate)
        .callbacks(on_episode_end=log_ends)
    )
    with config.build() as algo:
        result = algo.train()
    assert result["evaluation"]["env_runners"] == {"num_mine": 3}
    assert result["evaluation"]["num_env_steps_sampled_this_iter"] == 15
    assert result["mine"] == 4
    assert result["env_runners"]["ends"] == result["env_runners"]["num_episodes"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_num_env_runners": 0}, r"evaluation_num_env_runners=0\. Set evaluation\("),
        ({"evaluation_parallel_to_training": False, "evaluation_duration": "auto"}, "'auto' means as"),
        ({"evaluation_auto_duration_max_env_steps_per_sample": 50}, "min_env_steps_per_sample=100"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parallel().evaluation(**settings).validate()
