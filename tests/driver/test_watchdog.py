"""A run that stands still for a reason that nobody watches for: reported, formed anew once, ended."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from recovery_runs import small

from rlzmq.core.errors import StandstillError
from rlzmq.core.patience import Patience
from rlzmq.core.run_dir import find_checkpoint


def impatient(algo: Any, min_s: float) -> None:
    algo.session.pipeline._watchdog._patience = Patience(min_s)


async def test_a_standstill_is_reported_formed_anew_and_ends_the_run_with_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlzmq")
    async with small(1, 1).build_async() as algo:
        algo.keep_checkpoints(tmp_path)
        for _ in range(2):
            await algo.train()
        impatient(algo, 1.0)
        dumped = []
        runner = algo.env_runner_group.handles[0]
        runner.dump_stacks = lambda: dumped.append(runner)
        algo.session.pipeline._driver.core.open_update = lambda update: []  # the broker never hears of it
        with pytest.raises(StandstillError, match="waits for the driver to open update 2"):
            await algo.train()
        assert algo.session.fault_tolerance()["num_broker_restarts"] == 1
        assert algo.session.fault_tolerance()["num_learner_group_reforms"] == 1
    assert "Re-forming broker and learner group, once" in caplog.text
    assert dumped == [runner, runner]
    assert find_checkpoint(tmp_path).path is not None


async def test_a_standstill_that_forming_anew_ends_is_survived() -> None:
    async with small(1, 1).build_async() as algo:
        await algo.train()
        impatient(algo, 4.0)
        pipeline = algo.session.pipeline
        broker = pipeline._broker.handle
        await broker.apply(lambda role: setattr(role._core._grants, "progress", lambda now: None))
        result = await algo.train()  # no lease is granted until another broker comes
        assert result["learners"]["default_policy"]["weights_seq_no"] == 2
        assert pipeline._broker.handle is not broker
        assert (await algo.train())["fault_tolerance"]["num_broker_restarts"] == 1
