"""What the guides tell a reader to type runs, in order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octojax.cli import main

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every block; `console` and `text` are only read."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert {language for language, _ in found} <= {"python", "sh", "console", "text"}
    return found


def trains(page: Path) -> bool:
    return any("import jax" in code for language, code in blocks(page) if language == "python")


@pytest.mark.parametrize("page", [x for x in GUIDES if not trains(x)], ids=lambda x: x.stem)
def test_every_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python` blocks share their names; each line of an `sh` block is a command that succeeds."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, f"docs/guides/{page.name}", "exec"), names)
        if language == "sh":
            for line in code.splitlines():
                command, *arguments = shlex.split(line)
                assert command == "octopipe"
                with pytest.raises(SystemExit) as stop:
                    main(arguments)
                assert stop.value.code == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("page", [x for x in GUIDES if trains(x)], ids=lambda x: x.stem)
def test_every_training_snippet_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own, which chooses its devices; warnings of octojax are errors."""
    code = [code for language, code in blocks(page) if language == "python"]
    script = tmp_path / "guide.py"
    script.write_text("\n".join(code), encoding="utf-8")
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    if "jax_num_cpu_devices" in script.read_text(encoding="utf-8"):
        del settings["JAX_NUM_CPU_DEVICES"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | settings
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
