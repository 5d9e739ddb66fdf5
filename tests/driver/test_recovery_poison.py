"""Data that would poison the weights is kept out, counted, put aside, and traced to who made it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovery_runs import check_account, small

from rlzmq import PPOConfig, PPOTorchLearner, RLlibCallback
from rlzmq.core import patience
from rlzmq.core.errors import EnvError, NotFiniteError, PeerLostError
from rlzmq.wire.payloads import decode_fragment, fragment_from_bytes
from tests.support.runs import ShortEnv, assert_accounted

BAD_VALUE = r"column 'rewards' holds nan at step \d+ of an episode \(env \d\), which no loss can use"
REFUSED = rf"\w+/\d+/\d+: unusable: {BAD_VALUE}"


class Spoils(ShortEnv):
    """Episodes of 10 steps; each ``every``-th reward is NaN, and each ``loud``-th is 100."""

    length, num_steps = 10, 0

    def reward(self, action: Any) -> float:
        self.num_steps += 1
        if self.num_steps % self.config.get("every", 10**9) == 0:
            return float("nan")
        return 100.0 if self.num_steps % self.config.get("loud", 10**9) == 0 else 0.1


class SpoilsSamples(RLlibCallback):
    """Writes NaN into what its runner has sampled, behind the runner's own check, as long as a file is not there."""

    cured = ""

    def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
        if len(samples) and not Path(self.cured).exists():
            samples.columns["rewards"][samples.start[0]] = np.nan


async def test_fragments_that_a_learner_refuses_are_put_aside_and_their_runner_is_restarted(
    tmp_path: Path,
) -> None:
    cured, quarantine = tmp_path / "cured", tmp_path / "quarantine"
    callback = type("Callback", (SpoilsSamples,), {"cured": str(cured)})
    config = (
        small(1, 2).environment(Spoils).fault_tolerance(quarantine_dir=str(quarantine)).callbacks(callback)
    )
    async with config.build_async() as algo:
        supervisor = algo.env_runner_group.supervisor
        supervisor.prepare.append(lambda *_: asyncio.to_thread(cured.touch))
        number = 0
        while algo.env_runner_group.num_restarts == 0:
            number += 1
            check_account(await algo.train(), number)
        result = await algo.train()
        check_account(result, number + 1)
        weights = (await algo.get_module()).get_state()
    assert all(np.isfinite(value).all() for value in weights.values())
    assert result["accounting"]["dropped"]["rejected"] > 0
    reasons = [json.loads(path.read_text())["reason"] for path in quarantine.glob("*.json")]
    assert len(reasons) >= 10
    assert all(re.fullmatch(REFUSED, reason) for reason in reasons), reasons
    for path in quarantine.glob("*.fragment"):
        _, arrays, _ = decode_fragment(fragment_from_bytes(path.read_bytes()))
        assert any(array.dtype.kind == "f" and np.isnan(array).any() for array in arrays)


async def test_a_runner_that_sends_nothing_else_ends_the_run_with_what_it_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MAX_RESTARTS", 1)
    callback = type("Callback", (SpoilsSamples,), {"cured": str(tmp_path / "never")})
    async with small(1, 1).environment(Spoils).callbacks(callback).build_async() as algo:
        with pytest.raises(PeerLostError, match="unusable") as caught:
            await algo.train()
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert re.search(rf"left the broker \(expelled: 10 messages of no use; the last: {REFUSED}\)", text), text
    assert "2 failures in a row" in text


MODES = pytest.mark.parametrize(("num_env_runners", "num_learners"), [(0, 0), (1, 1)])


@MODES
def test_a_rare_nan_costs_its_chunk_in_either_mode(num_env_runners: int, num_learners: int) -> None:
    config = small(num_env_runners, num_learners).environment(Spoils, env_config={"every": 333})
    with config.build() as algo:
        for number in range(1, 7):
            result = algo.train()
            check_account(result, number)
    # Four envs of at least 360 steps each, whose episodes have 10 steps at most.
    assert 4 <= result["accounting"]["dropped"]["not_finite"] <= 40
    assert result["env_runners"]["episode_return_mean"] == pytest.approx(1.0)
    assert result["fault_tolerance"].get("num_remote_worker_restarts", 0) == 0


@MODES
def test_an_env_that_is_mostly_nan_ends_the_run_with_one_error_in_either_mode(
    num_env_runners: int, num_learners: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(num_env_runners, num_learners).environment(Spoils, env_config={"every": 3})
    with config.build() as algo, pytest.raises(EnvError) as caught:
        algo.train()
    runner = num_env_runners and 1
    assert re.match(
        rf"Environment 0 of env runner {runner} returned nan in column 'rewards' at step 3 of an episode .*"
        r"To reproduce: reset\(seed=\d+\), then 3 steps .* with the actions \[[01], [01], [01]\]",
        str(caught.value),
    ), str(caught.value)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


class Explodes(PPOTorchLearner):
    """Finite rewards make its loss overflow."""

    def compute_loss_for_module(self, *, batch: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss_for_module(batch=batch, **kwargs)
        return loss + 0 * torch.exp(batch["value_targets"]).sum()


def test_one_process_and_several_skip_the_same_minibatches() -> None:
    outcomes = []
    for num_env_runners, num_learners in ((0, 0), (1, 1)):
        config = (
            small(num_env_runners, num_learners)
            .environment(Spoils, env_config={"loud": 150})
            .training(learner_class=Explodes)
        )
        with config.build() as algo:
            for _ in range(4):
                result = algo.train()
            weights = algo.get_module().get_state()
        account = assert_accounted(result)
        assert all(np.isfinite(value).all() for value in weights.values())
        outcomes.append((account, {name: value.tobytes() for name, value in weights.items()}))
    assert outcomes[0] == outcomes[1]


class NeverFinite(PPOTorchLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        return super().compute_loss_for_module(**kwargs) * float("nan")


@pytest.mark.parametrize(
    ("num_env_runners", "num_learners"), [(0, 0), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_never_finite_ends_the_run(num_env_runners: int, num_learners: int) -> None:
    config: PPOConfig = small(num_env_runners, num_learners).training(learner_class=NeverFinite)
    with config.build() as algo:
        for _ in range(9):
            account = algo.train()["accounting"]
        assert account["trained"] == 0
        assert account["dropped"]["skipped"] >= 9 * 240
        with pytest.raises(NotFiniteError) as caught:
            algo.train()
    assert "10 updates in a row took no optimizer step" in str(caught.value)
    assert "'default_policy'" in str(caught.value)
