"""An exported file acts as the policy that it was made of, and needs neither rlzmq nor torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import (
    ConfigurationError,
    ConnectorV2,
    DQNConfig,
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    Policy,
    PPOConfig,
    PrevActionsPrevRewards,
    SACConfig,
    SingleAgentObservationPreprocessor,
    TorchPiece,
)
from rlzmq.cli.main import EXIT_CONFIG, main
from rlzmq.deploy.export import ExportError, PolicyGraph, check_against, export_policy
from tests.support.runs import ShortEnv, small, two_agents

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
WIDE = gym.spaces.Box(-1e38, 1e38, (2, 3), np.float64)
DISCRETE = gym.spaces.Discrete(3, start=-1)
NESTED = gym.spaces.Dict(
    {
        "place": DISCRETE,
        "parts": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.MultiBinary(2)]),
        "speed": WIDE,
    }
)
ACTIONS = gym.spaces.Dict(
    {
        "arm": gym.spaces.Box(-2.0, 3.0, (2,), np.float32),
        "gear": gym.spaces.Box(3, 6, (2,), np.int64),
        "keys": gym.spaces.MultiBinary(3),
        "way": gym.spaces.MultiDiscrete([2, 3], start=[1, 5]),
    }
)


class SpacesEnv(ShortEnv):
    """Random observations of any space."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.observation_space, self.action_space = config["spaces"]

    def observation(self) -> Any:
        return self.observation_space.sample()


class Negate(SingleAgentObservationPreprocessor):
    """A piece of a user's, with its form in torch."""

    def preprocess(self, observation: Any, episode: Any) -> Any:
        return -observation

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        return TorchPiece(forward=lambda batch, memory: ({**batch, "obs": -batch["obs"]}, memory))


class WrongSign(Negate):
    """A piece that does something else than its form in torch."""

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        return TorchPiece()


class ShiftedFilter(MeanStdFilter):
    """A piece that overrides what its base does, but not the base's form in torch."""

    def transform_observations(self, observations: Any, rows: Any) -> Any:
        return super().transform_observations(observations, rows) + 1.0


def policy_of(
    observation_space: Any, action_space: Any, pieces: Any = None, config: Any = None, **model: Any
) -> Policy:
    """A policy of random weights and filters that have seen random observations; nothing is trained."""
    spaces = observation_space, action_space
    config = (PPOConfig() if config is None else config).environment(SpacesEnv, env_config={"spaces": spaces})
    config.env_runners(env_to_module_connector=pieces).debugging(seed=3)
    config.rl_module(model_config={"fcnet_hiddens": [16], **model})
    config.validate()
    single = {"__env_single__": spaces, "__env__": spaces}
    torch.manual_seed(3)
    modules = config.get_multi_rl_module_spec(spaces=single, inference_only=True).build()
    for parameter in modules.parameters():  # the default heads begin near 0: any action would be right
        parameter.data += 0.3 * torch.randn_like(parameter)
    pipeline = config.build_env_to_module_connector(env=None, spaces=single)
    state = {}
    for name, piece in zip(pipeline.piece_names, pipeline.connectors, strict=True):
        if isinstance(piece, MeanStdFilter):
            rows = type("Rows", (), {"agent_id": None})()
            for _ in range(5):
                value = piece.input_observation_space.sample()
                piece.transform_observations(_batched(value), rows)
            state[name] = piece.get_state()
    return Policy(config, modules, spaces=spaces, connector_state={"env_to_module_connector": state})


def _batched(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _batched(part) for key, part in value.items()}
    return tuple(map(_batched, value)) if isinstance(value, tuple) else np.asarray(value)[None]


