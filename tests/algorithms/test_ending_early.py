"""Ends that come in the middle of user code: an evaluation is given up, a runner does not wait for its env."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlzmq import PPOConfig
from tests.support.runs import ShortEnv, small


class Endless(ShortEnv):
    """Writes down that it steps and that it is closed; see `notes`.

    Config: ``notes``: directory; ``length``: steps per episode, 0: no end; ``interrupts_at``: a step of the env's
    life that is interrupted; ``blocks_from``: one from which on steps never return.
    """

    num_steps = 0

    def note(self, what: str) -> None:
        if "notes" in self.config:
            Path(self.config["notes"], what).touch()

    def step(self, action: Any) -> Any:
        self.note("steps")
        self.num_steps += 1
        if self.num_steps == self.config.get("interrupts_at"):
            raise KeyboardInterrupt
        if self.num_steps >= self.config.get("blocks_from", 10**9):
            self.note("blocks")
            threading.Event().wait()
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.t == self.config.get("length", 5), False, info

    def close(self) -> None:
        self.note("closed")


def config_of(num_env_runners: int, **evaluation: Any) -> PPOConfig:
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 2, **evaluation}
    batch = {"num_envs_per_env_runner": 1, "train_batch_size_per_learner": 20, "minibatch_size": 20}
    return small(env=Endless, num_env_runners=num_env_runners, **batch, **evaluation)  # type: ignore[no-any-return]


@contextmanager
def once_it_steps(notes: Path, call: Any) -> Iterator[None]:
    """Calls a function on another thread, as a signal handler would, once an env steps."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            if (notes / "steps").exists():
                call()
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("num_env_runners", "evaluation"),
    [
        (0, {}),
        (1, {}),
        (0, {"evaluation_num_env_runners": 1}),
        (0, {"evaluation_num_env_runners": 1, "evaluation_parallel_to_training": True}),
    ],
)
def test_an_evaluation_that_never_ends_is_given_up_and_the_iteration_kept(
    num_env_runners: int, evaluation: dict[str, Any], tmp_path: Path
) -> None:
    endless = {"env_config": {"notes": str(tmp_path), "length": 0}}
    config = config_of(num_env_runners, evaluation_config=endless, **evaluation)
    with config.build() as algo:
        with once_it_steps(tmp_path, algo.cut_iteration_short):
            result = algo.train()
        assert result["training_iteration"] == 1
        assert result["accounting"]["trained"] >= 20
        assert "evaluation" not in result
        checkpoint = algo.save_to_path(tmp_path / "saved")
        weights = algo.get_module().get_state()
    again = config_of(0).evaluation(evaluation_interval=None)
    with again.build() as algo:
        algo.restore_from_path(checkpoint)
        restored = algo.get_module().get_state()
        assert all((restored[name] == value).all() for name, value in weights.items())


def test_a_round_that_was_given_up_is_followed_by_another_one(tmp_path: Path) -> None:
    settings = {"notes": str(tmp_path), "length": 0}
    config = config_of(0, evaluation_config={"env_config": settings})
    config.evaluation(evaluation_duration_unit="timesteps", evaluation_duration=10**9)
    with config.build() as algo:
        for _ in range(2):
            (tmp_path / "steps").unlink(missing_ok=True)
            with once_it_steps(tmp_path, algo.cut_iteration_short):
                assert "evaluation" not in algo.train()


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_runner_that_is_stopped_closes_its_env_unless_that_is_in_a_step(
    blocks: bool, tmp_path: Path
) -> None:
    settings = {"notes": str(tmp_path), "length": 0, "blocks_from": 1 if blocks else 10**9}
    config = config_of(0, evaluation_num_env_runners=1, evaluation_config={"env_config": settings})
    async with config.build_async() as algo:
        handle = algo.eval_env_runner_group.handles[0]
        round_ = asyncio.ensure_future(handle.sample(num_episodes=1))
        while not (tmp_path / "steps").exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
        round_.cancel()
        status = await handle.stop(timeout_s=60)
        assert status.exit_code == 0, "it ended by itself, though its call never ends"
        assert (tmp_path / "closed").exists() == (not blocks)


def test_an_interrupted_update_is_left_out_of_the_last_checkpoint(tmp_path: Path) -> None:
    config = config_of(0).environment(env_config={"interrupts_at": 50})
    config.evaluation(evaluation_interval=None)
    with config.build() as algo:
        algo.keep_checkpoints(tmp_path / "checkpoints")
        assert algo.save_interrupted(60.0) is None, "nothing was trained"
        algo.train()
        algo.train()
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        saved = algo.save_interrupted(60.0)
        assert saved == tmp_path / "checkpoints" / "000002"
        assert algo.save_interrupted(60.0) == saved, "there is one of this iteration"
        weights = algo.get_module().get_state()
    check_resumed(config, saved, weights)


async def test_an_update_that_never_ends_is_left_out_of_the_last_checkpoint(tmp_path: Path) -> None:
    config = config_of(1).environment(env_config={"notes": str(tmp_path), "blocks_from": 50})
    config.evaluation(evaluation_interval=None)
    async with config.build_async() as algo:
        algo.keep_checkpoints(tmp_path / "checkpoints")
        training = asyncio.ensure_future(train_on(algo))
        while not (tmp_path / "blocks").exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
        while algo.iteration < 2:  # noqa: ASYNC110 (its batches are on their way)
            await asyncio.sleep(0.01)
        training.cancel()
        await asyncio.wait((training,))
        saved = await algo.save_interrupted(60.0)
        assert saved == tmp_path / "checkpoints" / "000002"
        weights = (await algo.get_module()).get_state()
    check_resumed(config, saved, weights)


async def train_on(algo: Any) -> None:
    while True:
        await algo.train()


def check_resumed(config: PPOConfig, saved: Path, weights: dict[str, Any]) -> None:
    resumed = config.copy(copy_frozen=False).env_runners(num_env_runners=0).environment(env_config={})
    with resumed.build() as algo:
        algo.restore_from_path(saved)
        restored = algo.get_module().get_state()
        assert all((restored[name] == value).all() for name, value in weights.items())
        assert algo.train()["training_iteration"] == 3
