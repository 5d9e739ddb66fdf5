"""Parsing of command-line options, and help texts that fit the terminal's width."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean_flag, instead_of_flag

__all__ = ["OptionsExit", "command", "flag_of", "import_first", "parse", "tyro_config", "with_field_help"]

_Options = TypeVar("_Options")


def tyro_config() -> tuple[Any, ...]:
    """Return how tyro reads the options of all commands."""
    import tyro

    conf = tyro.conf
    return (conf.UseAppendAction, conf.FlagCreatePairsOff, conf.DisallowNone, conf.OmitArgPrefixes)


class OptionsExit(SystemExit):
    """Raised after printing the help or an error about options, to distinguish it from the command's own exit."""


def parse(
    kind: type[_Options],
    arguments: Sequence[str],
    *,
    usage: str,
    description: str,
    usual: Collection[str] | None = None,
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> _Options:
    """Read a command's options.

    Args:
        kind: A dataclass with a docstring under each field that states the field's default.
        arguments: The command line after the command's name.
        usage: The usage line, e.g. ``"rlzmq evaluate PATH [options]"``; its first words in lower case are the command.
        description: The command's description, shown in its help.
        usual: Names of the fields that ``--help`` shows, of several hundred; ``--help-all`` shows all. None: all.
        elsewhere: Says of the name of an unknown flag whose it is.

    Raises:
        OptionsExit: The help was printed (0), or the options are wrong (2).
    """
    import tyro

    prog = " ".join(
        itertools.takewhile(re.compile("[a-z0-9-]+").fullmatch, usage.partition(" --")[0].split())
    )
    helps = {"-h", "--help", *(["--help-all"] if usual is not None else [])} & set(arguments)
    shown = with_field_help(kind, usual if helps and "--help-all" not in helps else None)
    if not helps:
        complaint = io.StringIO()
        # tyro draws other boxes, which _in_short cannot read, where stdout names its encoding otherwise.
        drawn = io.TextIOWrapper(io.BytesIO(), "utf-8")
        try:
            with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(drawn):
                return typing.cast(
                    _Options, tyro.cli(shown, args=list(arguments), prog=prog, config=tyro_config())
                )
        except SystemExit as error:
            known = {name for flag, aliases in _flags_of(kind) for name in (flag, *aliases)}
            instead = _instead(prog, arguments, known, elsewhere)
            print(instead or _in_short(prog, usage, complaint.getvalue()), file=sys.stderr)
            raise OptionsExit(error.code) from None
    said = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding or "utf-8", newline="\n")
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(shown, args=["--help"], prog=prog, config=tyro_config())
    said.seek(0)
    _, _, listed = said.read().partition("\n\n")  # without tyro's usage line, which is not wrapped
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(f"usage: {usage}", width, subsequent_indent="  "), end="\n\n")
    print(textwrap.fill(description, width), end="\n\n")
    listed = re.sub(r"\[\[(\w+) \[\1 \.\.\.\]\]\]", lambda found: f"{found[1]}…".ljust(len(found[0])), listed)
    print(listed.replace(" (default: )", " " * 12).rstrip())
    if usual is not None and "--help-all" not in helps:
        print(f"\n{prog} --help-all: the other {len(dict(_flags_of(kind))) - len(usual)} flags")
    raise OptionsExit(0)


