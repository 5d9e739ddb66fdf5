"""The pages of the documentation that people write."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# by docs/generated_pages.py
BUILT = re.compile(r"(?:^|/)(?:algorithms|project|reference/\w+)/[\w-]+\.(?:md|rst)$")
PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not BUILT.search(page.relative_to(ROOT / "docs").as_posix())
    ),
]


def name_of(page: Path) -> str:
    """Return the page's path in the project."""
    return page.relative_to(ROOT).as_posix()
