"""A search for settings that is one line."""

from __future__ import annotations

import re

import pytest

from tests.journeys.terminal import Terminal

_LINE = (
    "rlzmq tune ppo --env CartPole-v1 --env-runners 0 --lr 1e-4..1e-2:log --num-epochs 1,2 --trials 1 "
    "--batch-size-per-learner 64 --minibatch-size 32 --stop steps=64 --name mine"
)


def test_a_line_searches_a_range_and_a_list_and_says_how_to_train_with_the_best(terminal: Terminal) -> None:
    pytest.importorskip("optuna")
    done = terminal.type(_LINE)
    assert done.code == 0, done
    assert "2 trials ended, 0 failed" in done.out
    rate = re.search(r"^ +lr = (\S+)$", done.out, re.MULTILINE)
    assert rate is not None, done
    assert 1e-4 <= float(rate[1]) <= 1e-2
    assert re.search(r"^ +num_epochs = [12]$", done.out, re.MULTILINE), done
    assert re.search(r"^train +rlzmq train ppo --config ", done.out, re.MULTILINE), done


def test_a_line_without_a_range_says_how_to_give_one(terminal: Terminal) -> None:
    pytest.importorskip("optuna")
    done = terminal.type("rlzmq tune ppo --env CartPole-v1")
    assert done.code == 78, done
    assert "--lr 1e-4..1e-2:log" in done.err.splitlines()[-1]
