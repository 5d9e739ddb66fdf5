"""What the sources promise: imports point down, form no circles, are lazy for a reason; who reads the wall clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from scripts.code_figures import circles, facts, share_of_any

PACKAGE = Path(__file__).parent.parent / "rlzmq"
LAYERS = (
    "cli", "tune", "launch", "deploy", "telemetry", "algorithms", "driver", "roles", "actors", "net", "protocol",
    "wire", "learners", "runners", "modules", "connectors", "config", "envs", "replay", "episodes", "core",
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
# The state machines of the protocol are given the time, seeds and messages; they read none of these themselves.
NOT_IN_PROTOCOL = (
    "torch",
    "time",
    "datetime",
    "random",
    "secrets",
    "zmq",
    "asyncio",
    "uvloop",
    "socket",
    "threading",
)

# Why a file (or a folder) imports rlzmq modules inside functions. Entries only leave these lists.
LAZY_IMPORTS = {
    "a command prints its help without importing what it needs to run": ("cli/",),
    "the fork server imports only what its children share": ("actors/fork_main.py",),
}
# What `pip install rlzmq` does not bring.
OPTIONAL = """cv2 distributed imageio matplotlib minari onnx onnxruntime optuna pandas pettingzoo PIL prometheus_client
    pyarrow ray starlette tensorboard upath uvicorn"""


def imports_of(path: Path) -> list[tuple[int, str]]:
    for each in facts(path).imports:
        assert not each.is_relative, f"{path}:{each.line}: relative import"
    return [(each.line, each.module) for each in facts(path).imports]


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


def test_configs_have_types_and_any_is_rare() -> None:
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for _, path in modules()
        for line, name, kind in facts(path).annotations
        if name == "config" and kind == "Any"
    ]
    assert guilty == []
    assert share_of_any() < 0.155


def test_configs_are_made_copied_and_written_without_torch() -> None:
    code = (
        "import sys\n"
        "from rlzmq import APPOConfig, BCConfig, IMPALAConfig, MARWILConfig, PPOConfig\n"
        "for made in (APPOConfig(), BCConfig(), IMPALAConfig(), MARWILConfig(), PPOConfig.preset('CartPole-v1')):\n"
        "    again = type(made).from_toml(made.copy().training(lr=0.1).to_toml())\n"
        "    assert type(made).from_state(again.get_state()).lr == 0.1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_protocol_reads_no_clock_and_does_no_input_or_output() -> None:
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for layer, path in modules()
        for line, name in imports_of(path)
        if layer == "protocol" and name.split(".")[0] in NOT_IN_PROTOCOL
    ]
    assert guilty == []


def test_no_module_imports_the_public_names() -> None:
    """They import every layer: a module of the package names the module that it needs."""
    guilty = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for _, path in modules()
        for line, name in imports_of(path)
        if name == "rlzmq"
    ]
    assert guilty == []


def test_modules_form_no_circles() -> None:
    """Imports inside functions and under TYPE_CHECKING are counted."""
    assert circles() == [], "these modules import each other"


def test_imports_inside_functions_have_a_reason() -> None:
    allowed = {file for files in LAZY_IMPORTS.values() for file in files}
    found = set()
    for _, path in modules():
        name = str(path.relative_to(PACKAGE))
        if any(each.in_function and each.module.split(".")[0] == "rlzmq" for each in facts(path).imports):
            found.add("cli/" if name.startswith("cli/") else name)
    assert sorted(found - allowed) == [], "import at the top of the file, or give the reason in LAZY_IMPORTS"
    assert sorted(allowed - found) == [], "these import nothing in functions: take them out of LAZY_IMPORTS"


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


def test_import_rlzmq_is_quick_and_loads_no_torch() -> None:
    code = "import sys, rlzmq; assert 'torch' not in sys.modules and 'zmq' not in sys.modules; print(len(dir(rlzmq)))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_every_public_name_is_there_without_optional_packages() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split())); from rlzmq import *\n"
    code += "from rlzmq.core import names; assert all(k[0] == '_' or type(v) is str for k, v in vars(names).items())"
    subprocess.run([sys.executable, "-c", code, OPTIONAL], check=True, timeout=300)


# Labels for people; numbers that rise by themselves and only begin at the wall clock's; a file's age; where another
# host's stages stand in a trace.
ALLOWED = {
    "algorithms/checkpoints.py",
    "net/keys.py",
    "launch/k8s.py",
    "core/run_dir.py",
    "core/addresses.py",
    "core/trace.py",
    "roles/broker_role.py",
    "driver/broker_pipeline.py",
    "replay/shards.py",
    "telemetry/run_directory.py",
    "telemetry/runs.py",
    "cli/runs.py",
    "tune/tuner.py",
}
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "strftime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
}


def reads_the_wall_clock(source: str) -> bool:
    # most files name none of these functions, and need not be parsed
    return any(f".{name}" in source for _, name in WALL) and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL
        for node in ast.walk(ast.parse(source))
    )


def test_the_wall_clock_is_read_where_it_is_known_to_do_no_harm() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if reads_the_wall_clock(path.read_text())
    }
    assert readers == ALLOWED
