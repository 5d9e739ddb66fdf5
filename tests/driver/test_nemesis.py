"""Random kills during training: nothing accepted is lost, nothing is trained twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.core import faults
from scripts.nemesis import ROLES, Nemesis
from tests.support.fault_history import check_history, read_history
from tests.support.runs import small


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every process of the test's run, this one too, says what it did."""
    with monkeypatch.context() as patch:
        patch.setenv("RLZMQ_HISTORY", str(tmp_path))
        faults.arm("driver")
        yield tmp_path
    faults.arm("driver")  # as the variables say: nothing any more


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [8, pytest.param(15, marks=pytest.mark.slow)])
async def test_kills_each_long_before_everybody_is_back(history: Path, num_kills: int) -> None:
    sizes = {"num_env_runners": 2, "num_envs_per_env_runner": 4, "num_learners": 2}
    config = small(train_batch_size_per_learner=160, minibatch_size=40, **sizes)
    async with config.build_async() as algo:
        roles = list(ROLES)
        nemesis = Nemesis(algo, num_kills=num_kills, roles=roles, seed=3, how="kill", is_impatient=True)
        await nemesis.run()
    verdict = check_history(read_history(history))
    assert verdict.num_killed == num_kills, "each of them seen in the exit status"
    assert set(nemesis.gaps_s) == set(ROLES), "runners, learner ranks and the broker were all hit"
    assert "0 lost, 0 trained twice" in str(verdict)
