"""``rlzmq attach``: start a new driver instead of a dead one while the run's broker and runners still wait."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlzmq.cli import train
from rlzmq.cli.main import find_modules_here
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

__all__ = ["AttachOptions", "run"]

_REPLACED = ("--resume", "--run-dir")  # options that attach sets itself


@dataclass
class AttachOptions:
    """Options of ``rlzmq attach``."""

    run_dir: str = ""
    """The run's directory (default: the newest under runs/)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq attach``; return the exit code."""
    from rlzmq.core.checkpoint_series import find_checkpoint

    given = list(arguments)
    where = given.pop(0) if given and not given[0].startswith("-") else ""
    options = parse(
        AttachOptions,
        given,
        usage="rlzmq attach [RUN_DIR]",
        description="Continue a run whose driver died.",
    )
    directory = _find(where or options.run_dir)
    facts = _read(directory)
    _check_driver_is_gone(directory, facts)
    command = _without(facts["train"], _REPLACED)
    try:
        os.chdir(facts["cwd"])
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: the run was started in {facts['cwd']}, which cannot be entered: {error.strerror}"
        ) from error
    find_modules_here()
    resume = "auto"
    if find_checkpoint(directory).path is None:
        # A run without a checkpoint continues from the one that it was resumed from.
        resume = _value(facts["train"], "--resume") or resume
    if _value(command, "--seed") is None and isinstance(facts.get("seed"), int):
        command += ["--seed", str(facts["seed"])]  # the seed was drawn, and waiting peers compare configs
    return train.run([*command, "--run-dir", str(directory), "--resume", resume])


def _find(where: str) -> Path:
    if where:
        return Path(where).absolute()
    runs = Path("runs")
    found = [path for path in runs.glob("*/run.json") if path.is_file()] if runs.is_dir() else []
    if not found:
        raise ConfigurationError("no run under runs/: name its directory (rlzmq attach RUN_DIR)")
    return max(found, key=lambda path: path.stat().st_mtime).parent.absolute()


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{directory} is not a run directory: {error}") from error
    told = facts if isinstance(facts, dict) else {}
    commands = [told.get("train"), told.get("command")]
    are_commands = all(isinstance(c, list) and all(isinstance(part, str) for part in c) for c in commands)
    if not are_commands or not told["train"] or not isinstance(told.get("cwd"), str):
        raise ConfigurationError(
            f"{path}: its run was not started by 'rlzmq train', so its command is not known here. Start your script "
            "again; Algorithm.resume(RUN_DIR, config=…) continues from its newest checkpoint."
        )
    return dict(facts)


def _check_driver_is_gone(directory: Path, facts: dict[str, Any]) -> None:
    """Raise ConfigurationError if the run's driver still runs on this machine."""
    pid, host = facts.get("pid"), facts.get("host")
    if host != platform.node() or not isinstance(pid, int):
        return
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    expected = [argument.encode() for argument in facts["command"][1:]]
    if [part for part in command if part][-len(expected) :] == expected:
        raise ConfigurationError(
            f"{directory}: its driver (pid {pid}) still runs. End it first (kill {pid}): two drivers would compete "
            "for the run."
        )


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without these options and their values."""
    kept: list[str] = []
    skips_next = False
    for argument in arguments:
        if skips_next:
            skips_next = False
        elif argument in names:
            skips_next = True
        elif argument.partition("=")[0] not in names:
            kept.append(argument)
    return kept


def _value(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of an option; None if it is not among the arguments."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        option, is_joined, joined = argument.partition("=")
        if option == name:
            value = joined if is_joined else following
    return value
