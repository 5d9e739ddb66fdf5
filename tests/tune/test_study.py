"""The record of a search: claims, ends, dead drivers, several drivers at once."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlzmq import tune
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.search import BasicVariantGenerator
from rlzmq.tune.study import Study
from tests.tune.trainables import score

SPACE = {"x": tune.grid_search([1, 2, 3]), "y": tune.uniform(0, 1), "z": tune.randn(0, 1)}


def study(path: Path, **settings: Any) -> Study:
    return Study(f"sqlite:///{path / 'study.db'}", "s", "max", BasicVariantGenerator(**settings), SPACE)


def end(record: Study, claim: Any, status: Any = "TERMINATED", value: float | None = 1.0) -> bool:
    return record.end(claim, status, Path("/nowhere"), {"a": 1}, value, "")


def test_each_trial_is_claimed_once_and_values_follow_from_the_seed(tmp_path: Path) -> None:
    first, second = study(tmp_path, random_state=3), study(tmp_path)
    assert first.seed == second.seed == 3
    first.ensure_waiting(3)
    second.ensure_waiting(3)
    claims = [first.claim(), second.claim(), first.claim()]
    assert [claim.index for claim in claims if claim is not None] == [0, 1, 2]
    assert first.claim() is None
    assert [claim.parameters["x"] for claim in claims if claim is not None] == [1, 2, 3]
    other = tmp_path / "other"
    other.mkdir()
    again = study(other, random_state=3)
    again.ensure_waiting(1)
    same = again.claim()
    assert same is not None
    assert claims[0] is not None
    assert same.parameters == claims[0].parameters
    assert first.num_live() == 3
    for record, claim in zip((first, second, first), claims, strict=True):
        assert end(record, claim, value=None if claim is claims[0] else 2.0)
    assert second.num_live() == 0
    assert [ended.index for ended in second.ended()] == [0, 1, 2]
    assert second.ended()[0].result == {"a": 1}


def test_a_driver_whose_trial_was_taken_over_does_not_end_it(tmp_path: Path) -> None:
    slow, other = study(tmp_path), study(tmp_path)
    slow.ensure_waiting(1)
    claim = slow.claim()
    assert claim is not None
    assert other.take_over_lost() == 0  # its process lives
    slow.close()  # as if it were dead
    assert other.take_over_lost() == 1
    slow.report(claim, 1, 1.0)
    assert not end(slow, claim)
    mine = other.claim()
    assert mine is not None
    assert mine.parameters == claim.parameters
    assert end(other, mine)
    assert len(other.ended()) == 1


def test_a_trial_that_two_drivers_end_at_the_same_moment_ends_once(tmp_path: Path) -> None:
    slow, other = study(tmp_path), study(tmp_path)
    slow.ensure_waiting(1)
    claim = slow.claim()
    assert claim is not None
    slow.close()  # as if it were dead
    ends = []

    class Late(type(other._study.sampler)):  # type: ignore[misc]
        """Called when Optuna has seen that the trial runs, and before it stores the end."""

        def after_trial(self, *args: Any) -> None:
            ends.append(end(slow, claim))

    other._study.sampler = Late()
    assert other.take_over_lost() == 0
    assert ends == [True]
    assert [ended.index for ended in other.ended()] == [0]
    assert other.claim() is None


def test_a_driver_elsewhere_is_dead_when_its_heartbeat_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("rlzmq.tune.study.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("rlzmq.tune.study.process_space", lambda: "elsewhere")
    far = study(tmp_path)
    far.ensure_waiting(1)
    far.claim()
    monkeypatch.setattr("rlzmq.tune.study.process_space", lambda: "here")
    near = study(tmp_path)
    for clock[0] in (0.0, 50.0, 100.0):
        assert near.take_over_lost() == 0
        far.beat()
    clock[0] = 150.0
    assert near.take_over_lost() == 0  # it sees the last beat
    clock[0] = 209.0
    assert near.take_over_lost() == 0
    clock[0] = 211.0
    assert near.take_over_lost() == 1


def test_a_storage_that_cannot_be_used_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/missing/study.db"
    with pytest.raises(ConfigurationError, match=r"The storage sqlite:///.*missing/study.db cannot be used"):
        Study(url, "s", "max", BasicVariantGenerator(), {})
    with pytest.raises(ConfigurationError) as caught:
        Study("nodatabase://me:secret@host/x", "s", "max", BasicVariantGenerator(), {})
    assert "secret" not in str(caught.value).partition("cannot be used")[0]


async def test_two_drivers_share_one_search(tmp_path: Path) -> None:
    def tuner(folder: str) -> tune.Tuner:
        return tune.Tuner(
            score,
            param_space={"x": tune.grid_search([1, 2, 3, 4])},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", max_concurrent_trials=1, storage=f"sqlite:///{tmp_path}/shared.db"
            ),
            run_config=tune.RunConfig(name="shared", storage_path=tmp_path / folder, verbose=0),
        )

    first, second = await asyncio.gather(tuner("a").fit_async(), tuner("b").fit_async())
    assert [result.metrics["score"] for result in first] == [3, 6, 9, 12]
    assert [result.metrics for result in first] == [result.metrics for result in second]
    assert [result.path for result in first] == [result.path for result in second]
    assert first.get_best_result().config == {"x": 4}
    assert dataclasses.is_dataclass(first[0])
