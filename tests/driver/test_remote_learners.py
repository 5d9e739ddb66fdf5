"""Learner ranks that join over TCP with keys: they train equal weights, and a spare replaces a dead one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlzmq.cli.joining import ranks_here
from rlzmq.core.errors import ConfigurationError
from tests.support.runs import Command, assert_accounted, listening


def test_learners_and_runners_all_come_from_outside_and_a_spare_replaces_a_dead_rank(tmp_path: Path) -> None:
    config = listening(tmp_path, batch=120, num_remote_learners=2).learners(num_learners=2)
    built: list[object] = []
    builder = threading.Thread(target=lambda: built.append(config.build()))
    builder.start()
    join, learner_join = tmp_path / "join.toml", tmp_path / "join.learner.toml"
    while not learner_join.exists():
        builder.join(0.05)
        assert builder.is_alive(), "the driver ended before it listened"
    learner = ("learner", "--join", str(learner_join))
    with (
        Command(tmp_path, *learner, RANK="0", WORLD_SIZE="2") as first,
        Command(tmp_path, *learner, RANK="1", WORLD_SIZE="2") as second,
        Command(tmp_path, "runner", "--join", str(join), "--timeout", "100") as runner,
    ):
        builder.join(100)
        assert built
        with built[0] as algo:  # type: ignore[attr-defined]
            runner.wait_for(" joined ")
            result = algo.train()
            assert result["accounting"]["trained"] >= 240
            second.process.kill()
            with Command(tmp_path, *learner) as spare:
                result = algo.train()  # the survivor goes on with the same batch
                assert result["accounting"]["trained"] >= 480
                spare.wait_for(" is rank ")
                while algo.learner_group.num_learners < 2:
                    result = algo.train()  # the spare joins between two updates
                assert_accounted(result)
                algo.stop()
                assert first.end() == 0, first.output
                assert spare.end() == 0, spare.output


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, (2, 0)),
        ({"JOB_COMPLETION_INDEX": "5"}, (5, -1)),
        ({}, (-1, -1)),
    ],
)
def test_schedulers_variables_are_recognised(environment: dict[str, str], ranks: tuple[int, int]) -> None:
    assert ranks_here(environment) == ranks


def test_what_is_no_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="RANK='x'"):
        ranks_here({"RANK": "x"})
    with pytest.raises(ConfigurationError, match="all remote"):
        listening(tmp_path, num_remote_learners=1).learners(num_learners=2).validate()
