"""What a user reads when an import fails."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import cloudpickle
import pytest

import rlzmq
from rlzmq.algorithms import ALGORITHMS
from rlzmq.core.synonyms import _ACCEPTED, instead_of


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("from rlzmq import DreamerV3Config", "Instead: PPO or SAC"),
        ("from rlzmq import PPOconfig", "Instead: from rlzmq import PPOConfig."),
        ("import rlzmq.algorithms.dreamerv3", "Instead: PPO or SAC"),
        ("from rlzmq.core.rl_module.rl_module import RLModul", "Did you mean 'RLModule'?"),
        ("from rlzmq.algorithms.ppo import PPOTrainer", "Instead: PPOConfig"),
        ("from rlzmq.wire import PPO", "Instead: from rlzmq import PPO."),
        ("from rlzmq.utils.spaces.repeated import Repeated", "Instead: gymnasium.spaces.Sequence"),
        ("import rlzmq.core.typo", "No module named 'rlzmq.core.typo'"),
        ("import rlzmq.core.checkpont", "Did you mean rlzmq.core.checkpoint?"),
        ("import rlzmq.core.rl_module.rl_module as m; m.RLModul", "Did you mean 'RLModule'?"),
    ],
)
def test_a_name_that_is_not_there_is_told_where_it_lives(statement: str, text: str) -> None:
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {})
    assert text in str(caught.value)


@pytest.mark.parametrize("name", [*sorted(_ACCEPTED), "DQNTorchLearner", "CQLTorchLearner"])
def test_a_name_of_rllibs_that_works_is_warned_about_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(rlzmq), name, raising=False)
    with caplog.at_level(logging.WARNING, "rlzmq"):
        for _ in range(2):
            exec(f"from rlzmq import {name}", {})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert name in warning
    assert str(instead_of(name, rlzmq.__all__)) in warning
    assert name not in rlzmq.__all__


def test_module_paths_of_rllibs_are_paths_below_rlzmq() -> None:
    for algorithm in ALGORITHMS:
        exec(
            f"import rlzmq.algorithms.{algorithm} as its; its.{algorithm.upper()}, its.{algorithm.upper()}Config",
            {},
        )
    for path in """algorithms.algorithm_config import AlgorithmConfig, NotProvided
        algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
        callbacks.callbacks import RLlibCallback
        connectors.env_to_module import EnvToModulePipeline, MeanStdFilter
        connectors.module_to_env.get_actions import GetActions
        core import COMPONENT_RL_MODULE, Columns
        core.rl_module.rl_module import RLModule, RLModuleSpec
        env.multi_agent_env import MultiAgentEnv
        examples.envs.classes.multi_agent import MultiAgentCartPole
        utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN
        tune.registry import get_trainable_cls, register_env
        tune.search.optuna import OptunaSearch
        train import CheckpointConfig, RunConfig""".splitlines():
        exec(f"from rlzmq.{path.strip()}", {})
        module = sys.modules[f"rlzmq.{path.split()[0]}"]
        assert cloudpickle.loads(cloudpickle.dumps(module)) is module
        # Reloaded from its file, a module would have new classes for the tests that come after this one.
        if getattr(module, "__file__", None) is None:
            assert importlib.reload(module) is module


def test_no_public_name_is_explained_as_one_of_rllibs_only() -> None:
    assert [name for name in rlzmq.__all__ if instead_of(name, ()) is not None] == []


HIDING = {
    "queue.py": (
        "PPO",
        "waiting = []\n",
        "AttributeError: module 'queue' has no attribute 'SimpleQueue'",
        "DIR/queue.py hides the module 'queue' of Python: rename that file.",
    ),
    "gymnasium.py": (
        "PPOConfig",
        "raise ValueError('something of my own')\n",
        "ValueError: something of my own",
        "DIR/gymnasium.py hides the module 'gymnasium' of an installed package (SITE/gymnasium/__init__.py): "
        "rename that file.",
    ),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_file_beside_the_script_that_hides_a_module_is_named(name: str, tmp_path: Path) -> None:
    loaded, content, error, hint = HIDING[name]
    (tmp_path / name).write_text(content)
    (tmp_path / "script.py").write_text(
        "from rlzmq import PPOConfig\nPPOConfig().environment('CartPole-v1').env_runners(num_env_runners=0).build()\n"
    )
    for arguments, expected in {
        "script.py": f"\nImportError: rlzmq.{loaded} could not be loaded: {error}\n{hint}\n",
        "-m rlzmq train ppo --env CartPole-v1": f"\n{hint}\nrlzmq: ended by ",
    }.items():
        command = [sys.executable, *arguments.split()]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        said = run.stderr.replace(str(tmp_path), "DIR").replace(sysconfig.get_path("purelib"), "SITE")
        said = re.sub(r" \(consider renaming .*?\)(?=\n)", "", said)  # Python 3.13's own hint
        shown = (
            said if arguments == "script.py" else said.rpartition("rlzmq: ended by ")[0] + "rlzmq: ended by "
        )
        assert shown.endswith(expected), said
        assert run.returncode != 0
