"""A person's first run: train, look at what is there, go on."""

from __future__ import annotations

from tests.journeys.terminal import Terminal


def test_a_run_is_trained_evaluated_and_continued(terminal: Terminal) -> None:
    trained = terminal.type("rlzmq train ppo --env CartPole-v1 --run-dir runs/a --stop iterations=2 --seed 1")
    assert trained.code == 0, trained
    evaluated = terminal.type("rlzmq evaluate runs/a --episodes 2")
    assert evaluated.code == 0, evaluated
    resumed = terminal.type("rlzmq train ppo --run-dir runs/a --stop iterations=3 --resume auto")
    assert resumed.code == 0, resumed
    assert len((terminal.cwd / "runs/a/metrics.jsonl").read_text().splitlines()) == 3
