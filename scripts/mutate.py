"""Puts small mistakes into rlzmq/protocol and rlzmq/wire, one at a time, and checks that a test notices each.

    python scripts/mutate.py                            # all: half an hour on two idle cores
    python scripts/mutate.py --sample 300 --seed 1      # as many, drawn by seed
    python scripts/mutate.py --only protocol/broker/intake protocol/ledger
    python scripts/mutate.py --only protocol/ledger --tests protocol/test_ledger.py   # by its own tests alone: seconds
    python scripts/mutate.py --again OUTPUT             # those that survive by the output of an earlier run

The tests are collected once. A first run records which lines each test reaches and how long it takes; then every
mutant is tried in a fork of this process: one function gets the changed code, and the tests that reach the changed
statement run until one fails: first those that noticed earlier mutants of the same function, then the shortest.
`--tests` limits them to some files, without the simulated runs; `--again` tries the survivors of such a run with all
tests. A mutant is killed if a test fails, or if the tests take much more processor time or memory than without it.
Others survive. A survivor that is not a gap in the tests is listed with the reason in `scripts/mutants_left.toml`; it
is not tried, and counts as left.

Changed are comparisons, arithmetic, `and`/`or`, conditions, numbers, `True`/`False`, `min`/`max`, returned values,
`continue`/`break`; calls, assignments to attributes and items, and `raise` statements are left out. Not changed:
texts, `__repr__`, annotations, module-level statements, declarations of fields.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import math
import mmap
import os
import random
import re
import resource
import select
import signal
import sys
import time
import tomllib
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "rlzmq"
FOLDERS = ("protocol", "wire")
LEFT = Path(__file__).with_name("mutants_left.toml")

# Single schedules replace the tests that run a thousand of them, which take seconds each.
SKIPPED_TESTS = (
    "test_every_promise_holds",
    "test_each_kind_of_fault",
    "test_mutated_messages",
    "TestLedgerMachine",
)
NUM_SCHEDULES, SCHEDULES_PER_TEST = 250, 25
MEMORY_BYTES = 2 << 30
CANNOT_TRY = 3  # exit code

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
        path: The file, below `PACKAGE`, without ``.py``.
        function: Qualified name of the function that changes.
        line, text: Its line number, and the text of the line.
        lines: Lines of its statement; without the body of a compound one.
        what: The change.
        number: Number of the change within its file.
    """

    path: str
    function: str
    line: int
    lines: range
    text: str
    what: str
    number: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key of the mutant, which does not depend on line numbers."""
        return self.path, self.function, self.text, self.what

    def __str__(self) -> str:
        return f"{self.path}.py:{self.line} {self.function}: {self.what}\n      {self.text}"


# ---------------------------------------------------------------------- the mutants


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of a file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return [
        Mutant(name, function, line, of_statement, lines[line - 1].strip(), what, number)
        for number, (function, of_statement, line, what, _) in enumerate(_changes(ast.parse(source)))
    ]


@dataclass(frozen=True)
class Source:
    """A file, parsed once for all forks, each of which changes its copy.

    Attributes:
        codes: The unchanged code of its functions.
        changes: Changes of the tree, by number.
    """

    path: Path
    tree: ast.Module
    codes: dict[str, types.CodeType]
    changes: list[Callable[[], None]]


@functools.cache
def source_of(path: str) -> Source:
    """Return the parsed file of this name."""
    file = PACKAGE / f"{path}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    codes = _codes(compile(tree, str(file), "exec"))
    return Source(file, tree, codes, [change for *_, change in _changes(tree)])


def code_of(mutant: Mutant) -> types.CodeType | None:
    """Return the changed function's code; None if it is unchanged. Call it in a fork: the tree stays changed."""
    source = source_of(mutant.path)
    source.changes[mutant.number]()
    name = mutant.function.partition(".")[0]
    body = [
        node
        for node in source.tree.body
        if getattr(node, "name", name) == name and not isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign)
    ]
    tree = ast.fix_missing_locations(ast.Module(body, []))
    code = _codes(compile(tree, str(source.path), "exec"))[mutant.function]
    return None if _same(source.codes[mutant.function], code) else code


Change = tuple[int, str, Callable[[], None]]


