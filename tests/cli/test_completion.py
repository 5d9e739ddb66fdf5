"""``rlzmq completion``: what a shell makes of the script that it prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rlzmq.algorithms.registry import ALGORITHMS
from rlzmq.cli.main import COMMANDS, main

# What is offered after words, and some of what must be among it.
_OFFERED = {
    "rlzmq": set(COMMANDS),
    "rlzmq train": set(ALGORITHMS),
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


def test_the_usage_names_it_and_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "source <(rlzmq completion bash)" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
