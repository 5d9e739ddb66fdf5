"""Sphinx extension: write the pages that follow from the code, and send links between files to pages.

Before each build it writes, where the text changed, into ``docs/reference``: every public name (``names``), every
setting of each algorithm (``settings``), every command's help (``commands``). Into ``docs/algorithms`` go the
READMEs of the algorithms, into ``docs/project`` ``SECURITY.md`` and ``CHANGELOG.md``.
"""

import contextlib
import inspect
import io
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

import rlzmq
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.cli.main import COMMANDS, main
from rlzmq.config.rllib_only import RLLIB_ONLY, find_rllib_only
from rlzmq.config.settings import settings_of

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY_PAGES = {
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
}
HELP_COLUMNS = "80"

TOPICS = {
    "algorithms": "Algorithms and their configs",
    "actors": "Actors",
    "config": "Model config and settings",
    "connectors": "Connectors",
    "core": "Errors, metrics, callbacks, seeds",
    "driver": "Groups of runners and learners",
    "envs": "Environments",
    "episodes": "Episodes",
    "learners": "Learners",
    "modules": "RL modules and distributions",
    "replay": "Replay buffers",
    "runners": "Env runners",
    "tune": "Results of searches",
}
# Where the members of a public class end: what comes from outside is documented there.
OUTSIDE = (
    "object",
    "Module",
    "Exception",
    "RuntimeError",
    "ValueError",
    "dict",
    "list",
    "Generic",
    "Protocol",
    "ABC",
)


def pages() -> dict[str, str]:
    """Return every generated page: its text by its path in ``docs``."""
    return {
        **name_pages(),
        **settings_pages(),
        **command_pages(),
        **repository_pages(),
    }


def public_names() -> dict[str, list[str]]:
    """Return the public names of each package of rlzmq."""
    found: dict[str, list[str]] = {}
    for name, module in sorted(rlzmq._EXPORTS.items()):
        found.setdefault(module.partition(".")[0], []).append(name)
    return found


def name_pages() -> dict[str, str]:
    return {
        f"reference/names/{topic}.rst": _names_page(topic, names)
        for topic, names in public_names().items()
    }


def _names_page(topic: str, names: list[str]) -> str:
    title = TOPICS.get(topic, topic.capitalize())
    constants = [
        name for name in names if isinstance(getattr(rlzmq, name), str)
    ]
    parts = [
        title,
        "=" * len(title),
        "",
        "Look up these names, and import them from ``rlzmq``:",
        "",
    ]
    parts += [
        ".. code-block:: python",
        "",
        f"   from rlzmq import {names[0]}  # is in rlzmq.{topic}",
        "",
    ]
    parts += [_directive(name) for name in names if name not in constants]
    if constants:
        parts += [
            ".. list-table:: Keys (their meaning is in :doc:`/metrics`)",
            "   :header-rows: 1",
            "",
        ]
        parts += ["   * - name", "     - value"]
        for name in constants:
            parts += [
                f"   * - .. py:data:: rlzmq.{name}",
                "          :no-typesetting:",
                "",
            ]
            parts += [
                f"       ``{name}``",
                f"     - ``{getattr(rlzmq, name)!r}``",
            ]
    return "\n".join(parts) + "\n"


def _directive(name: str) -> str:
    value = getattr(rlzmq, name)
    if inspect.isclass(value) and value.__module__.startswith("rlzmq"):
        stops = [
            base.__name__
            for base in value.__mro__[1:]
            if base.__name__ in rlzmq.__all__
        ]
        stops += [stop for stop in OUTSIDE if stop != value.__name__]
        lines = [
            f".. autoclass:: rlzmq.{name}",
            "   :members:",
            "   :show-inheritance:",
        ]
        return "\n".join(
            [*lines, f"   :inherited-members: {', '.join(stops)}", ""]
        )
    if not inspect.isfunction(value) and not type(value).__module__.startswith(
        "rlzmq"
    ):
        shown = value.__name__ if inspect.isclass(value) else str(value)
        return f".. py:data:: rlzmq.{name}\n\n   An alias of ``{shown}``, for annotations.\n"
    kind = "autofunction" if inspect.isfunction(value) else "autodata"
    return f".. {kind}:: rlzmq.{name}\n"


def settings_pages() -> dict[str, str]:
    return {
        f"reference/settings/{name}.md": _settings_page(name)
        for name in sorted(ALGORITHMS)
    }


def _settings_page(algorithm: str) -> str:
    config_class = get_config_class(algorithm)
    config = config_class()
    groups: dict[str, list[Any]] = {}
    for field in settings_of(config_class).values():
        if field.group:
            groups.setdefault(field.group, []).append(field)
    parts = [
        f"# {config_class.__name__}\n",
        f"Look up a setting of `{config_class.__name__}`, its default, and the method that sets it:\n",
        f"```python\nfrom rlzmq import {config_class.__name__}\n\n"
        f"config = {config_class.__name__}().env_runners(num_env_runners=2)\n```\n",
        f"On the command line write hyphens (`rlzmq train {algorithm} --num-env-runners 2`);\n"
        "in a TOML file the method is the table (`[env_runners]`).\n",
    ]
    for group in sorted(groups, key=_order_of_setters(config_class)):
        parts.append(f"## {group}\n\n{_first_line(config_class, group)}\n")
        parts += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        parts += [
            f"| `{field.name}` | {_cell(field.expected)} | {_code(vars(config)[field.name])} | {_cell(field.doc)} |"
            for field in groups[group]
        ]
        parts.append("")
    parts += [
        "## RLlib's settings that are not here\n",
        "rlzmq ignores them, with one warning. If values are listed, all others are an error.\n",
        "| in RLlib | ignored values | instead |",
        "|---|---|---|",
    ]
    for row in RLLIB_ONLY:
        if find_rllib_only(config_class, row.name, row.setter) is row:
            values = (
                "all"
                if row.accepted is None
                else " ".join(map(_code, row.accepted)) or "none"
            )
            parts.append(
                f"| {row.setter}: `{row.name}` | {values} | {_cell(row.instead)} |"
            )
    return "\n".join([*parts, ""])


