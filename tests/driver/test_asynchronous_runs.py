"""Runs whose runners sample ahead of the learners: bounded age, whole accounts, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlzmq import APPOConfig, IMPALAConfig, PPOConfig
from tests.support.runs import ShortEnv, assert_accounted, until_async
from tests.support.runs import small as small_run

BATCH = 240


def small(config_class: Any, num_learners: int) -> Any:
    sizes = {"num_env_runners": 2, "num_envs_per_env_runner": 4, "rollout_fragment_length": 10}
    batch = {"train_batch_size_per_learner": BATCH // num_learners, "staleness": 2}
    return small_run(config_class, num_learners=num_learners, **sizes, **batch, min_time_s_per_iteration=0)


def check(result: dict[str, Any]) -> None:
    account = assert_accounted(result)
    assert account["trained"] <= result["num_env_steps_trained_lifetime"], "APPO trains some of them twice"
    assert account["trained"] % BATCH == 0
    lag = result["policy_lag"]
    steps = lag["num_env_steps"]
    assert 0 <= lag["min"] <= lag["mean"] <= lag["max"] <= 2
    assert sum(steps) % BATCH == 0
    assert sum(steps) > 0
    assert next(index for index, count in enumerate(steps) if count) == lag["min"]
    assert len(steps) == lag["max"] + 1
    assert lag["mean"] == pytest.approx(sum(index * count for index, count in enumerate(steps)) / sum(steps))


@pytest.mark.parametrize(
    ("config_class", "num_learners"),
    [pytest.param(IMPALAConfig, 1, marks=pytest.mark.slow), (APPOConfig, 2), (PPOConfig, 1)],
)
async def test_runners_sample_ahead_and_no_trained_step_is_older_than_the_staleness(
    config_class: Any, num_learners: int, tmp_path: Path
) -> None:
    async with small(config_class, num_learners).build_async() as algo:
        lags = []
        for _ in range(12):
            result = await algo.train()
            check(result)
            lags.append(result["policy_lag"]["max"])
        assert max(lags) > 0, "nothing was sampled ahead"
        # A checkpoint holds what was trained, and nothing half done.
        path = await algo.save_to_path(tmp_path / "checkpoint")
        saved = algo.accounting.to_dict()
        state = await algo.get_state("learner_group")
        assert state["learner_group"]["learner"]["weights_seq_no"] * BATCH == saved["trained"]
        await algo.restore_from_path(path)
        result = await algo.train()
        check(result)
        assert result["accounting"]["trained"] == saved["trained"] + BATCH


class Marked(ShortEnv):
    """Each step gives 100 in an episode that began while a file was there, otherwise 1."""

    def reset(self, **options: Any) -> Any:
        self.each = 100.0 if Path(self.config["marker"]).exists() else 1.0
        return super().reset(**options)

    def reward(self, action: Any) -> float:
        return self.each


async def test_episodes_of_a_state_that_is_replaced_reach_no_result(tmp_path: Path) -> None:
    marker = tmp_path / "replaced"
    config = small(IMPALAConfig, 1).environment(Marked, env_config={"marker": str(marker)})
    async with config.build_async() as algo:
        await algo.train()
        state = await algo.get_state()
        marker.touch()
        while (await algo.train())["env_runners"]["episode_return_max"] < 500:
            pass  # and runners sample ahead
        await algo.set_state(state)
        marker.unlink()
        for _ in range(3):
            result = await algo.train()
            assert result["env_runners"]["episode_return_max"] == Marked.length
        assert assert_accounted(result)["dropped"]["rolled_back"] > 0


async def test_reports_that_nobody_has_read_are_accounted_for_when_the_learners_state_is_replaced() -> None:
    config = small(IMPALAConfig, 1).fault_tolerance(learner_snapshot_every_s=None)
    async with config.build_async() as algo:
        await algo.train()
        link = algo.session.pipeline._driver
        await until_async(lambda: all(future.done() for future in link.open_reports.values()))
        num_trained = algo.accounting.trained
        await algo.session.restart()
        assert algo.accounting.trained == num_trained + 2 * BATCH
        assert_accounted(await algo.train())
