"""Callbacks: misspelt hooks are refused; what the driver calls stays in its process."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from rlzmq import PPOConfig, RLlibCallback
from rlzmq.core.errors import ConfigurationError
from rlzmq.driver.process_config import config_for_runners
from tests.support.runs import small


class Writer:
    """Cannot be sent anywhere, as TensorBoard's SummaryWriter cannot."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.results: list[int] = []


class WritesResults(RLlibCallback):
    def __init__(self) -> None:
        self.writer = Writer()

    def on_train_result(self, *, result: dict[str, Any], **kwargs: Any) -> None:
        self.writer.results.append(result["training_iteration"])


class CountsEpisodes(RLlibCallback):
    def on_episode_end(self, *, metrics_logger: Any, **kwargs: Any) -> None:
        metrics_logger.log_value("ended", 1, reduce="sum")


class DoesBoth(WritesResults):
    def on_episode_end(self, **kwargs: Any) -> None:
        pass

    on_sample_end = on_episode_end


def test_callbacks_of_the_driver_alone_need_not_be_sent_to_any_process() -> None:
    class_of_main = WritesResults()
    writer = Writer()
    config = small(num_env_runners=1, train_batch_size_per_learner=200).callbacks(
        [class_of_main, CountsEpisodes],
        on_train_result=lambda *, result, **kwargs: writer.results.append(len(result)),
    )
    with config.build() as algo:
        assert algo.train()["env_runners"]["ended"] > 0
    assert class_of_main.writer.results == [1]
    assert len(writer.results) == 1


def test_a_runners_callback_that_cannot_be_sent_says_why_and_what_to_do() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_for_runners(PPOConfig().callbacks(DoesBoth()))
    text = str(caught.value)
    assert "DoesBoth (on_episode_end, on_sample_end) runs in the env runners' processes" in text
    assert "cannot pickle '_thread.lock' object" in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("on_train_results", "Did you mean 'on_train_result'?"),
        ("on_epsiode_end", "Did you mean 'on_episode_end'?"),
        ("on_learn_on_batch", "Use a learner connector, or a Learner's before_gradient_based_update()."),
    ],
)
def test_a_method_that_was_meant_as_a_hook_is_refused(name: str, hint: str) -> None:
    odd = type("Odd", (RLlibCallback,), {name: lambda self, **kwargs: None})
    for given in (odd, odd(), [CountsEpisodes, odd]):
        with pytest.raises(ConfigurationError, match=re.escape(hint)) as caught:
            PPOConfig().callbacks(given)
        assert f"callbacks(Odd): its method {name!r}" in str(caught.value)
