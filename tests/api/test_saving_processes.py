"""Two processes write one checkpoint, slowly, continue from it, learn of each other's errors."""

from pathlib import Path

import optax

from octojax.launch import launch
from tests.pipelines import case_of, compiled

SCRIPT = str(Path(__file__).parent / "saving_script.py")


def test_two_processes_save_and_restore(tmp_path: Path) -> None:
    lines: list[str] = []
    exits = launch(
        [SCRIPT, str(tmp_path / "c")],
        2,
        devices_per_process=1,
        timeout_s=60.0,
        echo=lambda _, line: lines.append(line),
    )
    assert [e.code for e in exits] == [0, 0], "\n".join(lines)
    assert sum("continues alike" in line for line in lines) == 2
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    alone = compiled(case_of("scan"), "gpipe", 1, 2, optimizer=optimizer)
    assert alone.restore(tmp_path / "c").step == 2
