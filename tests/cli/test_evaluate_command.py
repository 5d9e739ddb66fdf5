"""rlzmq evaluate and record: statistics, files of episodes, a video, what they say to wrong input; train on files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlzmq
from rlzmq import evaluate_checkpoint
from rlzmq.cli.main import main
from rlzmq.core.score_statistics import bootstrap_interval, interquartile_mean
from rlzmq.replay import open_shards
from tests.support.runs import ShortEnv, small


class Strip(ShortEnv):
    """Episodes of 3, 4, 5, … steps; each picture has the step's number in its red channel."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, draws: bool = True) -> None:
        self.render_mode, self.draws = render_mode, draws
        self.length = 2

    def reset(self, **kwargs: Any) -> Any:
        self.length += 1
        return super().reset(**kwargs)

    def render(self) -> Any:
        picture = np.zeros((33, 49, 3), np.uint8)
        picture[..., 0] = 40 * self.t
        return picture if self.draws else None


class Blind(Strip):
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    gym.register("Strip-v0", Strip)
    gym.register("Blind-v0", Blind)
    yield
    gym.registry.pop("Strip-v0")
    gym.registry.pop("Blind-v0")


def checkpoint_of(env: str, path: Path, **env_config: Any) -> Path:
    config = small(env=env, env_config=env_config, num_envs_per_env_runner=4, seed=3)
    with config.build() as algo:
        return Path(algo.save_to_path(path))


@pytest.fixture(scope="module")
def strip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("Strip-v0", tmp_path_factory.mktemp("strip") / "checkpoint")


