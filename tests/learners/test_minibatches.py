"""Minibatches: their exact number, that each is full, and which rows they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.learners.batches import MinibatchIterator


def batch_of(**num_rows: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"obs": torch.arange(n), "actions": torch.arange(n) * 10} for name, n in num_rows.items()}


def iterate(batch: Any, **kwargs: Any) -> list[dict[str, Any]]:
    settings = {"minibatch_size": 8, "num_epochs": 1, "shuffle": True, "seed": 3} | kwargs
    iterator = MinibatchIterator(batch, **settings)
    return [minibatch for _, minibatch in iterator.take(iterator.num_of_modules)]


def test_unshuffled_rows_come_in_their_order_and_wrap_around() -> None:
    minibatches = iterate(batch_of(p=5), minibatch_size=3, shuffle=False, num_epochs=2)
    rows = [minibatch["p"]["obs"].tolist() for minibatch in minibatches]
    assert rows == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_the_first_epoch_is_shuffled_too() -> None:
    minibatches = iterate(batch_of(p=64), minibatch_size=64 // 2)
    rows = torch.cat([minibatch["p"]["obs"] for minibatch in minibatches])
    assert sorted(rows.tolist()) == list(range(64))
    assert rows.tolist() != list(range(64))


def test_columns_of_one_minibatch_belong_to_the_same_rows() -> None:
    for minibatch in iterate(batch_of(p=50), num_epochs=2):
        assert torch.equal(minibatch["p"]["actions"], minibatch["p"]["obs"] * 10)


def test_a_rare_module_is_trained_for_as_many_epochs_as_a_frequent_one() -> None:
    minibatches = iterate(batch_of(rare=50, frequent=4000), minibatch_size=128, num_epochs=10)
    assert len(minibatches) == 313
    having = [index for index, minibatch in enumerate(minibatches) if "rare" in minibatch]
    assert len(having) == 4  # 512 rows: 10.24 epochs
    assert having[-1] == 312  # in the last epoch, whose statistics are reported
    assert np.diff(having).tolist() == [78, 78, 78]
    uses = np.bincount(torch.cat([m["rare"]["obs"] for m in minibatches if "rare" in m]).numpy())
    assert set(uses.tolist()) == {10, 11}
    assert all("frequent" in minibatch for minibatch in minibatches)


def test_a_modules_rows_do_not_depend_on_the_other_modules() -> None:
    alone = iterate(batch_of(a=30))
    together = iterate(batch_of(a=30, b=7))
    for one, two in zip(alone, together, strict=True):
        assert torch.equal(one["a"]["obs"], two["a"]["obs"])
    assert len(iterate(batch_of(b=7))) == sum("b" in minibatch for minibatch in together)


def test_the_same_seed_gives_the_same_minibatches_and_touches_no_global_generator() -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first, second, other = (iterate(batch_of(p=50), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a["p"]["obs"], b["p"]["obs"]) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a["p"]["obs"], b["p"]["obs"]) for a, b in zip(first, other, strict=True))
    assert np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]


def test_rows_that_hold_sequences_fill_the_minibatch_by_timesteps() -> None:
    batch = {"p": {"obs": torch.zeros(10, 20, 4), "seq_lens": torch.full((10,), 20)}}
    minibatches = iterate(batch, minibatch_size=40, timesteps={"p": 200})
    shapes = [minibatch["p"]["obs"].shape for minibatch in minibatches]
    assert shapes == [(2, 20, 4)] * 5


def test_nested_observations_and_infos_are_gathered_alike() -> None:
    batch = {
        "p": {"obs": {"a": torch.arange(9), "b": (torch.arange(9),)}, "infos": [{"i": i} for i in range(9)]}
    }
    for minibatch in iterate(batch, minibatch_size=4):
        rows = minibatch["p"]["obs"]["a"].tolist()
        assert minibatch["p"]["obs"]["b"][0].tolist() == rows
        assert [info["i"] for info in minibatch["p"]["infos"]] == rows


def test_a_number_of_minibatches_agreed_elsewhere_wins() -> None:
    assert len(iterate(batch_of(p=5), num_minibatches=7)) == 7


def test_columns_of_different_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'rewards'.*expected 4 rows.*\(3,\)"):
        iterate({"p": {"obs": torch.zeros(4), "rewards": torch.zeros(3)}})


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    minibatch_size=st.one_of(st.none(), st.integers(1, 90)),
    num_epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_rows_are_used_evenly_whatever_the_sizes(
    num_rows: int, minibatch_size: int | None, num_epochs: int, shuffle: bool
) -> None:
    minibatches = iterate(
        batch_of(p=num_rows), minibatch_size=minibatch_size, num_epochs=num_epochs, shuffle=shuffle
    )
    assert len(minibatches) == (-(-num_epochs * num_rows // minibatch_size) if minibatch_size else num_epochs)
    counts = np.bincount(torch.cat([m["p"]["obs"] for m in minibatches]).numpy(), minlength=num_rows)
    assert counts.min() >= num_epochs
    assert counts.max() - counts.min() <= 1
    assert all(m["p"]["obs"].shape[0] == (minibatch_size or num_rows) for m in minibatches)
