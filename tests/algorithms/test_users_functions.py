"""Functions and methods that cannot take what they will get, or be sent, are one error before the run starts."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from rlzmq import (
    Callback,
    ConfigurationError,
    ConnectorV2,
    PPOConfig,
    RLlibCallback,
    RLModuleSpec,
    TorchRLModule,
    ValueFunctionAPI,
    tune,
)
from rlzmq.driver.process_config import config_for_runners
from tests.support.runs import small as small_run
from tests.support.runs import two_agents


def small(**multi_agent: Any) -> Any:
    config = (two_agents if multi_agent else small_run)(train_batch_size_per_learner=20, minibatch_size=20)
    return config.multi_agent(**multi_agent)


class OldStack(Callback):
    def on_episode_end(self, *, worker: Any, base_env: Any, episode: Any, **kwargs: Any) -> None:  # type: ignore[override]
        pass


class NoKeywords(ConnectorV2):
    def __call__(self, batch: Any, episodes: Any) -> Any:  # type: ignore[override]
        return batch


class NoBatch(TorchRLModule, ValueFunctionAPI):
    def _forward(self) -> Any:  # type: ignore[override]
        return {}

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return None


def of_one(agent_id: Any) -> str:
    return "p0"


MADE: dict[str, tuple[Any, str, str]] = {
    "mapping": (lambda: small(policy_mapping_fn=of_one).build(), "config.policy_mapping_fn", "of_one("),
    "evaluation": (
        lambda: small().evaluation(custom_evaluation_function=lambda algorithm: {}).build(),
        "config.custom_evaluation_function",
        "(algorithm)",
    ),
    "callback class": (
        lambda: small().callbacks(OldStack),
        "callbacks(OldStack)",
        "OldStack.on_episode_end(",
    ),
    "connector": (NoKeywords, "NoKeywords.__call__", "NoKeywords.__call__("),
    "module": (
        lambda: small().rl_module(rl_module_spec=RLModuleSpec(module_class=NoBatch)).build(),
        "NoBatch._forward",
        "NoBatch._forward(",
    ),
    "trainable": (lambda: tune.Tuner(lambda: None), "Tuner(trainable)", "()"),
}


@pytest.mark.parametrize("case", MADE)
def test_a_wrong_signature_is_named_with_the_right_one_and_its_place(case: str) -> None:
    make, setting, got = MADE[case]
    with pytest.raises(ConfigurationError) as caught:
        make()
    text = str(caught.value)
    assert re.match(rf"{re.escape(setting)}: expected a function of \(.*\*\*kwargs\), got ", text), text
    assert got in text
    assert re.search(rf"\({re.escape(__file__)}:\d+\): .*(argument|keyword).*\.$", text), text


@pytest.mark.parametrize(("returned", "num_processes"), [("p2", 0), (None, 0), (["p0"], 0), (None, 1)])
def test_a_mapping_to_no_module_names_agent_result_and_place(returned: Any, num_processes: int) -> None:
    config = small(policy_mapping_fn=lambda agent_id, episode, **kwargs: returned)
    config.env_runners(num_env_runners=num_processes)
    with pytest.raises(ConfigurationError) as caught, config.build() as algo:
        algo.train()
    begin = f"policy_mapping_fn(0, episode) returned {returned!r}, which is not a module ({__file__}:"
    assert str(caught.value).startswith(begin)


def test_an_evaluation_function_that_returns_something_else_is_told_what_to_return() -> None:
    config = small().evaluation(custom_evaluation_function=lambda algorithm, group: {"score": 1})
    with (
        config.build() as algo,
        pytest.raises(ConfigurationError, match=r"\(results, env_steps, agent_steps\)"),
    ):
        algo.evaluate()


class Lenient(Callback):
    @staticmethod
    def on_train_result(**kwargs: Any) -> None:  # type: ignore[override]
        pass

    @classmethod
    def on_sample_end(cls, *, env_runner: Any, metrics_logger: Any, samples: Any) -> None:  # type: ignore[override]
        pass


def test_signatures_that_take_the_arguments_in_their_own_way_are_taken() -> None:
    config = small(policy_mapping_fn=lambda *args: f"p{args[0]}", policies_to_train=lambda mid, *_: True)
    config.callbacks(Lenient, on_train_result=lambda *, result, **_: None)
    with config.build() as algo:
        algo.train()


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
    config = small_run(num_env_runners=1, train_batch_size_per_learner=200).callbacks(
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
