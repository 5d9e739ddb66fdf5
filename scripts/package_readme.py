"""Hook of the build: package indexes show README.md without pictures and links that only the repository has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackageReadme(MetadataHookInterface):
    """Gives the project its ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": package_text(text)}


def package_text(text: str) -> str:
    """Return README's text for package indexes."""
    text = re.sub(r"^<img [^>]*>\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!\[[^\]]*\]\((?!https:)[^)]*\)\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https:)[^)]*\)", r"\1", text)