def _changes(tree: ast.Module) -> Iterator[tuple[str, range, int, str, Callable[[], None]]]:
    """(function, lines of the statement, line, what, a call that makes the change) of every place, always in
    the same order."""
    for function, qualname in _functions(tree, ""):
        if function.name not in ("__repr__", "__str__"):
            for statement in list(function.body):
                for lines, change in _in(statement, function.body, range(0)):
                    yield (qualname, lines, *change)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child, prefix + child.name
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _in(node: ast.AST, block: list[ast.stmt] | None, lines: range) -> Iterator[tuple[range, Change]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assert | ast.JoinedStr):
        return  # a nested function is visited separately; an assertion is a test
    if isinstance(node, ast.stmt):
        lines = _lines_of(node)
    for change in _of_expression(node):
        yield lines, change
    if isinstance(node, ast.stmt) and block is not None:
        for change in _of_statement(node, block):
            yield lines, change
    if isinstance(node, ast.Raise):
        return  # its text
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        if isinstance(value, list):
            inner = value if value and isinstance(value[0], ast.stmt) else None
            for item in list(value):
                if isinstance(item, ast.AST):
                    yield from _in(item, inner, lines)
        elif isinstance(value, ast.AST):
            yield from _in(value, None, lines)


def _lines_of(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _of_expression(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = COMPARISONS[type(operator)]
            yield node.lineno, f"{_name(operator)} → {other.__name__}", _setter(node.ops, index, other())
    elif isinstance(node, ast.BoolOp):
        other_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield node.lineno, f"{_name(node.op)} → {other_bool.__name__}", _attr(node, "op", other_bool())
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        if not (isinstance(node, ast.BinOp) and _is_text(node)):
            changed = ARITHMETIC[type(node.op)]
            yield node.lineno, f"{_name(node.op)} → {changed.__name__}", _attr(node, "op", changed())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno, "not x → x", _unnot(node)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node.lineno, f"{node.value} → {not node.value}", _attr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node.lineno, f"{node.value} → {node.value + 1}", _attr(node, "value", node.value + 1)
    elif isinstance(node, ast.Name) and node.id in ("min", "max") and isinstance(node.ctx, ast.Load):
        other_name = "max" if node.id == "min" else "min"
        yield node.lineno, f"{node.id} → {other_name}", _attr(node, "id", other_name)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(
        node.test, ast.Compare | ast.UnaryOp
    ):
        yield node.lineno, "condition → not condition", _negate(node)


def _of_statement(node: ast.stmt, block: list[ast.stmt]) -> Iterator[Change]:
    index = block.index(node)
    if isinstance(node, ast.Return) and not _is_nothing(node.value):
        # The value stays in the tree but is never computed: `super()` in it makes the function a closure, as before.
        nothing = ast.IfExp(ast.Constant(True), ast.Constant(None), node.value)
        yield node.lineno, "return None", _attr(node, "value", nothing)
    elif isinstance(node, ast.Continue):
        yield node.lineno, "continue → break", _setter(block, index, ast.Break())
    elif isinstance(node, ast.Break):
        yield node.lineno, "break → continue", _setter(block, index, ast.Continue())
    elif isinstance(node, ast.Raise):
        yield node.lineno, "raise left out", _setter(block, index, ast.Pass())
    elif isinstance(node, ast.Delete) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node.lineno, "left out", _setter(block, index, _never(node))
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in targets):
            yield node.lineno, "left out", _setter(block, index, _never(node))


def _setter(items: list[Any], index: int, value: Any) -> Callable[[], None]:
    return lambda: items.__setitem__(index, value)


def _attr(node: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _negate(node: Any) -> Callable[[], None]:
    return lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))


def _unnot(node: ast.UnaryOp) -> Callable[[], None]:
    """Return the change of ``not x`` to ``not not x``, which is a bool, too."""
    return lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))


def _never(node: ast.stmt) -> ast.If:
    """Return the statement in a branch that never runs; ``super()`` in it still makes the function a closure."""
    return ast.If(ast.Constant(False), [node], [])


def _name(operator: Any) -> str:
    return type(operator).__name__


