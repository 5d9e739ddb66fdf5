"""Imports point down: each package imports only itself and those below it; only net imports zmq."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.code_figures import annotations, circles, share_of_any

PACKAGE = Path(__file__).parent.parent / "rlzmq"
LAYERS = (
    "cli", "launch", "telemetry", "algorithms", "driver", "roles", "actors", "net", "protocol", "wire", "learners",
    "runners", "modules", "connectors", "config", "envs", "replay", "episodes", "core",
)  # fmt: skip
PURE = (
    "protocol",
    "wire",
    "learners",
    "runners",
    "modules",
    "connectors",
    "config",
    "envs",
    "replay",
    "episodes",
    "core",
)
ALLOWED_ZMQ = ("net",)


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
    return found


def modules() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(PACKAGE).parts[0], path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if len(path.relative_to(PACKAGE).parts) > 1
    ]


def test_every_folder_is_a_known_layer() -> None:
    assert {layer for layer, _ in modules()} <= set(LAYERS)


def test_no_import_points_upward() -> None:
    upward = []
    for layer, path in modules():
        for line, name in imports_of(path):
            parts = name.split(".")
            if (
                parts[0] == "rlzmq"
                and len(parts) > 1
                and parts[1] in LAYERS
                and LAYERS.index(parts[1]) < LAYERS.index(layer)
            ):
                upward.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert upward == []


def test_circles_stay_within_few_packages() -> None:
    """Imports inside functions and under TYPE_CHECKING are counted."""
    packages = {module.split(".")[1] for circle in circles() for module in circle if "." in module}
    assert packages <= {"connectors", "envs", "episodes", "modules", "roles", "runners"}
    assert all(len({module.split(".")[1] for module in circle}) == 1 for circle in circles())


def test_configs_have_types_and_any_is_rare() -> None:
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for _, path in modules()
        for line, name, kind in annotations(path)
        if name == "config" and kind == "Any"
    ]
    assert guilty == []
    assert share_of_any() < 0.155


def test_configs_are_made_copied_and_written_without_torch() -> None:
    code = (
        "import sys\n"
        "from rlzmq import APPOConfig, IMPALAConfig, PPOConfig\n"
        "for made in (APPOConfig(), IMPALAConfig(), PPOConfig.preset('CartPole-v1')):\n"
        "    again = type(made).from_toml(made.copy().training(lr=0.1).to_toml())\n"
        "    assert type(made).from_state(again.get_state()).lr == 0.1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_only_net_imports_zmq() -> None:
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for layer, path in modules()
        for line, name in imports_of(path)
        if name.split(".")[0] == "zmq" and layer not in ALLOWED_ZMQ
    ]
    assert guilty == []


def test_pure_layers_import_no_sockets_and_no_event_loop() -> None:
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for layer, path in modules()
        for line, name in imports_of(path)
        if layer in PURE and name.split(".")[0] in ("asyncio", "uvloop", "socket")
    ]
    assert guilty == []


@pytest.mark.parametrize("forbidden", ["pickle", "cloudpickle", "marshal", "shelve", "dill"])
def test_only_one_module_pickles(forbidden: str) -> None:
    guilty = [
        str(path.relative_to(PACKAGE))
        for _, path in modules()
        for _, name in imports_of(path)
        if name.split(".")[0] == forbidden
    ]
    assert set(guilty) <= {"actors/by_value.py"}


def test_import_rlzmq_is_quick_and_loads_no_torch() -> None:
    code = "import sys, rlzmq; assert 'torch' not in sys.modules and 'zmq' not in sys.modules; print(len(dir(rlzmq)))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_every_public_name_is_there() -> None:
    import rlzmq

    for name in rlzmq.__all__:
        assert getattr(rlzmq, name) is not None
    with pytest.raises(AttributeError, match="Did you mean 'PPOConfig'"):
        rlzmq.PPOConfg  # noqa: B018


def test_type_checkers_know_every_public_name_too() -> None:
    import rlzmq

    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: str(node.module).removeprefix("rlzmq.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    missing = [f"from rlzmq.{m} import {n} as {n}" for n, m in rlzmq._EXPORTS.items() if imported.get(n) != m]
    assert missing == [], "add these under TYPE_CHECKING in rlzmq/__init__.py"
    assert imported.keys() == rlzmq._EXPORTS.keys()
