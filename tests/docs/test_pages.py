"""Pages are for a reader with a task: what stands at their top, words that they avoid, and lines that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of

ALGORITHMS = sorted((ROOT / "rlzmq" / "algorithms").glob("*/README.md"))
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


@pytest.mark.parametrize("page", [*PAGES, *ALGORITHMS], ids=name_of)
def test_a_page_opens_with_something_to_see_or_to_type(page: Path) -> None:
    top = page.read_text(encoding="utf-8").splitlines()[:NUM_LINES]
    assert re.match(r"# \S", top[0])
    assert any(line.startswith(("```", "![")) for line in top), "no picture, and no block that runs"


@pytest.mark.parametrize("page", [*PAGES, *ALGORITHMS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_prose_is_plain(page: Path) -> None:
    prose = NO_PROSE.sub("", page.read_text(encoding="utf-8"))
    assert AVOIDED.findall(prose) == []


@pytest.mark.parametrize("page", [*PAGES, *ALGORITHMS, ROOT / "CONTRIBUTING.md"], ids=name_of)
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
