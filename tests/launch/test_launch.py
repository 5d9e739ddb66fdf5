"""A cluster file run over real ssh on loopback: logs, keys by stdin, restarts, one stop for all."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.cli.joining import run_async
from rlzmq.core.errors import AuthenticationError, ConfigurationError
from rlzmq.launch.cluster import LOCAL, Cluster
from rlzmq.launch.hosts import connect
from rlzmq.launch.launcher import Launcher
from tests.driver.outside import two_free_ports

asyncssh = pytest.importorskip("asyncssh")
ROOT = Path(__file__).parents[2]
_HEAD = 'head = "a"\nlisten = "tcp://10.0.0.1:5"\ntrain = []\n'


@pytest.fixture
def ssh_port(tmp_path: Path) -> Iterator[int]:
    command = [sys.executable, str(ROOT / "tests" / "launch" / "sshd.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sshd:
        assert sshd.stdout is not None
        yield int(sshd.stdout.readline())
        sshd.kill()


def cluster_text(tmp_path: Path, ssh_port: int, *train: str) -> str:
    arguments = [
        "ppo", "--env", "CartPole-v1", "--env-runners", "0", "--envs-per-env-runner", "4",
        "--batch-size-per-learner", "200", "--minibatch-size", "50", "--num-epochs", "1",
        "--run-dir", str(tmp_path / "run"), *train,
    ]  # fmt: skip
    return f"""
head = "127.0.0.1"
listen = "tcp://127.0.0.1:{two_free_ports()}"
train = {arguments!r}
python = {sys.executable!r}
workdir = {str(tmp_path)!r}
user = "{os.environ.get("USER", "root")}"
port = {ssh_port}
key = {str(tmp_path / "client_key")!r}
known_hosts = {str(tmp_path / "known_hosts")!r}
environment = {{ PYTHONPATH = {str(ROOT)!r}, OMP_NUM_THREADS = "1" }}