def _is_nothing(node: ast.expr | None) -> bool:
    """Return whether ``return None`` would be the same: for None, and for False, which callers treat alike."""
    return node is None or (isinstance(node, ast.Constant) and (node.value is None or node.value is False))


def _is_text(node: ast.BinOp) -> bool:
    """Return whether a sum or a ``%`` is of texts or bytes, as far as the source shows."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )


def _codes(module: types.CodeType) -> dict[str, types.CodeType]:
    found: dict[str, types.CodeType] = {}

    def visit(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found[constant.co_qualname] = constant
                visit(constant)

    visit(module)
    return found


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Return whether two code objects are equal except for line numbers."""
    if a.co_code != b.co_code or a.co_names != b.co_names or len(a.co_consts) != len(b.co_consts):
        return False
    for one, other in zip(a.co_consts, b.co_consts, strict=True):
        if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
            if not _same(one, other):
                return False
        elif (type(one), one) != (type(other), other):
            return False
    return True


# ---------------------------------------------------------------------- the tests


class Runner:
    """A pytest plugin that runs the collected tests for every mutant."""

    def __init__(
        self, mutants: list[Mutant], num_processes: int, minutes: float, has_schedules: bool = True
    ) -> None:
        self.mutants = mutants
        self.num_processes = num_processes
        self.minutes = minutes
        self.has_schedules = has_schedules
        self.num_tried = 0
        self.survivors: list[Mutant] = []
        self.untested: list[Mutant] = []
        self.unmade: list[Mutant] = []
        self._seconds: dict[int, float] = {}
        self._tests_of: dict[tuple[str, str | int], set[int]] = defaultdict(set)
        self._items: list[Any] = []
        self._functions = {(mutant.path, _outermost(mutant.function)) for mutant in mutants}
        self._is_wanted: dict[types.CodeType, bool] = {}
        # Results of the forks: for each mutant the test that failed, counted from 1.
        self._failed = memoryview(mmap.mmap(-1, 4 * len(mutants))).cast("i")
        self._good_tests: dict[tuple[str, str], set[int]] = defaultdict(set)

    def pytest_collection(self) -> None:
        """Do not shrink failing examples."""
        from hypothesis import Phase, settings

        settings.register_profile("mutate", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutate")

    def pytest_runtestloop(self, session: Any) -> bool:
        self._items = [
            item for item in session.items if not any(name in item.nodeid for name in SKIPPED_TESTS)
        ]
        seeds = range(0, NUM_SCHEDULES if self.has_schedules else 0, SCHEDULES_PER_TEST)
        schedules = [Schedules(seed) for seed in seeds]
        self._items.extend(schedules[:1])
        for index in range(len(self._items)):
            self._note(index)
        for path in {mutant.path for mutant in self.mutants}:
            source_of(path)
        for item in schedules[1:]:  # they reach almost the same lines as the first one
            self._items.append(item)
            self._seconds[len(self._items) - 1] = self._seconds[len(self._items) - 2]
            for found in self._tests_of.values():
                if len(self._items) - 2 in found:
                    found.add(len(self._items) - 1)
        print(
            f"{len(self._items)} tests, {sum(self._seconds.values()):.1f} s; {len(self.mutants)} mutants",
            flush=True,
        )
        gc.freeze()  # no fork scans the objects of this process
        self._try_all()
        return True

    def _note(self, index: int) -> None:
        """Run one test without a mutant; record which functions and lines it reaches, and its time."""
        reached: set[tuple[str, str | int]] = set()

        def note(frame: types.FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            if (is_wanted := self._is_wanted.get(code)) is None:
                path = code.co_filename.removeprefix(f"{PACKAGE}/").removesuffix(".py")
                is_wanted = self._is_wanted[code] = (path, _outermost(code.co_qualname)) in self._functions
            if not is_wanted:
                return None
            reached.add((code.co_filename, frame.f_lineno if event == "line" else code.co_qualname))
            return note

        sys.settrace(note)
        try:
            passed = _passes(self._items[index])
        finally:
            sys.settrace(None)
        if not passed:
            raise SystemExit(f"{self._items[index].nodeid} fails without any mutant")
        start = time.process_time()
        _passes(self._items[index])
        self._seconds[index] = time.process_time() - start
        for filename, place in reached:
            path = Path(filename).relative_to(PACKAGE).with_suffix("").as_posix()
            self._tests_of[path, place].add(index)

    def _tests_for(self, mutant: Mutant) -> list[int]:
        """Return the tests that reach its statement; if no line of it is recorded, those that enter its function."""
        found = set().union(*(self._tests_of[mutant.path, line] for line in mutant.lines))
        found = found or self._tests_of[mutant.path, _outermost(mutant.function)]
        good = self._good_tests[mutant.path, mutant.function]
        return sorted(found, key=lambda index: (index not in good, self._seconds[index]))

    def _try_all(self) -> None:
        """Try the mutants, some at a time, each in a fork."""
        waiting, running = list(enumerate(self.mutants)), dict[int, tuple[int, int, float]]()
        start = time.perf_counter()
        while waiting or running:
            if time.perf_counter() - start > 60 * self.minutes:
                waiting.clear()
            while waiting and len(running) < self.num_processes:
                number, mutant = waiting.pop(0)
                tests = self._tests_for(mutant)
                if not tests:
                    self.untested.append(mutant)
                    self.num_tried += 1
                    continue
                limit_s = 2.0 + 5.0 * sum(self._seconds[index] for index in tests)
                pid = os.fork()
                if pid == 0:
                    self._end_with(number, tests, limit_s)
                # Sleeping takes no processor time, so there is a wall-clock limit too, far above the effects of load.
                running[pid] = number, os.pidfd_open(pid), time.perf_counter() + 20 * limit_s
            if not running:
                break
            for pid, code in _wait(running):
                number, fd, _ = running.pop(pid)
                os.close(fd)
                mutant = self.mutants[number]
                if code == CANNOT_TRY:
                    self.unmade.append(mutant)
                    print(f"cannot be made: {mutant}", flush=True)
                    continue
                self.num_tried += 1
                if self._failed[number]:
                    self._good_tests[mutant.path, mutant.function].add(self._failed[number] - 1)
                if code == 0:
                    self.survivors.append(mutant)
                    print(f"survives: {mutant}", flush=True)
                if self.num_tried % 100 == 0:
                    print(f"{self.num_tried} tried, {time.perf_counter() - start:.0f} s", flush=True)

    def _end_with(self, number: int, tests: Sequence[int], limit_s: float) -> None:
        """Run in the fork and exit; never return."""
        code = CANNOT_TRY
        try:
            code = self._try(number, tests, limit_s)
        finally:
            os._exit(code)

    def _try(self, number: int, tests: Sequence[int], limit_s: float) -> int:
        """Run in the fork; return 1 if a test fails."""
        seconds = math.ceil(limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # at the limit the kernel sends SIGKILL
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + _address_space(), resource.RLIM_INFINITY))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        mutant = self.mutants[number]
        code = code_of(mutant)
        if code is None:
            return 1  # nothing to notice
        put_in(mutant, code)
        for index in tests:
            try:
                passed = _passes(self._items[index])
            except BaseException:  # pytest itself cannot continue, e.g. out of memory
                passed = False
            if not passed:
                self._failed[number] = index + 1
                return 1
        return 0


def _wait(running: dict[int, tuple[int, int, float]]) -> Iterator[tuple[int, int | None]]:
    """Yield the forks that ended, with their exit codes; one that takes too long is killed (None), as is its mutant."""
    now = time.perf_counter()
    timeout = max(0.0, min(due for _, _, due in running.values()) - now)
    ready, _, _ = select.select([fd for _, fd, _ in running.values()], [], [], timeout)
    for pid, (_, fd, due) in list(running.items()):
        if fd not in ready and time.perf_counter() < due:
            continue
        if fd not in ready:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        yield pid, os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


class Schedules:
    """Some simulated runs, which replace the tests that make thousands."""

    def __init__(self, first: int) -> None:
        self.seeds = range(first, first + SCHEDULES_PER_TEST)
        self.nodeid = f"simulated runs {self.seeds}"

    def pass_(self) -> bool:
        from simulation import run_schedule

        try:
            for seed in self.seeds:
                run_schedule(seed)
        except Exception:
            return False
        return True


def _passes(item: Any) -> bool:
    from _pytest.runner import runtestprotocol

    if isinstance(item, Schedules):
        return item.pass_()
    item._initrequest()
    return all(report.passed for report in runtestprotocol(item, log=False, nextitem=None))


def _outermost(function: str) -> str:
    """Return the outermost function, by which nested functions are looked up."""
    return function.partition(".<locals>")[0]


def put_in(mutant: Mutant, code: types.CodeType) -> None:
    """Replace the code of the live function by the mutant's."""
    module = sys.modules["rlzmq." + mutant.path.replace("/", ".").removesuffix(".__init__")]
    if "<locals>" in mutant.function:  # its outer function creates it from a code object in its constants
        outer = _living(module, _outermost(mutant.function))
        outer.__code__ = _with_inner(outer.__code__, code)
    else:
        _living(module, mutant.function).__code__ = code


def _with_inner(code: types.CodeType, inner: types.CodeType) -> types.CodeType:
    constants = tuple(
        (inner if constant.co_qualname == inner.co_qualname else _with_inner(constant, inner))
        if isinstance(constant, types.CodeType)
        else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=constants)


def _living(module: types.ModuleType, qualname: str) -> types.FunctionType:
    owner: Any = module
    *outer, name = qualname.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found: Any = owner.__dict__[name]
    for attribute in ("fget", "__func__", "func", "__wrapped__"):
        found = getattr(found, attribute, None) or found
    assert isinstance(found, types.FunctionType), qualname
    return found


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# ---------------------------------------------------------------------- the account


def reasons() -> dict[tuple[str, str, str, str], str]:
    """Return the reasons why survivors are no gaps, by (path, function, text, what)."""
    if not LEFT.is_file():
        return {}
    entries = tomllib.loads(LEFT.read_text(encoding="utf-8"))["mutant"]
    return {(e["path"], e["function"], e["text"], e["what"]): e["why"] for e in entries}


def keys_in(output: str) -> set[tuple[str, ...]]:
    """Return the keys of the survivors in a run's output, whose lines may have moved since."""
    found = re.findall(r"^survives: (\S+)\.py:\d+ (\S+): (.*)\n {6}(.*)$", output, re.MULTILINE)
    return {(path, function, text, what) for path, function, what, text in found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="files below rlzmq, without .py")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn by seed (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="only those that survive by this output of an earlier run")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="files below tests (default: all, and simulated runs)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    import pytest

    paths = [
        path
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if not options.only or path.relative_to(PACKAGE).with_suffix("").as_posix() in options.only
    ]
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    explained = reasons()
    keys, files = {mutant.key for mutant in mutants}, {mutant.path for mutant in mutants}
    if stale := [key for key in explained if key[0] in files and key not in keys]:
        raise SystemExit(f"{LEFT.name} has reasons for what is not there any more: {stale}")
    if options.again:
        survived = keys_in(options.again.read_text(encoding="utf-8"))
        mutants = [mutant for mutant in mutants if mutant.key in survived]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    listed = [mutant for mutant in mutants if mutant.key in explained]
    others = [mutant for mutant in mutants if mutant.key not in explained]
    runner = Runner(others, options.processes, options.minutes, has_schedules=not options.tests)
    pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--tb=no",
            "--assert=plain",
            *(str(ROOT / "tests" / name) for name in options.tests or FOLDERS),
        ],
        plugins=[runner],
    )
    gaps = [*runner.survivors, *runner.untested]
    num_killed, num_left = runner.num_tried - len(gaps), len(listed) + len(gaps)
    print(
        f"\n{num_killed + num_left} mutants, {num_killed} killed ({num_killed / max(1, num_killed + num_left):.1%})"
    )
    if num_waiting := len(others) - runner.num_tried - len(runner.unmade):
        print(f"{num_waiting} not tried in {options.minutes:g} minutes")
    if runner.unmade:
        print(f"{len(runner.unmade)} cannot be made, see above")
    for why, num in Counter(explained[mutant.key] for mutant in listed).most_common():
        print(f"  {num:4} left: {why}")
    print(f"{len(gaps)} left without a reason, {len(runner.untested)} of them reached by no test")
    for mutant in gaps:
        print(f"  {mutant}")
    return int(len(gaps) > 0.05 * runner.num_tried)


if __name__ == "__main__":
    raise SystemExit(main())
