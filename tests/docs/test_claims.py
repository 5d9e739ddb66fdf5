"""README.md and docs/**/*.md: they name nothing that is not there, open well, and avoid some words."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

import rlzmq
from rlzmq.algorithms import ALGORITHMS
from rlzmq.cli.main import COMMANDS, main
from rlzmq.envs import wrappers as environments
from tests.docs.pages import BUILT, PAGES, ROOT, name_of

CLAIMING = [*PAGES, ROOT / "SECURITY.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name != "all"}


def texts() -> dict[str, str]:
    return {name_of(page): page.read_text(encoding="utf-8") for page in CLAIMING}


def test_every_extra_is_of_use() -> None:
    imports = re.compile(
        r"""^ *(?:import|from) (\w+)|(?:import_optional|importlib\.import_module)\(\s*["'](\w+)""",
        re.MULTILINE,
    )
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "rlzmq").rglob("*.py"))
    imported = {name for text in sources for names in imports.findall(text) for name in names}
    # fsspec imports the drivers of its filesystems by itself.
    drivers = {known_implementations[scheme]["class"].split(".")[0] for scheme in ("s3", "gs")}
    for extra, needs in EXTRAS.items():
        if f"rlzmq[{extra}]" in environments.EXTRAS.values():  # imported by name
            continue
        for need in needs:
            package = re.split(r"[^\w-]", need)[0].replace("-", "_").lower()
            # Minari imports pillow, and does not ask for it; universal-pathlib is imported as upath.
            assert package in imported | drivers | {"pillow", "universal_pathlib"}, (
                f"{extra!r} installs {package}, which nothing in rlzmq imports"
            )
    named = {match[1] for text in environments.EXTRAS.values() if (match := re.match(r"rlzmq\[(.*)\]", text))}
    assert named <= set(EXTRAS)


def test_all_is_every_extra() -> None:
    assert PROJECT["optional-dependencies"]["all"] == [f"rlzmq[{','.join(EXTRAS)}]"]


def test_extras_that_are_named_exist() -> None:
    sources = {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "rlzmq").rglob("*.py")}
    for name, text in {**texts(), **sources}.items():
        for extras in re.findall(r"rlzmq\[([a-z,]+)\]", text):
            assert set(extras.split(",")) <= {*EXTRAS, "all"}, f"{name}: rlzmq[{extras}]"


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{page.name}: {target}"
        for page in CLAIMING
        for pattern in (r"\]\(([^)#:]+)(?:#[^)]*)?\)", r"((?:scripts|tests)/[\w/]+\.(?:py|txt))")
        for target in re.findall(pattern, page.read_text(encoding="utf-8"))
        if not (BUILT.search(target) or (page.parent / target).exists() or (ROOT / target).exists())
    ]
    assert missing == []


def test_modules_and_names_that_are_named_exist() -> None:
    packages = "|".join(path.parent.name for path in (ROOT / "rlzmq").glob("*/__init__.py"))
    for page, text in texts().items():
        named = set(re.findall(r"`(rlzmq(?:\.\w+)+)", text))
        if page == "docs/architecture.md":  # names modules without rlzmq
            named |= {f"rlzmq.{found}" for found in re.findall(rf"`((?:{packages})(?:\.\w+)+)`", text)}
        for dotted in named:
            module, _, name = dotted.rpartition(".")
            if name in ("json", "toml"):  # a file
                continue
            try:
                importlib.import_module(dotted)
            except ImportError:
                assert hasattr(importlib.import_module(module), name), f"{page}: {dotted}"


def test_commands_and_flags_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    flags: dict[str, set[str]] = {}
    wrong: list[str] = []
    for page, text in texts().items():
        fenced = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)).replace(" \\\n", "")
        typed = re.findall(r"(?:^|\| )(rlzmq [a-z][^`\n#]*)", fenced, re.MULTILINE)
        for line in [*typed, *re.findall(r"`(rlzmq [a-z][^`\n]*)`", text)]:
            command = line.split()[1].rstrip(".,:;)")
            if command not in COMMANDS:
                wrong.append(f"{page}: {line}")
                continue
            if not (used := set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", line)) - {"--help"}):
                continue
            asked = [command, "--help"]
            if command in ("train", "tune"):
                named = [*line.split(), ""][2]
                asked = [command, named if named in ALGORITHMS else "ppo", "--help-all"]
            key = " ".join(asked[:-1])
            if key not in flags:
                assert main(asked) == 0
                flags[key] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            wrong += [f"{page}: rlzmq {key} has no {flag}" for flag in used - flags[key]]
    assert wrong == []


def test_settings_that_are_set_in_the_docs_exist() -> None:
    config = rlzmq.PPOConfig()
    for page, text in texts().items():
        for names in re.findall(r"`config\.(?!toml\b)(\w+)", text):
            assert hasattr(config, names), f"{page}: config.{names}"


READMES = sorted((ROOT / "rlzmq" / "algorithms").glob("*/README.md"))
NO_PROSE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
# Words of a diary or of a translation; "the newest" is "the latest" or "the last".
AVOIDED = re.compile(
    r"\b(?:likewise|in turn|newest|anew|beside other|none if there is none|an advice|belongs? into|at hand|formerly|"
    r"an earlier run|no longer|say in|with nothing else|of (?:mine|yours|theirs))\b",
    re.IGNORECASE,
)
COMMAND = re.compile(r"^(?:\$ )?(?:rlzmq|python3?|pip|kubectl|srun|torchrun|sky|helm|curl) ")
MAX_COLUMNS, NUM_LINES = 80, 15


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """The fenced blocks of a page: language and lines."""
    return [
        (language, block.splitlines())
        for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_a_page_opens_with_something_to_see_or_to_type(page: Path) -> None:
    top = page.read_text(encoding="utf-8").splitlines()[:NUM_LINES]
    assert re.match(r"# \S", top[0])
    assert any(line.startswith(("```", "![")) for line in top), "no picture, and no block that runs"


@pytest.mark.parametrize("page", [*PAGES, *READMES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_prose_is_plain(page: Path) -> None:
    prose = NO_PROSE.sub("", page.read_text(encoding="utf-8"))
    assert AVOIDED.findall(prose) == []


@pytest.mark.parametrize("page", [*PAGES, *READMES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_code_and_commands_fit_their_column(page: Path) -> None:
    wide = [
        line
        for language, lines in blocks(page.read_text(encoding="utf-8"))
        for line in lines
        if len(line) > MAX_COLUMNS and (language in ("python", "py") or COMMAND.match(line))
    ]
    assert wide == []


def test_readmes_first_screen_has_all_that_a_newcomer_looks_for() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert "docs/kill.gif" in first
    assert "docs/peers.svg" in first
    (python, code), (_, commands) = blocks(first)
    assert python == "python"
    assert len([line for line in code if line]) == 8
    typed = ["pip install .", "python3 scripts/demo.py", "python3 scripts/test.py"]
    assert [line.split("  ")[0] for line in commands] == typed
    assert len(re.findall(r"^\|", first, re.MULTILINE)) == 2 + 6
    links = first[first.index("**Docs:**") :]
    assert len(re.findall(r"\]\(", links)) == 4
