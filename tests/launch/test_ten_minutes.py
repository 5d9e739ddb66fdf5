"""Ten minutes on a real Slurm: a runner, a node, the head (time limit) and the head again (preemption) are lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.launch.test_slurm import Run, place, pytestmark
from tests.support.slurm import Slurm, until

__all__ = ["pytestmark"]

_ENV = """\
import time
from gymnasium.envs.classic_control import CartPoleEnv
class SlowCartPole(CartPoleEnv):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    cluster = Slurm(cpus=6)
    yield cluster
    cluster.close()


def test_sixteen_runners_lose_a_runner_a_node_and_the_head_twice(slurm: Slurm) -> None:
    (slurm.home / "slow_cart_pole.py").write_text(_ENV)
    started = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - started:5.0f} s  {text}", flush=True)  # noqa: E731
    runners = place("2G", count=4, more='cpus = 4\narguments = ["--env-runners", "4"]')
    head = place("1G", "n1", more='time = "60"')
    cluster = f"[head]\n{head}[runners]\n{runners}"
    run = Run(slurm, "ten", cluster, env="slow_cart_pole:SlowCartPole")
    for number in range(4):
        run.wait_for(r"(joined (.|\n)*){4}", f"runners-{number}")
    say("16 runners have joined")
    head_end = len(run.log())
    run.limit_time()
    nodes = {slurm.fact(f"{run.jobs['runners']}_{number}", "NodeList"): number for number in range(4)}
    lost = next(node for node in nodes if node != "n1")

    other = next(node for node in nodes if node not in ("n1", lost))
    end = len(run.log(f"runners-{nodes[other]}"))
    runner = max(slurm.processes(other, "rlzmq"), key=lambda process: process.create_time())
    runner.kill()
    run.wait_for(" joined ", f"runners-{nodes[other]}", after=end)
    say(f"a runner of {other} was killed, and another one has joined")

    end = len(run.log(f"runners-{nodes[lost]}"))
    slurm.lose(lost)
    say(f"{lost} is lost")
    run.wait_for("iter ", after=len(run.log()))
    slurm.boot(lost)

    run.reaches_time_limit()
    say("the head's time limit: it is requeued")
    run.wait_for(r"(joined (.|\n)*){4}", f"runners-{nodes[lost]}", after=end)
    say(f"four runners of {lost}'s place have joined")
    head_end = run.wait_for(r"resumed .*(.|\n)*iter \d+", after=head_end)
    say("the head goes on")

    slurm.ctl("sbatch --partition=prio --nodelist=n1 --exclusive --wrap 'sleep 1' --output=/dev/null")
    run.wait_until("head", "Restarts", "2")
    say("the head is preempted")
    run.wait_for(r"resumed .*(.|\n)*iter \d+", after=head_end)
    say("the head goes on")
    slurm.ctl("rlzmq launch stop runs/ten")
    until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)
    took = time.monotonic() - started
    accounts = re.findall(
        r"accounting: sampled (\d+) = trained (\d+) \+ dropped (\d+).*? \+ pending (\d+)", run.log()
    )
    say(f"accounts (sampled, trained, dropped, pending): {accounts}")
    assert len(accounts) == 3
    for sampled, *rest in accounts:
        assert int(sampled) == sum(map(int, rest))  # nothing is lost, nothing is trained twice
    assert took < 600
