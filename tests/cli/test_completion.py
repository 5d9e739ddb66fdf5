"""``rlzmq completion``: what the shells themselves make of the scripts that it prints."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rlzmq.algorithms.registry import ALGORITHMS, get_config_class, presets_of
from rlzmq.cli import completion
from rlzmq.cli.main import _COMMANDS, main
from rlzmq.cli.options import _ALIASES, options_type
from rlzmq.cli.train import TrainOptions

_ASK = {
    "bash": """
source {script}
complete -p rlzmq > /dev/null || exit 1
COMP_WORDS=({words}) COMP_CWORD={last}
_rlzmq
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "zsh": """
compdef() {{ registered="$*" }}
compset() {{ : }}
compadd() {{ shift; printf '%s\\n' ${{(M)@:#$current*}}; }}
_files() {{ : }}
source {script}
[ "$registered" = "_rlzmq rlzmq" ] || exit 1
words=({words}) CURRENT=$(( {last} + 1 ))
_rlzmq
""",
    "fish": "source {script}; cd {empty}; complete -C {line}",
}
_OPTIONS = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}

_places = functools.cache(completion._places)


def completed(shell: str, line: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the shell offers for the last word of a line."""
    script = directory / "script"
    assert main(["completion", shell]) == 0
    script.write_text(capsys.readouterr().out)
    (directory / "empty").mkdir(exist_ok=True)
    words = line.split(" ")
    if shell == "bash":
        words = [part for word in words for part in word.replace("=", " = ").split(" ")]
    text = _ASK[shell].format(
        script=script,
        words=" ".join(map(shlex.quote, words)),
        last=len(words) - 1,
        line=shlex.quote(line),
        empty=directory / "empty",
    )
    command = [shell, *_OPTIONS[shell], "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    offered = [found.partition("\t")[0] for found in done.stdout.split("\n") if found]
    return [found.rpartition("=")[2] for found in offered] if "=" in line else offered


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not here"))
        for name in _ASK
    ],
)
def test_the_shell_completes(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_places", _places)  # read once
    for line, expected in {
        "rlzmq ": set(_COMMANDS),
        "rlzmq tr": {"train"},
        "rlzmq --ver": {"--version"},
        "rlzmq train ": set(ALGORITHMS),
        "rlzmq train p": {"ppo"},
        "rlzmq train ppo --num-env-r": {"--num-env-runners"},
        "rlzmq train ppo --preset ": {"auto", "none", *presets_of("ppo")} - {"ALE/*"},
        "rlzmq train ppo --preset=au": {"auto"},
        "rlzmq train ppo --gamma 0.9 --env Cart": {"CartPole-v1"},
        "rlzmq train ppo --log-level W": {"WARN", "WARNING"},
        "rlzmq train ppo --num-epochs ": set(),
        "rlzmq evaluate --": {
            *(
                "--verbose",
                "--help",
                "--episodes",
                "--json",
                "--video",
                "--video-episodes",
                "--seed",
                "--explore",
                "--env",
                "--config",
                "--trust",
                "--import",
            )
        },
        "rlzmq evaluate ": set(),  # files
        "rlzmq inspect i": {"impala", "iql"},
        "rlzmq completion ": {"bash", "zsh", "fish"},
    }.items():
        assert set(completed(shell, line, tmp_path, capsys)) == expected, line


def test_every_flag_and_every_choice_of_the_help_is_there() -> None:
    places = _places()
    for algorithm in ALGORITHMS:
        kind = options_type(get_config_class(algorithm), "Options", TrainOptions)
        fields = [field for field in dataclasses.fields(kind) if not field.name.startswith("group_")]
        for group in dataclasses.fields(kind):
            if group.name.startswith("group_"):
                fields += dataclasses.fields(group.default_factory)  # type: ignore[arg-type]
        flags = {"--" + field.name.rstrip("_").replace("_", "-") for field in fields}
        assert set(places[f"train {algorithm} -"]) == {*flags, *_ALIASES.values(), "--help", "--verbose"}
    typed = {word for place, words in places.items() for word in words if " --" in place and word[:1] != "-"}
    capitals = {word for word in typed if word.isupper()}
    assert capitals == {"DEBUG", "INFO", "WARN", "WARNING", "ERROR"}, "a placeholder would be typed"


def test_the_usage_names_it_and_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "source <(rlzmq completion bash)" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
