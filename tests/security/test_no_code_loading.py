"""Nothing that arrives or is read is unpickled, evaluated or executed: by the sources, and in a running system."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.runs import Command

PACKAGE = Path(__file__).parents[2] / "rlzmq"

# Of any module: names that load code or objects from bytes.
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "marshal.loads",
    "marshal.load",
    "shelve.open",
    "np.load",
    "numpy.load",
    "jsonpickle.decode",
}
FORBIDDEN_METHODS = {
    "recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
PICKLERS = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "yaml",
}  # fmt: skip
# The one module that pickles: from a parent to its own child, over a private pipe.
BY_VALUE = PACKAGE / "core" / "by_value.py"
# A file without these words is not parsed.
WORDS = PICKLERS | FORBIDDEN_METHODS | {f"{name.rpartition('.')[2]}(" for name in FORBIDDEN_CALLS}
SUSPICIOUS = re.compile("|".join(map(re.escape, WORDS)))


def offences(path: Path) -> list[str]:
    found: list[str] = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if SUSPICIOUS.search(text) else ():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"imports {name}" for name in names if name.partition(".")[0] in PICKLERS]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_METHODS:
                found.append(f"line {node.lineno} calls {called}")
    return found


def test_no_module_loads_code_or_objects_from_bytes() -> None:
    guilty = {
        str(path): found for path in PACKAGE.rglob("*.py") if path != BY_VALUE and (found := offences(path))
    }
    assert guilty == {}


def test_the_check_itself_finds_offences(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nimport torch\ntorch.load('x')\neval('1')\nsocket.recv_pyobj()\n")
    assert len(offences(bad)) == 4


# Who imports by a name that is not written in the code: each of these names is typed by the user or a constant, but
# for those of files, which all go through one function.
IMPORTERS = {
    "actors/fork_main.py",
    "algorithms/algorithm_config.py",
    "cli/main.py",
    "cli/parsing.py",
    "cli/train.py",
    "core/imports.py",
    "core/synonyms.py",
    "core/trust.py",
    "envs/registry.py",
    "envs/wrappers.py",
}


def test_names_in_files_are_followed_in_one_place() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
        and re.search(r"import_module\(|__import__\(|load_env_creator\(", path.read_text())
    }
    assert found == IMPORTERS | {"envs/vector.py"}  # a registered entry point, which gym.make would import


# Run before anything else in the run's programs, whose forks keep it, and as sitecustomize in what else they start.
# Whatever unpickles an object, in any package, asks for its class.
TRAP = """
import os, sys

def trap(event, arguments):
    if event == "pickle.find_class":
        frame, chain = sys._getframe(1), []
        while frame is not None:
            chain.append(frame.f_code.co_filename)
            frame = frame.f_back
        # The fork server's children get their class and arguments by value from their own parent.
        if not any(path.endswith(os.path.join("core", "by_value.py")) for path in chain):
            with open(os.environ["RLZMQ_TRAP"], "a") as log:
                log.write(f"{arguments} in pid {os.getpid()}: {chain[:6]}\\n")
            raise AssertionError(f"{arguments} was unpickled")

sys.addaudithook(trap)
with open(os.environ["RLZMQ_TRAP"] + ".armed", "a") as log:
    log.write(f"{os.getpid()}\\n")
"""

DRIVER = """
import time
from tests.support.runs import listening
from pathlib import Path

config = listening(Path.cwd(), num_env_runners=1, batch=120, num_remote_learners=2).learners(num_learners=2)
with config.build() as algo:
    while not Path("go").exists():
        time.sleep(0.05)
    for _ in range(3):
        result = algo.train()
    path = algo.save_to_path(str(Path.cwd() / "checkpoint"))
    algo.restore_from_path(path)
    algo.train()
    print("trained", result["accounting"]["trained"], flush=True)
"""


def test_a_distributed_run_over_tcp_never_unpickles(tmp_path: Path) -> None:
    """Driver, broker, a local runner, a runner and two learners from outside, a checkpoint and back."""
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "sitecustomize.py").write_text(TRAP)
    log = tmp_path / "trap.log"
    environment = {"PYTHONPATH": f"{tmp_path / 'trap'}:{PACKAGE.parent}", "RLZMQ_TRAP": str(log)}
    peer = ("-c", f"{TRAP}\nfrom rlzmq.cli.main import main\nsys.exit(main(sys.argv[1:]))")
    with Command(tmp_path, program=("-c", TRAP + DRIVER), **environment) as driver:
        driver.wait_for("waiting for learners")
        with (
            Command(tmp_path, "learner", "--join", "join.learner.toml", program=peer, **environment) as first,
            Command(
                tmp_path, "learner", "--join", "join.learner.toml", program=peer, **environment
            ) as second,
            Command(tmp_path, "runner", "--join", "join.toml", program=peer, **environment) as runner,
        ):
            runner.wait_for(" joined ")
            (tmp_path / "go").touch()
            assert driver.end(100) == 0, driver.output
            assert "trained 7" in driver.output  # 720 env steps, or a few more
            assert (runner.end(), first.end(), second.end()) == (0, 0, 0)
    assert not log.exists(), log.read_text()
    assert len((tmp_path / "trap.log.armed").read_text().splitlines()) >= 4