CASES: dict[str, Any] = {
    "plain": lambda: policy_of(BOX, gym.spaces.Discrete(4)),
    "filter, float64, unsquashed": lambda: policy_of(
        WIDE, gym.spaces.Box(-2.0, 3.0, (2,), np.float64), MeanStdFilter
    ),
    "nested, flattened": lambda: policy_of(
        NESTED, ACTIONS, lambda: [MeanStdFilter(), FlattenObservations(keys_to_remove="place")]
    ),
    "nested, by the module": lambda: policy_of(NESTED, gym.spaces.Tuple([DISCRETE, BOX])),
    "frames": lambda: policy_of(
        BOX, gym.spaces.Discrete(4), lambda: [MeanStdFilter(), FrameStackingEnvToModule(num_frames=3)]
    ),
    "lstm with previous actions": lambda: policy_of(
        BOX,
        ACTIONS["way"],
        use_lstm=True,
        lstm_cell_size=8,
        lstm_use_prev_action=True,
        lstm_use_prev_reward=True,
    ),
    "two values remembered": lambda: policy_of(
        DISCRETE, DISCRETE, lambda: [Negate(), PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=3)]
    ),
    "images": lambda: policy_of(gym.spaces.Box(0, 255, (20, 20, 1), np.uint8), gym.spaces.Discrete(4)),
    "dqn, noisy": lambda: policy_of(BOX, gym.spaces.Discrete(4), config=DQNConfig().training(noisy=True)),
    "sac": lambda: policy_of(BOX, gym.spaces.Box(-2.0, 3.0, (2, 2), np.float32), config=SACConfig()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_acts_as_the_policy(name: str) -> None:
    policy = CASES[name]()
    graph = PolicyGraph(policy)

    def call(arrays: Any) -> Any:
        with torch.inference_mode():
            return [tensor.numpy() for tensor in graph(*map(torch.from_numpy, arrays))]

    result = check_against(policy, graph, call, 200, seed=1)
    assert result.num_observations >= 200
    assert result.num_different == 0
    assert result.largest_difference < 1e-5


RUN_WITHOUT_TORCH = """
import json, sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["rlzmq"])
steps = np.load(sys.argv[2])
batch = len(steps["0"])
state = {
    port["name"]: np.broadcast_to(
        np.asarray(about["initial_state"][port["name"]], port["dtype"]), (batch, *port["shape"][1:])
    )
    for port in about["inputs"] if port["name"].startswith("state.")
}
actions = []
for index in range(len(steps)):
    inputs = {"obs": steps[str(index)], **state}
    if any(port["name"] == "rewards" for port in about["inputs"]):
        inputs["rewards"] = np.full(batch, float(index), np.float32)
    outputs = dict(zip([port["name"] for port in about["outputs"]], session.run(None, inputs)))
    actions.append(outputs["actions"].tolist())
    state = {name: outputs["next_" + name] for name in state}
assert not {"torch", "rlzmq"} & sys.modules.keys()
print(json.dumps(actions))
"""


def test_an_onnx_file_is_run_by_numpy_and_onnxruntime_alone(tmp_path: Path) -> None:
    policy = policy_of(
        BOX,
        gym.spaces.Box(-2.0, 3.0, (2,), np.float32),
        lambda: [MeanStdFilter(), PrevActionsPrevRewards(n_prev_rewards=2)],
        use_lstm=True,
        lstm_cell_size=8,
    )
    path = tmp_path / "policy.onnx"
    result = export_policy(policy, path)
    assert result.num_observations == 1000
    assert result.largest_difference < 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"]

    rng = np.random.default_rng(0)
    steps = {str(index): rng.normal(size=(3, 3)).astype(np.float32) for index in range(6)}
    np.savez(tmp_path / "steps.npz", **steps)
    ran = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_TORCH, str(path), str(tmp_path / "steps.npz")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    actions = np.array(json.loads(ran.stdout))
    for row in range(3):
        player = policy.copy()
        for index in range(6):
            expected = player.compute_action(steps[str(index)][row], reward=float(index))
            np.testing.assert_allclose(actions[index, row], expected, atol=1e-4)


def test_the_command_writes_a_file_and_prints_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(env="Pendulum-v1", env_to_module_connector=MeanStdFilter, seed=3)
    with config.build() as algorithm:
        algorithm.save_to_path(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "checkpoint", "--format", "pt2"]) == 0
    printed = capsys.readouterr().out
    assert "checked   1,000 random observations, largest difference" in printed
    assert "exported  checkpoint/policy.pt2" in printed

    assert main(["export", "checkpoint", "--module", "default_polcy"]) == EXIT_CONFIG
    assert "Did you mean 'default_policy'" in capsys.readouterr().err

    extra = {"rlzmq.json": ""}
    program = torch.export.load(tmp_path / "checkpoint" / "policy.pt2", extra_files=extra)
    about = json.loads(extra["rlzmq.json"])
    assert about["inputs"] == [{"name": "obs", "dtype": "float32", "shape": ["batch", 3]}]
    assert [port["name"] for port in about["outputs"]] == ["action_dist_inputs", "actions"]
    assert about["initial_state"] == {}
    policy = Policy.load(tmp_path / "checkpoint")
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    _, actions = program.module()(torch.from_numpy(observations))
    np.testing.assert_allclose(actions.detach().numpy(), policy.compute_actions(observations), atol=1e-5)


