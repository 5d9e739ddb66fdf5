"""What a newcomer types: every command's help at 80 columns, settings as flags, completion."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq import ConfigurationError
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.cli.main import COMMANDS, main
from rlzmq.cli.train import StopCriteria, _config, _parse


@pytest.mark.parametrize("command", [*COMMANDS, "train ppo"])
def test_help_keeps_to_the_terminals_width(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: rlzmq {command} ")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "None" not in text
    assert "Must be " not in text


def test_help_of_train_lists_the_algorithms_and_their_presets(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["train", "--help"], 0), (["train"], 2), (["train", "--env", "CartPole-v1"], 2)):
        assert main(arguments) == code
        said = capsys.readouterr()
        text = said.out if code == 0 else said.err
        assert all(f"\n  {name} " in text for name in ALGORITHMS)
        assert "presets: CartPole-v1" in text


def test_help_shows_the_flags_that_people_set_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "ppo", "--help"]) == 0
    text = capsys.readouterr().out
    flags = {word.strip(",") for word in text.split() if word.startswith("--")}
    assert {"--env", "--stop", "--lr", "--seed", "--env-runners", "--model-config"} <= flags
    assert len(flags) <= 30  # twenty, their aliases, and those that texts name
    assert "--help-all" in text
    assert "--clip-param" not in text
    assert main(["train", "ppo", "--help-all"]) == 0
    assert "--clip-param" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ppo", "dqn", "bc"])
def test_no_flag_of_the_help_is_without_effect(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name, "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not re.search("Has no effect|only choice|accepted for compatibility", text)
    is_online = get_config_class(name)().is_online
    assert ("--input" in text.split()) == ("--offline-evaluation-interval" in text.split()) == (not is_online)


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["size=3"], {"size": 3}),
        (["size=3", "map=4x4", "slippery=false"], {"size": 3, "map": "4x4", "slippery": False}),
        (['{"size": 3, "goal": [1, 2]}', "size=4"], {"size": 4, "goal": [1, 2]}),
        (['{size = 3, map = "4x4"}'], {"size": 3, "map": "4x4"}),
        (["limits.low=1", "none=null"], {"limits": {"low": 1}, "none": None}),
    ],
)
def test_dicts_are_given_by_keys_json_or_toml(texts: list[str], value: dict[str, object]) -> None:
    arguments = ["--env", "CartPole-v1", "--preset", "none"]
    for text in texts:
        arguments += ["--env-config", text]
    config = _config("ppo", _parse("ppo", arguments))
    assert config.env_config == value


def test_the_demo_is_a_command_of_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr("rlzmq.cli.train.train", lambda arguments: given.extend(arguments) or 0)
    assert main(["demo", "--learners", "1"]) == 0
    assert capsys.readouterr().out == f"$ rlzmq train {' '.join(given)}\n"
    options = _parse(given[0], given[1:])
    config = _config(given[0], options)
    assert (config.env, config.num_env_runners, config.num_learners, config.seed) == ("CartPole-v1", 2, 1, 1)
    assert options.stop == ["return=450", "steps=300000"]


def test_flags_mean_what_they_look_like() -> None:
    text = (
        "--env Pendulum-v1 --grad-clip none --normalize-actions False --explore --lr 1e-4 --seed 3 --learners 2 "
        "--entropy-coeff [[0,0.1],[1000,0]] --stop return=475 --stop steps=9 --join-file 7"
    )
    options = _parse("ppo", text.split())
    config = _config("ppo", options)
    assert options.stop == ["return=475", "steps=9"]
    assert (config.num_learners, config.entropy_coeff) == (2, [(0.0, 0.1), (1000.0, 0.0)])
    assert (config.grad_clip, config.normalize_actions, config.explore) == (None, False, True)
    assert (config.lr, config.seed, config.join_file) == (1e-4, 3, "7")
    assert config.num_envs_per_env_runner == 4  # the preset's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--env-config size", "--env-config 'size': expected key=value"),
        ("--num-env-runners two", "--num-env-runners: expected int ≥ 0, got 'two'"),
        ("--batch-mode whole", "--batch-mode: expected one of 'truncate_episodes', 'complete_episodes'"),
        ("--explore maybe", "--explore: expected bool, got 'maybe'"),
    ],
)
def test_a_wrong_value_names_the_flag(arguments: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _config("ppo", _parse("ppo", ["--env", "CartPole-v1", *arguments.split()]))
    assert str(caught.value).startswith(message)
    assert ".env_runners(" not in str(caught.value)


def test_a_run_says_what_it_starts_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from rlzmq.cli import train\n"
        "train._checkpoint_to_resume = lambda *a: sys.exit('torch is imported' if 'torch' in sys.modules else 0)\n"
        "train.get_fork_server = lambda: None\n"
        "train.train(['ppo', '--env', 'CartPole-v1', '--learners', '1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "starting    2 runners, 1 learner for CartPole-v1"


@pytest.mark.parametrize("encoding", ["latin-1", "UTF-8"])
def test_every_file_gets_readable_texts_in_their_order(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding, line_buffering=name == "stderr"))
    assert main(["--help"]) == 0
    assert main(["stacks"]) == 2
    assert main(["train", "ppo", "CartPole-v1", "--num-epochs", "0"]) == 78
    lines = written.getvalue().decode(encoding).splitlines()
    assert lines[-3].startswith("rlzmq stacks: missing: PATH")
    assert lines[-2].startswith("settings: ")
    assert lines[-1].startswith("rlzmq: --num-epochs: ")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["trian"], 2, "Did you mean 'train'"),
        (["train", "ppo", "--lrr", "3"], 2, "--lr"),
        (["train", "pppo", "--env", "CartPole-v1"], 78, "Did you mean 'ppo'"),
        (["train", "ppo"], 78, "rlzmq train ppo --env CartPole-v1"),
        (["train", "ppo", "--env", "CartPole-v1", "--gamma", "2"], 78, "--gamma: expected"),
        (["train", "ppo", "--env", "CartPole-v1", "--stop", "retrun=3"], 78, "Did you mean 'return'"),
        (["train", "ppo", "--env", "CartPol-v1", "--env-runners", "0"], 78, "CartPole"),
        (["tune", "ppo", "--env", "CartPole-v1", "--lr", "1..2:logg"], 78, "A range is LOW..HIGH"),
        (["tune", "ppo", "--env", "CartPole-v1", "--lr", "1e-4:1e-2"], 78, "A range is LOW..HIGH"),
        (["train", "ppo", "--env-runner", "2"], 2, "there is no --env-runner. Did you mean '--env-runners'?"),
        (["train", "ppo", "--learning-rat", "1"], 2, "there is no --learning-rat. Did you mean '--lr'?"),
        (["tune", "pppo", "--env", "CartPole-v1", "--lr", "1,2"], 78, "Did you mean 'ppo'"),
        (["tune", "CartPole-v1", "--lr", "1,2"], 2, "Instead: rlzmq tune ppo --env CartPole-v1 --lr 1,2"),
        (["ckpt", "list", "runs"], 2, "rlzmq ckpt: invalid choice 'list'"),
        (["launch"], 2, "end the run with a checkpoint. PATH Directory of a run"),
        (["tune", "bc", "--env", "CartPole-v1", "--lr", "1,2"], 78, "but nothing is evaluated"),
        (["evaluate", "/nowhere"], 78, "does not exist"),
        (["evaluate", __file__], 78, "is not a checkpoint"),
        (["serve", str(Path(__file__).parent)], 78, "holds no checkpoint"),
        (["tune", "ppo", "--env", "CartPole-v1", "--lr", "1,2", "--resume"], 78, "--resume needs the --name"),
        (["ckpt", "diff", "."], 78, "expected 2 checkpoints or run directories, got 1"),
        (["ckpt", "diff", "docs", "docs"], 78, "is not a checkpoint: it has no manifest.json"),
        (["top", "tcp://127.0.0.1:5555"], 78, "join file"),
        (["top", "docs"], 78, "no run has its sockets in docs"),
        (["top", "--interval", "-1"], 78, "more than 0 seconds, got -1"),
        (["completion", "csh"], 2, "bash"),
        (["ckpt", "ls", "/nowhere"], 78, "/nowhere does not exist"),
        (["replay", "/nowhere"], 78, "/nowhere does not exist: expected a recorded run"),
        (["inspect", "nowhere"], 78, "nowhere is neither a directory"),
        (["dashboard", ".", "--port", "99999"], 78, "--port 99999: expected 0 to 65535"),
    ],
)
def test_mistakes_end_with_their_code_and_text(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert text in capsys.readouterr().err


def test_stop_criteria() -> None:
    result = {"training_iteration": 3, "env_runners": {"episode_return_mean": 10.0}, "time_total_s": 1.0}
    assert StopCriteria(["return=11"]).met_by(result) is None
    assert StopCriteria(["return=10"]).met_by(result) == "env_runners/episode_return_mean = 10 ≥ 10"
    assert StopCriteria(["iterations=3", "return=99"]).met_by(result) == "training_iteration = 3 ≥ 3"
    assert StopCriteria(["learners/x/y=1"]).met_by(result) is None
    with pytest.raises(ConfigurationError, match="not a number"):
        StopCriteria(["return=high"])


# -- completion ----------------------------------------------------------------------------------------


# What is offered after words, and some of what must be among it.
_SOME = ["ppo", "bc"]  # of the algorithms: each takes a third of a second
_OFFERED = {
    "rlzmq": set(COMMANDS),
    "rlzmq train": set(_SOME),
    "rlzmq train ppo": {"--env", "--num-env-runners", "--env-runners", "--clip-param", "--resume"},
    "rlzmq evaluate": {"--episodes", "--video", "--env", "--import"},
    "rlzmq launch": {"--follow", "--grace"},
}
_ASK = """
COMP_WORDS=({words} '') COMP_CWORD={last}
COMPREPLY=()
_tyro_rlzmq
echo "${{COMPREPLY[*]}}" | tr '\\n' ' '
echo
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_bash_completes_commands_algorithms_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rlzmq.bash"
    monkeypatch.setattr("rlzmq.cli.completion.ALGORITHMS", _SOME)
    with monkeypatch.context() as patch, script.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    asked = [_ASK.format(words=words, last=len(words.split())) for words in _OFFERED]
    text = "\n".join([f"source {script}", *asked])
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=60, check=True
    )
    for offered, line in zip(_OFFERED.values(), done.stdout.splitlines(), strict=True):
        assert offered <= set(line.split()), line