def _order_of_setters(config_class: type) -> Any:
    order = [
        name
        for base in reversed(config_class.__mro__)
        for name, each in vars(base).items()
        if inspect.isfunction(each)
    ]
    return order.index


def _first_line(config_class: type, group: str) -> str:
    return (inspect.getdoc(getattr(config_class, group)) or "").partition("\n")[
        0
    ]


def _code(value: object) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value)).replace("|", r"\|")
    return f"`{text}`"


def _cell(text: str) -> str:
    """Return docstring text as Markdown for a table."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def command_pages() -> dict[str, str]:
    made = {}
    for command, (_, summary) in COMMANDS.items():
        parts = [
            f"# rlzmq {command}\n",
            _sentence(summary),
            _help_of([command]),
        ]
        if command == "train":
            parts += [
                "Each algorithm takes these options, and its settings as flags "
                "([a page for each](../settings/ppo.md)). For PPO:\n",
                _help_of(["train", "ppo"]),
            ]
        made[f"reference/commands/{command}.md"] = "\n".join(parts)
    return made


def _sentence(summary: str) -> str:
    text, _, example = summary.partition(": rlzmq ")
    return (
        text[0].upper()
        + text[1:]
        + (f": `rlzmq {example}`" if example else "")
        + ".\n"
    )


def _help_of(command: list[str]) -> str:
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=HELP_COLUMNS, NO_COLOR="1"),
        contextlib.redirect_stdout(said),
    ):
        main([*command, "--help"])
    return f"```text\n$ rlzmq {' '.join(command)} --help\n{said.getvalue().rstrip()}\n```\n"


def repository_pages() -> dict[str, str]:
    """Return the pages of Markdown files outside ``docs``, their links rewritten."""
    sources = REPOSITORY_PAGES | {
        f"rlzmq/algorithms/{path.parent.name}/README.md": f"algorithms/{path.parent.name}.md"
        for path in sorted((ROOT / "rlzmq" / "algorithms").glob("*/README.md"))
    }
    return {
        page: rewritten(
            (ROOT / source).read_text(encoding="utf-8"), source, page
        )
        for source, page in sources.items()
    }


def rewritten(text: str, source: str, page: str) -> str:
    """Return Markdown with its links between files of the repository as links between pages of the site.

    Args:
        text: The Markdown.
        source: Its file in the repository, to which its links are relative.
        page: Its page in ``docs``.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(source), match[1])
        )
        if target in REPOSITORY_PAGES:
            target = REPOSITORY_PAGES[target]
        elif readme := re.fullmatch(
            r"rlzmq/algorithms/(\w+)/README\.md", target
        ):
            target = f"algorithms/{readme[1]}.md"
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return re.sub(r"\]\(([^):#]+)(#[^)]*)?\)", link, text)


def write_pages(app: Sphinx) -> None:
    """Write the pages that changed, so that Sphinx reads no others again; remove those that are no more."""
    made = pages()
    for name, text in made.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for folder in {(DOCS / name).parent for name in made}:
        for path in folder.iterdir():
            if path.relative_to(DOCS).as_posix() not in made:
                path.unlink()


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown: its cells, and what they printed and showed when it was executed last."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(
            source
            if cell["cell_type"] == "markdown"
            else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in shown:
                parts.append(
                    f"```{{raw}} html\n{''.join(shown['text/html'])}\n```"
                )
            else:
                parts.append(
                    f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"
                )
    return "\n\n".join(parts) + "\n"


def prepare(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite the links of written pages, and notebooks as Markdown."""
    if docname.startswith("notebooks/"):
        content[0] = notebook_page(content[0])
    content[0] = rewritten(content[0], f"docs/{docname}.md", f"{docname}.md")


class NameRole(SphinxRole):
    """The role of single backticks in docstrings: a link for a public name of rlzmq, code for everything else."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        code = nodes.literal(self.rawtext, self.text)
        if self.text.partition(".")[0] not in rlzmq.__all__:
            return [code], []
        target = f"rlzmq.{self.text}"
        link = addnodes.pending_xref(
            "",
            code,
            refdomain="py",
            reftype="obj",
            reftarget=target,
            refdoc=self.env.docname,
            refwarn=False,
        )
        return [link], []


def short_signature(
    app: Sphinx,
    what: str,
    name: str,
    member: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None] | None:
    """Leave out the arguments of a config's setters: they are its settings, which have tables."""
    if what == "method" and "=NotProvided" in (signature or "").replace(
        " ", ""
    ):
        return "(*, …)", returns
    return None


def link_public_types(app: Sphinx, doctree: nodes.document) -> None:
    """Link the types of signatures to public names; others, which are most, are nothing to look up."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if "refspecific" not in link:  # written by hand, or a NameRole
            continue
        module, _, name = link["reftarget"].rpartition(".")
        is_ours = module.startswith("rlzmq") or rlzmq._EXPORTS.get(
            name, ""
        ).endswith(module)
        if name in rlzmq.__all__ and is_ours:
            link["reftarget"] = f"rlzmq.{name}"
            del link["refspecific"]  # Sphinx would compare it with all names
        else:
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", prepare)
    app.connect("doctree-read", link_public_types)
    app.connect("autodoc-process-signature", short_signature)
    app.add_role("name", NameRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
