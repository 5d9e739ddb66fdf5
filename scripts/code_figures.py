"""Figures of the code itself: lines per package, bare `Any` in annotations, imports inside functions, import circles.

    python scripts/code_figures.py [DIRECTORY OF THE PACKAGE]

An annotation counts as bare if it is exactly `Any`; `dict[str, Any]` does not. Circles count imports inside
functions and under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "rlzmq"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the files by module name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Import(NamedTuple):
    """An import statement: the module's name, and the names that are imported from it (none for ``import module``)."""

    line: int
    module: str
    names: tuple[str, ...]
    is_relative: bool
    in_function: bool


class Facts(NamedTuple):
    """What the figures are made from, of one file."""

    imports: list[Import]
    annotations: list[tuple[int, str, str]]
    """Line, name and annotation of each annotated parameter, result and variable."""


@functools.cache
def facts(path: Path) -> Facts:
    """Return the facts of a file, which is parsed once."""
    found = Facts([], [])
    ahead: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while ahead:
        node, in_function = ahead.pop()
        if isinstance(node, ast.Import):
            found.imports.extend(
                Import(node.lineno, alias.name, (), False, in_function) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.imports.append(Import(node.lineno, node.module or "", names, node.level > 0, in_function))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            found.annotations.append((node.lineno, node.arg, ast.unparse(node.annotation)))
        elif isinstance(node, ast.AnnAssign):
            found.annotations.append((node.lineno, ast.unparse(node.target), ast.unparse(node.annotation)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_function = True
            if node.returns is not None:
                found.annotations.append((node.lineno, f"{node.name}()", ast.unparse(node.returns)))
        ahead += [(child, in_function) for child in ast.iter_child_nodes(node)]
    return found


def share_of_any(package: Path = PACKAGE) -> float:
    """Return the share of annotations that are bare `Any`."""
    kinds = [kind for path in modules(package).values() for _, _, kind in facts(path).annotations]
    return kinds.count("Any") / len(kinds)


def imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the package's modules that each module imports, anywhere in its text."""
    known = modules(package)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names: list[str] = []
        for each in facts(path).imports:
            names += [f"{each.module}.{name}" for name in each.names] or [each.module]
        targets = set()
        for name in names:
            if name.partition(".")[0] == package.name:
                while name not in known:
                    name = name.rpartition(".")[0]
                targets.add(name)
        graph[module] = targets - {module}
    return graph


def circles(package: Path = PACKAGE) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or indirectly."""
    graph = imports(package)
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[module] = seen
    sets = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted(sorted(circle) for circle in sets if circle)


def imports_in_functions(package: Path = PACKAGE) -> int:
    """Return the number of import statements for the package's modules inside functions."""
    return sum(
        each.in_function and each.module.partition(".")[0] == package.name
        for path in modules(package).values()
        for each in facts(path).imports
    )


def main() -> None:
    package = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PACKAGE
    lines: Counter[str] = Counter()
    for path in modules(package).values():
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "."] += path.read_text(encoding="utf-8").count("\n")
    for name, num in sorted(lines.items()):
        print(f"{name:12} {num:7,} lines")
    print(f"{'all':12} {sum(lines.values()):7,} lines")
    print(f"bare Any: {share_of_any(package):.1%} of annotations")
    print(f"imports inside functions: {imports_in_functions(package)}")
    found = circles(package)
    print(
        f"import circles: {len(found)}, of {', '.join(str(len(circle)) for circle in found) or 'no'} modules"
    )
    for circle in found:
        print("  " + ", ".join(circle))


if __name__ == "__main__":
    main()
