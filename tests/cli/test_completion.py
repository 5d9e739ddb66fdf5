"""``rlzmq completion``: what a shell makes of the script that it prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rlzmq.algorithms.registry import ALGORITHMS
from rlzmq.cli.main import COMMANDS, main

_ASK = """
source {script}
COMP_WORDS=({words} '') COMP_CWORD={last}
_tyro_rlzmq
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rlzmq.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rlzmq", set(COMMANDS)),
        ("rlzmq train", set(ALGORITHMS)),
        ("rlzmq train ppo", {"--env", "--num-env-runners", "--env-runners", "--clip-param", "--resume"}),
        ("rlzmq evaluate", {"--episodes", "--video", "--env", "--import"}),
        ("rlzmq launch", {"logs", "stop"}),
    ],
)
def test_bash_completes_commands_algorithms_and_flags(words: str, offered: set[str], script: Path) -> None:
    text = _ASK.format(script=script, words=words, last=len(words.split()))
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=60, check=True
    )
    assert offered <= set(done.stdout.split()), done.stdout


def test_the_usage_names_it_and_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "source <(rlzmq completion bash)" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