[[runners]]
host = "127.0.0.1"
count = 2
"""


@pytest.mark.slow
async def test_head_and_runners_run_over_ssh_and_end_together(tmp_path: Path, ssh_port: int) -> None:
    lines: list[str] = []
    cluster = Cluster.parse(cluster_text(tmp_path, ssh_port, "--stop", "iterations=3"))
    async with asyncio.timeout(60):
        assert await Launcher(cluster, lines.append).run() == 0
    text = "\n".join(lines)
    assert "[head] iter 3" in text
    assert "[head] accounting: sampled" in text
    assert " goodbye: " in text
    assert "secret" not in text
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))


@pytest.mark.slow
async def test_a_killed_runner_is_started_again_and_one_stop_ends_all(tmp_path: Path, ssh_port: int) -> None:
    lines: list[str] = []
    launcher = Launcher(Cluster.parse(cluster_text(tmp_path, ssh_port)), lines.append)
    running = asyncio.create_task(launcher.run())
    async with asyncio.timeout(60):
        await _until(running, lambda: sum(" joined " in line for line in lines) == 2)
        await _until(running, lambda: any("[head] iter 1" in line for line in lines))
        await launcher._running["runner-127.0.0.1-0"].signal("KILL")
        await _until(running, lambda: sum("runner-127.0.0.1-0]" in x and " joined " in x for x in lines) == 2)
        await launcher.stop()
        assert await running == 130
    assert any("restart 1 of 3" in line for line in lines)


async def _until(running: asyncio.Task[int], is_true: object) -> None:
    while not is_true():  # type: ignore[operator]
        assert not running.done(), running
        await asyncio.sleep(0.05)


def local_cluster(tmp_path: Path, *train: str) -> Cluster:
    text = cluster_text(tmp_path, 22, *train).replace('"127.0.0.1"', f'"{LOCAL}"').replace("count = 2", "")
    return Cluster.parse(text + '\n[[learners]]\nhost = "local"\n')


def test_keys_reach_a_process_on_this_machine_by_its_stdin(tmp_path: Path) -> None:
    code = "from rlzmq.core.files import read_private_file as read; print(read('-') == read('/dev/stdin') + 'key')"

    async def run_there() -> list[str]:
        host = await connect(LOCAL, local_cluster(tmp_path))
        process = await host.start([sys.executable, "-c", code], stdin="key")
        lines = [line async for line in process.lines()]
        await process.wait()
        return lines

    assert run_async(run_there()) == ["True"]  # uvloop's stdin is a socket, which cannot be opened by a name


def test_the_environment_is_not_in_the_process_table_and_what_a_process_prints_is_safe_to_show(
    tmp_path: Path,
) -> None:
    secret = "it's \n a 'secret' $HOME"
    code = (
        "import os, psutil; print('secret' in str([p.info for p in psutil.process_iter(['cmdline'])])); "
        "print(repr(os.environ['SECRET']), input(), '\x1b]0;title')"
    )
    script = tmp_path / "prints.py"
    script.write_text(code)
    cluster = local_cluster(tmp_path)
    cluster = cluster.model_copy(update={"environment": {**cluster.environment, "SECRET": secret}})

    async def run_there() -> list[str]:
        host = await connect(LOCAL, cluster)
        process = await host.start([sys.executable, str(script)], stdin="key\n")
        lines = [line async for line in process.lines()]
        await process.wait()
        return lines

    assert run_async(run_there()) == ["False", f"{secret!r} key \\x1b]0;title"]


@pytest.mark.slow
def test_a_head_a_learner_and_a_runner_run_on_this_machine(tmp_path: Path) -> None:
    lines: list[str] = []
    code = run_async(Launcher(local_cluster(tmp_path, "--stop", "iterations=3"), lines.append).run())
    text = "\n".join(lines)
    assert code == 0, text
    assert "[runner-local-0] runner-" in text
    assert "is rank 0 of 1" in text
    assert "restart" not in text


async def test_an_unknown_host_key_is_refused(tmp_path: Path, ssh_port: int) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{ssh_port} {other}")
    with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"):
        await Launcher(Cluster.parse(cluster_text(tmp_path, ssh_port)), print).run()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('head = "a"\nlisten = "tcp://10.0.0.1:5"\ntrain = []\nrunner = 1', "Did you mean 'runners'"),
        ('head = "a"\ntrain = []', "listen is missing"),
        ('head = "a; rm -rf /"\nlisten = "tcp://10.0.0.1:5"\ntrain = []', "is not a host name"),
        ('head = "-oProxyCommand=x"\nlisten = "tcp://10.0.0.1:5"\ntrain = []', "is not a host name"),
        ('head = "a"\nlisten = "tcp://0.0.0.0:5"\ntrain = []', "every interface"),
        (f"{_HEAD}learners = 3", "learners: .* got 3"),
        (f'{_HEAD}[[runners]]\nhost = "b"\narguments = 3', "arguments: .* got 3"),
        (f"{_HEAD}[[runners]]\nhost = 3", "host: .* got 3"),
        (f"{_HEAD}environment = {{A = 1}}", "environment: A: .* got 1"),
    ],
)
def test_wrong_cluster_files_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Cluster.parse(text)


def test_a_cluster_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot read"):
        Cluster.read(tmp_path / "bin.toml")


_SUBMIT = ["train", "ppo", "--env", "CartPole-v1", "--run-dir", "runs/x", "--on", "slurm", "--dry-run"]


def submitted(directory: Path, cluster: str, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "cluster.toml").write_text(cluster)
    command = [sys.executable, "-m", "rlzmq", *_SUBMIT, "--cluster", "cluster.toml", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_jobs_for_slurm_are_a_shell_script(tmp_path: Path) -> None:
    tables = '[head]\nmemory = "4G"\n[learners]\ncount = 2\n[runners]\ncount = 3\n'
    tables += 'arguments = ["--envs-per-env-runner", "8"]\n'
    done = submitted(tmp_path, tables)
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    scripts = re.findall(r"END_OF_JOB'\n(.*?)END_OF_JOB\n", done.stdout, re.DOTALL)
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "--signal=B:USR1@60" in script
    head, learners, runners = scripts
    assert "--mem=4G" in head
    assert "--dry-run" not in head
    assert "--ntasks=2" in learners
    assert "--array=0-2" in runners
    assert "--envs-per-env-runner 8" in runners


@pytest.mark.parametrize(
    ("cluster", "more", "problem"),
    [
        ("[runner]\ncount = 3", (), "Did you mean 'runners'"),
        ("[runners]\ncount = 0", (), "got 0"),
        ("[head]\ncount = 2", (), "got 2"),
        ("[head]\ncpu = 2", (), "Did you mean 'cpus'"),
        ("", ("--overwrite",), "--overwrite"),
    ],
)
def test_wrong_jobs_are_refused(tmp_path: Path, cluster: str, more: tuple[str, ...], problem: str) -> None:
    done = submitted(tmp_path, cluster, *more)
    assert done.returncode == 78
    assert problem in done.stderr
