"""What a loss may return, and the hooks of a gradient step called by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import square_learner
from torch import Tensor

from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner import Learner

BATCH = {"default_policy": {Columns.OBS: torch.ones(6, 4)}}


class GivenLoss(Learner):
    make: Callable[[Tensor], Any]

    def compute_loss_for_module(self, *, fwd_out: dict[str, Any], **kwargs: Any) -> Any:
        return type(self).make(fwd_out[Columns.ACTION_DIST_INPUTS].square())


def learner_with(make: Callable[[Tensor], Any]) -> Learner:
    return square_learner(learner_class=type("GivenLoss", (GivenLoss,), {"make": staticmethod(make)}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: None, "got None. Does it end with `return loss`"),
        (lambda x: x.mean(-1), r"got a tensor of shape \(32,\). Take its mean"),
        (lambda x: x.mean().item(), "got a float. Keep it a tensor"),
        (lambda x: x.mean().detach(), "depends on no trainable parameter"),
    ],
)
def test_a_loss_that_is_none_says_what_it_is(make: Callable[[Tensor], Any], text: str) -> None:
    learner = learner_with(make)
    before = learner.module.get_state()["default_policy"]
    with pytest.raises(ConfigurationError, match=f"default_policy.*{text}"):
        learner.update(batch=BATCH)
    assert learner.weights_seq_no == 0
    after = learner.module.get_state()["default_policy"]
    assert all((before[name] == value).all() for name, value in after.items())


def test_a_loss_of_one_element_is_one_number() -> None:
    assert (
        learner_with(lambda x: x.mean().reshape(1, 1)).update(batch=BATCH)["default_policy"]["total_loss"] > 0
    )


def test_a_gradient_step_by_hand_needs_no_update_before() -> None:
    learner = square_learner()
    layer = learner.module["default_policy"].layer
    before = layer.weight.detach().clone()
    outputs = learner.forward_train(BATCH)
    gradients = learner.compute_gradients(learner.compute_losses(fwd_out=outputs, batch=BATCH))
    assert set(gradients) == {layer.weight, layer.bias}
    learner.apply_gradients(learner.postprocess_gradients(gradients))
    assert not torch.equal(layer.weight, before)
