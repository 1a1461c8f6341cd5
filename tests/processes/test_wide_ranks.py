"""Ranks of several processes: four processes of a device each; see `wide.py` for what they run."""

import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import octojax as octopipe
from tests.processes import test_processes as processes
from tests.processes.test_processes import assert_all_equal, said

SCRIPT = str(Path(__file__).parent / "wide.py")


def run(*arguments: str, devices: int = 1, timeout_s: float = 60.0):
    return processes.run(4, *arguments, devices=devices, timeout_s=timeout_s, script=SCRIPT)


def test_two_ranks_of_two_processes():
    """Four processes in the shortest run; `test_all_schedules` has the rest."""
    assert_all_equal(*run("briefly"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ("2x2x1", "1f1b:0 zb-h1:1"),
        ("2x2x1", "tuned:3 interleaved:0:in_order"),
        ("2x1x2", "tuned:0 zb-h1:3:in_order"),
        ("2x1x2", "1f1b:1 interleaved:0"),
    ],
)
def test_all_schedules(shape, cases):
    assert_all_equal(*run("trains", shape, *cases.split()))


@pytest.mark.slow
def test_batches_and_parameters_of_which_every_process_has_a_part():
    assert_all_equal(*run("spread"))


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["zb-h1:1", "interleaved:3:in_order"])
def test_processes_of_several_devices(cases):
    assert_all_equal(*run("trains", "2x2x2", cases, devices=2))


@pytest.mark.slow
def test_every_process_makes_and_writes_its_parts(tmp_path):
    exits, lines = run("layouts", str(tmp_path))
    assert_all_equal(exits, lines)
    written = tmp_path / "wide" / "tree"
    assert {x.name for x in written.iterdir()} == {f"process-{p}" for p in range(4)}
    wanted = next(line.split()[1] for _, line in lines if line.startswith("loss"))
    assert whole_loss(tmp_path / "wide") == pytest.approx(float.fromhex(wanted), rel=1e-6)


def whole_loss(path: Path) -> float:
    """The loss of the step after a checkpoint, in one process with a device per rank."""
    width, rows = 8, 6
    params = {f"w{i}": np.zeros((width, width), np.float32) for i in range(8)}

    def loss(params, batch):
        h = batch["x"]
        for i in range(8):
            h = jax.numpy.tanh(h @ params[f"w{i}"])
        return jax.numpy.mean((h - batch["y"]) ** 2), {"largest": jax.numpy.max(abs(h))}

    batch = {
        name: jax.random.normal(jax.random.key(k), (rows, width))
        for k, name in ((1, "x"), (2, "y"))
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    options = {"mesh": mesh, "microbatches": 3, "progress": False}
    with octopipe.compile(params, loss, optimizer, batch, **options) as step:
        state = step.restore(path)
        assert state.step == 1
        return float(step(state, batch)[1]["loss"])


@pytest.mark.slow
def test_every_process_gets_the_timeline_of_all_ranks():
    assert_all_equal(*run("recorded"))


@pytest.mark.slow
def test_another_batch_in_one_process_is_named_in_all():
    assert_all_equal(*run("differ"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "victim"),
    [("kill", 0), ("kill", 1), ("raise", 3), ("slow", 1), ("stop", 0), ("stop", 3)],
)
def test_a_lost_process_is_an_error_in_time(how, victim):
    """Of a rank's own processes, of its counterpart, and of the one that is neither."""
    begin = time.monotonic()
    exits, lines = run("fail", how, str(victim), timeout_s=8.0)
    assert time.monotonic() - begin < 90
    survivors = [p for p in range(4) if p != victim]
    assert [exits[p].code for p in survivors] == [1, 1, 1], lines
    cause = {
        "kill": f"process {victim} was killed by SIGKILL",
        "raise": "broken on purpose",
        "slow": "waited 3 s for",
        "stop": f"process {victim}",
    }[how]
    for process in survivors:
        assert cause in said(lines, process), said(lines, process)
    for process in range(4):
        pid = next(line.split()[1] for line in said(lines, process).splitlines() if "pid" in line)
        assert not Path(f"/proc/{pid}").exists()
