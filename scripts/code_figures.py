"""Figures of the code itself, and their ceilings in BUDGET.toml.

    python scripts/code_figures.py            # each figure beside its ceiling
    python scripts/code_figures.py --lower    # write the figures that are below their ceilings as the new ceilings

Lines are those without docstrings. An annotation counts as bare if it is exactly `Any`; `dict[str, Any]` does not.
Circles count imports inside functions and under ``if TYPE_CHECKING``. The spine is what one `Algorithm.train` of a
serial PPO run with 8 envs calls: files, functions, all lines of these files. Words of docs have a letter or a digit.
A user meets the flags of ``rlzmq train ppo --help`` and the distributions that ``pip install .`` brings.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.metadata
import io
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlzmq"
BUDGET = ROOT / "BUDGET.toml"


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
    lines: int
    """Those that are not a docstring's."""


@functools.cache
def facts(path: Path) -> Facts:
    """Return the facts of a file, which is parsed once."""
    text = path.read_text(encoding="utf-8")
    found = Facts([], [], 0)
    lines = text.count("\n")
    ahead: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while ahead:
        node, in_function = ahead.pop()
        if isinstance(node, ast.Import):
            found.imports.extend(
                Import(node.lineno, alias.name, (), False, in_function) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.imports.append(Import(node.lineno, node.module or "", names, node.level > 0, in_function))
        elif isinstance(node, ast.AnnAssign):
            found.annotations.append((node.lineno, ast.unparse(node.target), ast.unparse(node.annotation)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_function = True
            for each in ast.walk(node.args):
                if isinstance(each, ast.arg) and each.annotation is not None:
                    found.annotations.append((each.lineno, each.arg, ast.unparse(each.annotation)))
            if node.returns is not None:
                found.annotations.append((node.lineno, f"{node.name}()", ast.unparse(node.returns)))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines -= _docstring_lines(node)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # only statements matter
            ahead += [(child, in_function) for child in getattr(node, block, ())]
    return found._replace(lines=lines)


def _docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of the docstring, 0 without one."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or node.body[0].lineno) - node.body[0].lineno + 1


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


def lines_by_package(package: Path = PACKAGE) -> dict[str, int]:
    """Return the lines of each package below `package`; ``top`` are the files beside them."""
    lines: Counter[str] = Counter()
    for path in modules(package).values():
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "top"] += facts(path).lines
    return dict(sorted(lines.items()))


def spine() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the files and the functions of the package that one iteration of a serial PPO run calls."""
    import torch

    from rlzmq import PPOConfig

    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    config = PPOConfig().environment("CartPole-v1").debugging(seed=7)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the code that changes it would run on machines with several cores only
    try:
        with config.build() as algo:
            algo.train()
            sys.setprofile(note)
            algo.train()
            sys.setprofile(None)
    finally:
        torch.set_num_threads(num_threads)
    ours = {(file, name) for file, name in called if file.startswith(f"{PACKAGE}/")}
    return {file for file, _ in ours}, ours


def num_settings() -> int:
    """Return the number of public settings of all algorithms together."""
    from rlzmq.algorithms.registry import ALGORITHMS, get_config_class

    return len(
        {
            name
            for algorithm in ALGORITHMS
            for name, field in get_config_class(algorithm)._fields.items()
            if field.group and not name.startswith("_")
        }
    )


def flags_of_help() -> int:
    """Return the number of flags that ``rlzmq train ppo --help`` explains."""
    from rlzmq.cli.main import main as rlzmq

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        rlzmq(["train", "ppo", "--help"])
    return len(re.findall(r"^\W*--[a-z]", said.getvalue(), flags=re.MULTILINE))


def core_distributions() -> set[str]:
    """Return the distributions that ``pip install .`` brings on this Python, without those of torch's CUDA builds."""
    waiting = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_of_cuda = name == "triton" or name.startswith(("nvidia-", "cuda-"))
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not is_of_cuda and name not in found:
            found.add(name)
            waiting += importlib.metadata.requires(name) or []
    return found


def words_of_docs() -> int:
    """Return the words of the pages in ``docs`` that people write; a word has a letter or a digit."""
    docs = ROOT / "docs"
    built = re.compile(r"(algorithms|project|reference/\w+)/")  # by docs/generated_pages.py
    pages = [page for page in docs.rglob("*.md") if not built.match(page.relative_to(docs).as_posix())]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())


def figures() -> dict[str, dict[str, float]]:
    """Return each figure, by table and name of BUDGET.toml."""
    by_package = lines_by_package()
    files, functions = spine()
    return {
        "lines": {**by_package, "all": sum(by_package.values())},
        "package": {
            "files": len(modules()),
            "settings": num_settings(),
            "files_that_name_multi_agent": sum(
                "multi_agent" in path.read_text(encoding="utf-8") for path in modules().values()
            ),
            "bare_any_per_mille": round(1000 * share_of_any()),
            "imports_in_functions": imports_in_functions(),
            "import_circles": len(circles()),
        },
        "docs": {"words": words_of_docs()},
        "user": {"flags_of_train_help": flags_of_help(), "core_distributions": len(core_distributions())},
        "tests": {"lines": sum(facts(path).lines for path in (ROOT / "tests").rglob("*.py"))},
        "spine": {
            "files": len(files),
            "functions": len(functions),
            "lines": sum(Path(file).read_text(encoding="utf-8").count("\n") for file in files),
        },
    }


def ceilings() -> dict[str, dict[str, float]]:
    """Return the ceilings."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures below them")
    lower = parser.parse_args().lower
    text = BUDGET.read_text(encoding="utf-8")
    limits = ceilings()
    for table, named in figures().items():
        for name, figure in named.items():
            ceiling = limits.get(table, {}).get(name)
            print(f"{table}.{name:30} {figure:8,} of {ceiling}")
            if lower and ceiling is not None and figure < ceiling:
                head, mark, tail = text.partition(f"[{table}]\n")
                text = head + mark + re.sub(rf"(?m)^{name} = .*$", f"{name} = {figure}", tail, count=1)
    if lower:
        BUDGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
