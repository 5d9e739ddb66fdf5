"""Photograph pages of the site, and README as PyPI and GitHub show it, at a desktop's and a phone's width.

Build the site first (``python3 scripts/docs.py``). Prints what does not fit: pages that scroll sideways, pictures that
are missing, and tables and code that are cut off on a desktop, of all pages with ``--all``. Exits with 1 if any is.

Usage: ``.venv/bin/python scripts/photograph_docs.py DIRECTORY [--all]``. Needs Chromium, and for README
``pip install readme_renderer[md]``; what is missing is said, and left out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from package_readme import package_text

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "docs"
PAGES = ("index", "tour", "which_algorithm", "reference/commands/train", "reliability")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
README_PX = 1100  # height of what stands above README's first heading: a developer's screen

# Width of the page and of the window; pictures that are missing; beginnings of blocks that are wider than their place.
_LOOK = """() => [
    document.documentElement.scrollWidth - document.documentElement.clientWidth,
    [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
    [...document.querySelectorAll("pre, .table-wrapper")].filter(block => block.scrollWidth > block.clientWidth + 1)
        .map(block => block.innerText.slice(0, 60)),
]"""
# GitHub's looks; DejaVu Sans Condensed runs about as wide as its fonts.
_FRAME = """<meta charset=utf-8><base href="{base}/"><style>
body {{ font: 16px/1.5 "DejaVu Sans Condensed", sans-serif; font-stretch: condensed; max-width: 832px;
    margin: 0 auto; padding: 32px }}
h1 {{ font-size: 32px; line-height: 1.25; border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; margin: 0 0 16px }}
h2 {{ font-size: 24px; line-height: 1.25; border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; margin: 24px 0 16px }}
p, pre, table {{ margin: 0 0 16px }} img {{ max-width: 100% }} img[align=right] {{ padding-left: 20px }}
pre {{ overflow: auto; background: #f6f8fa; padding: 16px; font: 13.6px/1.45 "DejaVu Sans Mono", monospace }}
table {{ border-collapse: collapse; display: block; width: max-content; max-width: 100%; overflow: auto }}
td, th {{ border: 1px solid #d1d9e0; padding: 6px 13px }}
@media (max-width: 500px) {{ body {{ padding: 16px }} }}
</style>{html}"""


def readmes(directory: Path) -> dict[str, Path]:
    """Write README.md as the package index and GitHub show it; return the files by name."""
    if find_spec("comrak") is None or find_spec("readme_renderer") is None:
        print("README.md: left out, its renderer is not installed (pip install readme_renderer[md])")
        return {}
    from readme_renderer.markdown import render

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = {}
    for name, shown in {"readme_pypi": package_text(text), "readme_github": text}.items():
        files[name] = directory / f"{name}.html"
        files[name].write_text(_FRAME.format(base=ROOT.as_uri(), html=render(shown)), encoding="utf-8")
    return files


def photograph(browser: Any, files: dict[str, Path], directory: Path) -> list[str]:
    """Photograph the pages; return what is wrong with them."""
    wrong = []
    for kind, (width, height) in WIDTHS.items():
        context = browser.new_context(viewport={"width": width, "height": height})
        for name, file in files.items():
            page = context.new_page()
            page.goto(file.as_uri())
            sideways, missing, cut = page.evaluate(_LOOK)
            above = page.evaluate("document.querySelector('h2')?.getBoundingClientRect().top ?? 0")
            page.screenshot(path=directory / f"{name.replace('/', '_')}-{kind}.png", full_page=True)
            page.close()
            wrong += [f"{kind} {name}: the page is {sideways} px too wide"] if sideways > 0 else []
            wrong += [f"{kind} {name}: no picture {source}" for source in missing]
            if name == "readme_github" and kind == "desktop" and above > README_PX:
                wrong.append(f"README.md: its first screen is {above:.0f} px high, more than {README_PX}")
            if kind == "desktop":  # on a phone they scroll
                wrong += [f"{kind} {name}: cut off: {text!r}" for text in cut]
        context.close()
    return wrong


def main() -> int:
    """Return 0 if everything fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="for the pictures")
    parser.add_argument("--all", action="store_true", help="all pages that people write")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        print("nothing photographed: Chromium or playwright is not installed")
        return 0
    if not (SITE / "index.html").exists():
        print("no site: run python3 scripts/docs.py first")
        return 1
    from playwright.sync_api import sync_playwright

    arguments.directory.mkdir(parents=True, exist_ok=True)
    written = [
        path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")
    ]
    names = [name for name in sorted(written) if (SITE / f"{name}.html").exists()] if arguments.all else PAGES
    files = {name: SITE / f"{name}.html" for name in names} | readmes(arguments.directory)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wrong = photograph(browser, files, arguments.directory)
        browser.close()
    print("\n".join(wrong) or f"{len(files)} pages fit, see {arguments.directory}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