class command:
    """Decorator that makes a command of a function of its options: ``command(arguments)`` returns the exit code.

    Args:
        kind: The class of the options.
        usage, description: See `parse`.
    """

    def __init__(self, kind: type[Any], *, usage: str, description: str) -> None:
        self._kind, self._usage, self._description = kind, usage, description

    def __call__(self, main: Callable[[Any], int]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(main)
        def run(arguments: Sequence[str]) -> int:
            return main(parse(self._kind, arguments, usage=self._usage, description=self._description))

        vars(run)["kind"] = self._kind
        return run


def import_first(names: Sequence[str]) -> None:
    """Import the user's modules first, e.g. because they register envs.

    Raises:
        ConfigurationError: A module cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(f"--import {name}: {error}") from None


def _instead(
    prog: str, arguments: Sequence[str], flags: set[str], elsewhere: Callable[[str], str | None]
) -> str:
    """Return one line for each flag that is another library's word, or another command's: what to write here."""
    words = [argument.partition("=")[0] for argument in arguments if re.match("--?[a-zA-Z]", argument)]
    lines = []
    for word in words:
        if word.replace("_", "-") in flags:
            continue
        if here := instead_of_flag(word, flags):
            lines.append(f"{prog}: there is no {word}. Instead: {here}")
        elif whose := elsewhere(word.lstrip("-").replace("-", "_")):
            lines.append(f"{prog}: there is no {word}: it is {whose}.")
        elif near := did_you_mean_flag(word, flags):
            lines.append(f"{prog}: there is no {word}.{near}")
    return "\n".join(lines)


def _in_short(prog: str, usage: str, complaint: str) -> str:
    """Return what tyro says in a box of many lines as one line, with the usage if something is missing."""
    lines = [line.strip("│ ") for line in complaint.splitlines() if line.startswith("│")]
    parts = [
        " ".join(part).strip()
        for is_rule, part in itertools.groupby(lines, lambda line: line.startswith("──"))
        if not is_rule
    ]
    if not parts:
        return complaint.rstrip()
    text, more = parts[0], f" ({prog} --help: the options)"
    if text.startswith("Missing from"):
        missing = text.partition(": ")[2].removesuffix(" (required)").replace(" (required)", "")
        return f"{prog}: missing: {missing} usage: {usage}"
    if found := re.match(r"Missing value for argument '(.*)'", text):
        text = f"{found[1]}: its value is missing."
    elif found := re.match(r"Error parsing (\S+): .*: ('.*')", text):
        kind = re.search(rf"{found[1]} ([A-Z|]+)", " ".join(parts[1:]))
        text, more = f"{found[1]}: expected {kind[1] if kind else 'another value'}, got {found[2]}.", ""
    return f"{prog}: {text[0].lower()}{text[1:]}{more}"


def _flags_of(kind: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the flags of an options class and of the groups in it, with their other names."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            yield from _flags_of(field.default_factory)
        else:
            marks = typing.get_args(hints[field.name])[1:]
            yield (
                flag_of(field.name),
                [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()],
            )


def flag_of(name: str) -> str:
    """Return the flag of a field or setting."""
    return "--" + name.rstrip("_").replace("_", "-")


def with_field_help(kind: Any, usual: Collection[str] | None) -> Any:
    """Return `kind` with the docstring under each field as its help, without tyro's note on defaults.

    Fields that are not `usual` are left out of the help, also in groups; None: none is.
    """
    import tyro

    hints = typing.get_type_hints(kind, include_extras=True)
    docs = _docs_of_fields(kind)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(kind):
        hint, factory = hints[field.name], field.default_factory
        if dataclasses.is_dataclass(factory):  # a generated group, whose fields have their help already
            if usual is None:
                continue
            base, *marks = typing.get_args(hint)
            factory = with_field_help(base, usual)
            factory.__doc__ = base.__doc__
            hint = Annotated[(factory, *marks)]
        elif usual is not None and field.name not in usual:
            hint = Annotated[hint, tyro.conf.Suppress]
        if field.name in docs:
            is_required = field.default is dataclasses.MISSING and factory is dataclasses.MISSING
            note = None if is_required else ""
            name = "import" if field.name == "import_" else None
            hint = Annotated[hint, tyro.conf.arg(help=docs[field.name], help_behavior_hint=note, name=name)]
        again: Any = dataclasses.field(default=field.default, default_factory=factory, kw_only=field.kw_only)
        fields.append((field.name, hint, again))
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,))


def _docs_of_fields(kind: type) -> dict[str, str]:
    """Map each field to the docstring below it, for classes with available source code."""
    docs: dict[str, str] = {}
    for klass in kind.__mro__:
        with contextlib.suppress(OSError, TypeError):
            body = ast.parse(textwrap.dedent(inspect.getsource(klass))).body[0].body  # type: ignore[attr-defined]
            for field, below in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs
