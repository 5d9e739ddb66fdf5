"""Optimizers that step with every N-th minibatch, and losses that are logged as rarely."""

from __future__ import annotations

from typing import Any

import torch

from rlzmq import Columns
from rlzmq.learners.learner import Learner
from tests.learners.cases import square_learner

EVERY = 3
BATCH = {Columns.OBS: torch.ones(8, 4)}


class Delayed(Learner):
    """One layer is trained with every minibatch, the other with each third one, whose loss is computed only then."""

    def configure_optimizers_for_module(self, module_id: str, config: Any) -> None:
        module = self.module[module_id]
        for name, layer, every in (("often", module.layer, 1), ("rarely", module.extra, EVERY)):
            params = list(layer.parameters())
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=torch.optim.Adam(params, 0.1),
                params=params, every=every,
            )  # fmt: skip

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        loss: torch.Tensor = fwd_out[Columns.ACTION_DIST_INPUTS].square().mean()
        if self.steps_optimizer(module_id, "rarely"):
            rare_loss = self.module[module_id].extra(batch[Columns.OBS]).square().mean()
            self.log_stats(module_id, {"rare_loss": rare_loss, "step": float(len(self.steps))})
            loss = loss + rare_loss
        return loss

    def apply_gradients(self, gradients_dict: Any) -> None:
        module = self.module["default_policy"]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        super().apply_gradients(gradients_dict)
        changed = {
            name.split(".")[-2] for name, p in module.named_parameters() if not torch.equal(p, before[name])
        }
        self.steps.append(sorted(changed))

    steps: list[list[str]]


def test_a_delayed_optimizer_steps_as_rarely_as_asked_and_its_loss_stays_in_results() -> None:
    learner: Any = square_learner(learner_class=Delayed)
    learner.steps = []
    options: dict[str, Any] = {"num_epochs": 1, "minibatch_size": 8}
    results = [learner.update(batch=BATCH, **options)["default_policy"] for _ in range(2 * EVERY)]
    assert learner.steps == [["extra", "layer"], *[["layer"]] * (EVERY - 1)] * 2
    assert [result["step"] for result in results] == [0.0] * EVERY + [float(EVERY)] * EVERY
    assert all(result["rare_loss"] > 0 for result in results)
    assert "gradients_rarely_global_norm" in results[-1]


def test_a_module_that_a_run_no_longer_trains_has_no_old_values() -> None:
    learner: Any = square_learner("a", "b")
    columns = {Columns.OBS: torch.ones(8, 4)}
    learner.update(batch={"a": columns, "b": columns})
    assert "total_loss" not in learner.update(batch={"a": columns}).get("b", {})
