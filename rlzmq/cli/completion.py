"""``rlzmq completion``: print a shell script that completes commands, algorithms, flags and their choices."""

from __future__ import annotations

import contextlib
import functools
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.cli.main import COMMANDS, function_of
from rlzmq.cli.options import options_type
from rlzmq.cli.parsing import command, tyro_config, with_field_help
from rlzmq.cli.train import TrainOptions
from rlzmq.cli.tune import AlgorithmOptions

__all__ = ["completion"]


@dataclass
class CompletionOptions:
    """Options of ``rlzmq completion``."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """The shell that runs the script."""


@command(
    CompletionOptions,
    usage="rlzmq completion SHELL",
    description="Print a script that completes the rlzmq command line: commands, algorithms, flags and their choices. "
    "Try it: source <(rlzmq completion bash). To install it, write it to "
    "~/.local/share/bash-completion/completions/rlzmq (bash) or to _rlzmq in a directory of $fpath (zsh), and again "
    "after an update of rlzmq.",
)
def completion(options: CompletionOptions) -> int:
    whole = _one_of({name: _kind_of(name) for name in COMMANDS})
    with contextlib.suppress(SystemExit):
        tyro.cli(whole, prog="rlzmq", args=["--tyro-print-completion", options.shell], config=tyro_config())
    return 0


def _kind_of(name: str) -> object:
    """Return the class of a command's options; of a command with algorithms, the union of theirs."""
    if name in ("train", "tune"):
        base = TrainOptions if name == "train" else AlgorithmOptions
        kinds = {each: options_type(get_config_class(each), "Options", base) for each in ALGORITHMS}
        return _one_of({each: with_field_help(kind, None) for each, kind in kinds.items()})
    return with_field_help(function_of(name).kind, None)


def _one_of(kinds: dict[str, Any]) -> Any:
    marked: list[Any] = [Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in kinds.items()]
    return functools.reduce(operator.or_, marked)