def test_a_piece_without_a_form_in_torch_is_named() -> None:
    class Doubled(ConnectorV2):
        def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return batch

    wanted = r"connector piece 'Doubled' \(number 1 of 6 in EnvToModulePipeline\).*write Doubled\.to_torch"
    with pytest.raises(ConfigurationError, match=wanted):
        PolicyGraph(policy_of(BOX, DISCRETE, Doubled))


def test_the_form_of_a_base_class_is_not_taken_for_that_of_a_subclass_which_does_something_else() -> None:
    with pytest.raises(ConfigurationError, match=r"write ShiftedFilter\.to_torch"):
        PolicyGraph(policy_of(BOX, DISCRETE, ShiftedFilter))


def test_a_file_that_acts_differently_is_not_kept(tmp_path: Path) -> None:
    policy = policy_of(BOX, gym.spaces.Box(-2.0, 3.0, (2,), np.float32), WrongSign)
    (tmp_path / "policy.pt2").write_text("an earlier file")
    with pytest.raises(ExportError, match="largest difference"):
        export_policy(policy, tmp_path / "policy.pt2", format="pt2", num_checked=10)
    assert (tmp_path / "policy.pt2").read_text() == "an earlier file"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigurationError, match=r"policy\.pt2: No space left on device"):
        export_policy(policy_of(BOX, DISCRETE), tmp_path / "policy.pt2", format="pt2")
    assert list(tmp_path.iterdir()) == []


def test_choices_that_differ_are_counted_and_ties_are_told_apart() -> None:
    policy = policy_of(BOX, gym.spaces.Discrete(4))
    graph = PolicyGraph(policy)

    def shifted(gap: float) -> Any:
        def call(arrays: Any) -> Any:
            with torch.inference_mode():
                inputs, actions = (tensor.numpy() for tensor in graph(*map(torch.from_numpy, arrays)))
            rows = np.arange(len(actions))
            others = (actions + 1) % 4
            inputs[rows, others] = inputs[rows, actions] - gap
            return [inputs, others]

        return call

    assert check_against(policy, graph, shifted(1e-6), 30, seed=1).num_ties == 30
    with pytest.raises(ExportError, match="30 of 30 discrete choices differ"):
        check_against(policy, graph, shifted(0.1), 30, seed=1)


def test_one_module_of_a_multi_agent_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = two_agents(env_to_module_connector=lambda: MeanStdFilter(multi_agent=True), seed=3)
    with config.build() as algorithm:
        algorithm.train()
        policies = {name: algorithm.get_policy(module_id=name) for name in ("p0", "p1")}
        both = algorithm.get_policy()
    with pytest.raises(ConfigurationError, match=r"\['p0', 'p1'\].*--module"):
        PolicyGraph(both)
    for policy in policies.values():
        graph = PolicyGraph(policy)

        def call(arrays: Any, graph: Any = graph) -> Any:
            with torch.inference_mode():
                return [tensor.numpy() for tensor in graph(*map(torch.from_numpy, arrays))]

        assert check_against(policy, graph, call, 60, seed=1).num_different == 0


def test_what_cannot_be_exported_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(tmp_path / "nothing")]) == EXIT_CONFIG
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="expected one of onnx, pt2, got 'tflite'"):
        export_policy(policy_of(BOX, DISCRETE), tmp_path / "x", format="tflite")
    monkeypatch.setattr("rlzmq.deploy.export.PolicyGraph", None)  # what follows is refused before the work
    with pytest.raises(ConfigurationError, match=r"Name a file, e\.g\. "):
        export_policy(policy_of(BOX, DISCRETE), tmp_path)