def test_every_episode_is_in_the_file_and_the_statistics_are_theirs(
    strip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scores.json"
    assert main(["evaluate", str(strip), "--episodes", "8", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    lengths = [3, 4, 5, 6, 7, 8, 9, 10]  # in one environment, none is passed over
    assert [episode["length"] for episode in found["episodes"]] == lengths
    assert [episode["return"] for episode in found["episodes"]] == lengths
    assert (found["env"], found["seed"], found["explore"]) == ("Strip-v0", 3, False)
    scores = found["return"]
    assert (scores["mean"], scores["iqm"], scores["min"], scores["max"]) == (6.5, 6.5, 3.0, 10.0)
    assert scores["mean_interval_95"] == pytest.approx(bootstrap_interval(lengths))
    assert scores["iqm_interval_95"] == pytest.approx(bootstrap_interval(lengths, interquartile_mean))
    low, high = scores["mean_interval_95"]
    out = capsys.readouterr().out
    assert out.startswith(f"episodes 8  return mean 6.50 [{low:.2f}, {high:.2f}]  IQM 6.50 [")
    assert "min 3.00  max 10.00  length mean 6.5" in out


def test_one_episode_has_no_interval(strip: Path) -> None:
    scores = evaluate_checkpoint(strip, num_episodes=1)
    assert scores.to_dict()["return"]["mean_interval_95"] is None
    assert "nan" not in str(scores).lower()
    json.dumps(scores.to_dict(), allow_nan=False)


# imageio's reader of mp4 files leaves its pipes to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_the_video_has_a_picture_of_every_observation_of_its_episodes(
    strip: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    iio = pytest.importorskip("imageio.v3")
    video = tmp_path / f"out.{suffix}"
    arguments = ["evaluate", str(strip), "--episodes", "3", "--video", str(video), "--video-episodes", "2"]
    assert main(arguments) == 0
    assert f"video       {video}" in capsys.readouterr().out
    frames = iio.imread(video)
    assert frames.shape[1:3] == (34, 50), "sizes are even"
    reds = [round(float(frame[..., 0].mean()) / 40) for frame in frames]
    assert reds == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    html = evaluate_checkpoint(strip, num_episodes=1, video=video)._repr_html_()
    assert ("data:image/gif;base64," if suffix == "gif" else "data:video/mp4;base64,") in html


def test_a_video_that_cannot_be_written_loses_no_scores(
    strip: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("imageio.v3")
    (tmp_path / "full.gif").symlink_to("/dev/full")
    scores = evaluate_checkpoint(strip, num_episodes=2, video=tmp_path / "full.gif")
    assert len(scores.returns) == 2
    assert scores.video is None
    assert "No space left on device" in caplog.text


def test_multi_agent_runs_have_the_agents_means_and_a_video(tmp_path: Path) -> None:
    pytest.importorskip("imageio")
    agents = {"policies": {"p"}, "policy_mapping_fn": lambda agent_id, episode: "p"}
    config = small(
        env=rlzmq.make_multi_agent(Strip), env_config={"num_agents": 2}, num_envs_per_env_runner=1, **agents
    )
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "checkpoint")
    scores = evaluate_checkpoint(path, num_episodes=2, config=config)
    assert scores.agent_return_means == {"0": 3.5, "1": 3.5}
    assert scores.returns == (6.0, 8.0)
    assert str(scores).endswith("0 3.50  1 3.50")


def test_wrong_input_is_said(
    strip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str, checkpoint: Path = strip) -> str:
        assert main(["evaluate", str(checkpoint), *arguments]) == 78
        return capsys.readouterr().err

    assert "num_episodes=0: expected 1 or more" in said("--episodes", "0")
    assert "there is no directory" in said("--json", str(tmp_path / "gone" / "a.json"))
    assert "ends with .mp4 or .gif" in said("--video", str(tmp_path / "a.avi"))
    assert "there is no directory" in said("--video", str(tmp_path / "gone" / "a.gif"))
    assert "nothing-here" in said(checkpoint=tmp_path / "nothing-here")
    monkeypatch.setitem(sys.modules, "imageio.v2", None)
    assert "A video needs imageio: pip install 'rlzmq[video]'" in said("--video", str(tmp_path / "a.gif"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_a_full_disk_is_one_line_with_the_file_after_the_scores(
    strip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(strip), "--episodes", "1", "--json", "/dev/full"]) == 70
    captured = capsys.readouterr()
    assert captured.out.startswith("episodes 1  return mean ")
    assert captured.err == "rlzmq: [Errno 28] No space left on device: '/dev/full'\n"
    assert main(["evaluate", str(strip), "--episodes", "1", "--json", str(strip)]) == 70
    assert capsys.readouterr().err == f"rlzmq: [Errno 21] Is a directory: '{strip}'\n"


@pytest.mark.filterwarnings("ignore:.*RGB-array rendering")
def test_an_env_that_makes_no_pictures_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("imageio")
    blind = checkpoint_of("Blind-v0", tmp_path / "blind")
    assert main(["evaluate", str(blind), "--video", str(tmp_path / "a.gif")]) == 78
    assert (
        "Blind-v0 makes no pictures with env_config={'render_mode': 'rgb_array'}" in capsys.readouterr().err
    )
    empty = checkpoint_of("Strip-v0", tmp_path / "empty", draws=False)
    assert main(["evaluate", str(empty), "--video", str(tmp_path / "b.gif")]) == 78
    assert "render() returned NoneType" in capsys.readouterr().err


def test_settings_of_a_file_stand_in_for_a_config_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(env=Strip)
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "checkpoint")
    file = tmp_path / "settings.toml"
    file.write_text(config.copy().environment("Strip-v0").to_toml())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    assert main(["evaluate", str(path)]) == 78
    assert main(["evaluate", str(path), "--episodes", "1", "--config", str(file)]) == 0
    assert main(["evaluate", str(path), "--episodes", "1", "--env", "Strip-v0"]) == 0
    recorded = ["record", str(path), "--episodes", "1", "--output", str(tmp_path / "data")]
    assert main([*recorded, "--config", str(file)]) == 0


# -- record --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run of one update on CartPole."""
    config = small(minibatch_size=64, seed=3)
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    with config.build() as algo:
        algo.train()
        algo.save_to_path(path)
    return path


def returns_in(directory: Path) -> list[float]:
    return sorted(np.concatenate([shard.get_returns() for shard in open_shards(directory).shards]).tolist())


def test_a_checkpoints_episodes_are_recorded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data"
    arguments = ["record", str(checkpoint), "--output", str(output), "--episodes", "7"]
    assert main([*arguments, "--env-runners", "2"]) == 0
    assert "recorded  7 episodes" in capsys.readouterr().out
    returns = returns_in(output)
    assert len(returns) == 7
    shard = open_shards(output).shards[0]
    assert (shard.terminated | shard.truncated).all()
    assert shard.observation_space is not None
    assert shard.meta["normalize_actions"] is True
    assert main([*arguments, "--random"]) == 78
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--random", "--overwrite"]) == 0
    assert len(returns_in(output)) == 7, "the others are aside"


def test_inspect_shows_recorded_episodes_and_files_that_cannot_be_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        assert main(["record", str(checkpoint), "--output", str(tmp_path / name), "--episodes", "3"]) == 0
        for shard in open_shards(tmp_path / name).paths:
            shard.rename(tmp_path / shard.name)
    torn = open_shards(tmp_path).paths[0]
    torn.write_bytes(torn.read_bytes()[:-5])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{torn.name} +NOT USABLE +torn or altered: its \d+ bytes", shown)
    assert re.search(r"whole +3 episodes +\d+ steps +return \d+", shown)
    assert re.search(r"3 episodes \(3 ended\), \d+ env steps in 1 shards; 1 files skipped", shown)
    for column in ("obs: ", "actions: ", "rewards: ", "action_logp: "):
        assert column in shown
    assert "return  mean" in shown
    for file in tmp_path.glob("*.shard"):
        file.write_bytes(b"")
    assert main(["inspect", str(tmp_path)]) == 78
    assert "none is usable" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nothing")]) == 78
    assert "/nothing is neither a directory (a run, a" in capsys.readouterr().err


def test_a_clone_of_recorded_episodes_needs_them_only_to_train(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "bc"
    assert main(["record", str(checkpoint), "--output", str(data), "--episodes", "20"]) == 0
    offline = [
        "train",
        "bc",
        "--env",
        "CartPole-v1",
        "--preset",
        "none",
        "--model-config",
        "fcnet_hiddens=[8]",
    ]
    offline += ["--dataset-num-iters-per-learner", "2", "--train-batch-size", "64", "--input", str(data)]
    assert main([*offline, "--stop", "steps=300", "--run-dir", str(run)]) == 0
    assert "num_env_steps_trained_lifetime = 384 ≥ 300" in capsys.readouterr().out
    shutil.rmtree(data)
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert main(["record", str(run), "--episodes", "2", "--output", str(tmp_path / "again")]) == 0
    assert main([*offline, "--run-dir", str(tmp_path / "third")]) == 78
    assert "data does not exist" in capsys.readouterr().err
