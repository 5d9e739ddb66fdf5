"""``rlzmq completion``: print a shell script that completes commands, algorithms, flags and their values."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from rlzmq.cli.main import _COMMANDS, main
from rlzmq.cli.parsing import parse

__all__ = ["CompletionOptions", "run"]

# A flag's line in a help text of 120 columns (wider ones place panels side by side): its names, each with its
# placeholder, then two spaces and the explanation.
_FLAG = re.compile(r"^│ (-.*?)(?:  |\s*│?$)", re.MULTILINE)
_POSITIONAL = re.compile(r"^│ \{([\w,-]+)\}", re.MULTILINE)
# Placeholders, which are not literal values.
_PLACEHOLDERS = {
    "NAME",
    "NAME(KEY=VALUE)",
    "INT",
    "FLOAT",
    "NUMBER",
    "STR",
    "TEXT",
    "PATH",
    "JSON",
    "KEY=VALUE",
    "ID",
    "…",
    "PACKAGE.MODULE:NAME",
}

# bash and zsh: the case of each position in a command line.
_WORDS = """\
# arguments: the command, what follows it, the word before the cursor, the word at the cursor
_rlzmq_words() {
  local place="$1"
  if [ "$1" = train ] && [ -n "$2" ]; then place="train $2"; fi
  case "$4" in
    -*) place="$place -" ;;
    *) case "$3" in -*) place="$place $3" ;; esac ;;
  esac
  case "$place" in
@CASES@
  esac
}
"""

_BASH = """\
# rlzmq completion bash > ~/.local/share/bash-completion/completions/rlzmq
@WORDS@
_rlzmq() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" command="" next=""
  if [ "$current" = = ]; then  # bash cuts --flag=value into three words
    current=""
  elif [ "$previous" = = ]; then
    previous="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  if [ "$COMP_CWORD" -gt 1 ]; then command="${COMP_WORDS[1]}"; fi
  if [ "$COMP_CWORD" -gt 2 ]; then next="${COMP_WORDS[2]}"; fi
  COMPREPLY=($(compgen -W "$(_rlzmq_words "$command" "$next" "$previous" "$current")" -- "$current"))
}
complete -o default -F _rlzmq rlzmq
"""

_ZSH = """\
#compdef rlzmq
# rlzmq completion zsh > DIRECTORY/_rlzmq, a directory of $fpath
@WORDS@
_rlzmq() {
  local current="${words[CURRENT]}" previous="${words[CURRENT-1]}" command="" next=""
  local -a found
  if [[ "$current" == --*=* ]]; then
    previous="${current%%=*}" current="${current#*=}"
    compset -P '*='
  fi
  if (( CURRENT > 2 )); then command="${words[2]}"; fi
  if (( CURRENT > 3 )); then next="${words[3]}"; fi
  found=(${=$(_rlzmq_words "$command" "$next" "$previous" "$current")})
  compadd -- $found || _files
}
if [ "${funcstack[1]}" = _rlzmq ]; then _rlzmq; else compdef _rlzmq rlzmq; fi
"""

_FISH = """\
# rlzmq completion fish > ~/.config/fish/completions/rlzmq.fish
function __rlzmq_words
  set -l typed (commandline -opc)
  set -l current (commandline -ct)
  set -l place "$typed[2]"
  set -l flag ''
  set -l words
  if test "$place" = train; and set -q typed[3]
    set place "train $typed[3]"
  end
  if string match -q -- '--*=*' "$current"
    set flag (string replace -r '=.*' '' -- "$current")
    set place "$place $flag"
    set flag "$flag="
  else if string match -q -- '-*' "$current"
    set place "$place -"
  else if string match -q -- '-*' "$typed[-1]"
    set place "$place $typed[-1]"
  end
  switch "$place"
@CASES@
  end
  set words "$flag"$words
  if string match -q -- "$current*" $words
    printf '%s\\n' $words
  else
    __fish_complete_path "$current"
  end
end
complete -c rlzmq -f -a '(__rlzmq_words)'
"""


@dataclass
class CompletionOptions:
    """Options of ``rlzmq completion``."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell that runs the script."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq completion``; return the exit code."""
    options = parse(
        CompletionOptions,
        arguments,
        usage="rlzmq completion SHELL",
        description="Print a script that completes the rlzmq command line: commands, algorithms, flags, their values "
        "and files. Try it: source <(rlzmq completion bash). To install it, write it to "
        "~/.local/share/bash-completion/completions/rlzmq (bash), _rlzmq in a directory of $fpath (zsh), or "
        "~/.config/fish/completions/rlzmq.fish, and again after an update of rlzmq.",
    )
    places = _places()
    if options.shell == "fish":
        script, case, join = _FISH, "    case {}\n      set words {}", " "
    else:
        script, case, join = {"bash": _BASH, "zsh": _ZSH}[options.shell], "    {}) echo '{}' ;;", "|"
    alike: dict[str, list[str]] = {}
    for place, words in places.items():
        if words:
            alike.setdefault(" ".join(words), []).append(f"'{place}'")
    cases = "\n".join(case.format(join.join(where), words) for words, where in alike.items())
    print(script.replace("@WORDS@", _WORDS).replace("@CASES@", cases), end="")
    return 0


def _places() -> dict[str, list[str]]:
    """Map each position in a command line to its possible words; an empty list means files.

    A position is the command (with its algorithm), then ``-`` for the flags, or the flag whose value is being typed.
    """
    from rlzmq.algorithms.registry import ALGORITHMS, presets_of

    places = {
        "": list(_COMMANDS),
        " -": ["--help", "--version"],
        "train": list(ALGORITHMS),
        "train -": ["--help"],
    }
    for command in _COMMANDS:
        if command != "train":
            places.update(_places_of(command))
    for algorithm in ALGORITHMS:
        command = f"train {algorithm}"
        places.update(_places_of(command))
        places[command] = places[f"{command} -"]
        places[f"{command} --quiet"] = places[command]
        presets = presets_of(algorithm)
        envs = [p.env for name, p in presets.items() if not p.is_pattern and name == p.env]
        places[f"{command} --env"] = envs
        places[f"{command} --preset"] = ["auto", "none", *(name for name in presets if "*" not in name)]
    places["inspect"] = places["inspect --algorithm"] = list(ALGORITHMS)
    return places


def _places_of(command: str) -> dict[str, list[str]]:
    """Return the positions of one command, parsed from its help."""
    text = _help_of(command)
    flags: list[str] = ["--verbose"]
    places = {command: [word for words in _POSITIONAL.findall(text) for word in words.split(",")]}
    for line in _FLAG.findall(text):
        names = re.findall(r"--[\w-]+", line)
        flags += names
        value = line.rpartition(" ")[2].strip("{}")
        words = [word for word in re.split(r"[|,]", value) if word not in _PLACEHOLDERS]
        for name in names:
            places[f"{command} {name}"] = [] if value in names or words == ["none"] else words
    places[f"{command} -"] = flags
    return places


def _help_of(command: str) -> str:
    said = io.StringIO()
    with _environ(COLUMNS="120", NO_COLOR="1"), contextlib.redirect_stdout(said):
        main([*command.split(), "--help-all" if command.startswith("train ") else "--help"])
    return said.getvalue()


@contextlib.contextmanager
def _environ(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
