"""A checkpoint is the old one or the new one, whatever ends its writer; nothing else is touched."""

import errno
import json
import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octojax import checkpoint
from octojax.checkpoint import folder, store
from octojax.checkpoint.folder import sole_writer
from octojax.errors import FormatError
from tests.checkpoint.killed_script import MOMENTS, tree

ROOT = Path(__file__).parents[2]


def same(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


def names(path: Path) -> list[str]:
    return sorted(x.name for x in path.iterdir())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    script = [sys.executable, "-m", "tests.checkpoint.killed_script", str(root)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(script, check=True, cwd=ROOT, env=environment, timeout=250)
    return root


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_overwrite_leaves_a_whole_checkpoint(killed: Path, moment: str) -> None:
    path = killed / moment
    step = 2 if moment == "replaced" else 1
    found = checkpoint.load(path, tree(step))
    assert found.step == step
    same(found.params, tree(step))
    assert "octojax.lock" in names(path)
    (path / "notes.txt").write_text("mine")
    checkpoint.save(path, tree(3), step=3, overwrite=True)
    assert checkpoint.load(path).step == 3
    left = [x for x in names(path) if not x.startswith("tree")]
    assert left == ["notes.txt", "octojax.json"]
    assert len(names(path)) == 3, names(path)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_first_save_is_no_checkpoint(killed: Path, moment: str) -> None:
    path = killed / "first" / moment
    if moment == "replaced":
        assert checkpoint.load(path).step == 2
    else:
        with pytest.raises(FileNotFoundError, match="interrupted"):
            checkpoint.load(path)
    checkpoint.save(path, tree(3), step=3, overwrite=True)
    assert checkpoint.load(path).step == 3
    assert len(names(path)) == 2, names(path)


def test_an_error_while_writing_leaves_the_old_one_and_nothing_new(tmp_path: Path) -> None:
    """As on a full disk: files may not grow beyond a few kilobytes."""
    path = tmp_path / "c"
    checkpoint.save(path, tree(1), step=1)
    noise = {"w": np.random.default_rng(0).standard_normal((64, 64))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        with pytest.raises(OSError, match=r"could not be written.*File too large") as error:
            checkpoint.save(path, noise, step=2, overwrite=True)
        with pytest.raises(OSError, match=f"the checkpoint {tmp_path / 'new'} could not"):
            checkpoint.save(tmp_path / "new", noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(path) in str(error.value)
    assert str(error.value).endswith("The one that was there is as it was")
    assert names(tmp_path) == ["c"]
    assert names(path) == ["octojax.json", "tree"]
    same(checkpoint.load(path).params, tree(1))


def test_an_interrupt_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint.save(tmp_path, tree(1), step=1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_index", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, tree(2), step=2, overwrite=True)
    assert names(tmp_path) == ["octojax.json", "tree"]
    assert checkpoint.load(tmp_path).step == 1


def test_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "thesis.tex").write_text("x")
    (tmp_path / "tree-12345678").mkdir()
    for step in range(3):
        checkpoint.save(tmp_path, tree(step), step=step, overwrite=step > 0)
        assert checkpoint.load(tmp_path).step == step
        own = tmp_path / json.loads((tmp_path / "octojax.json").read_text())["tree"]
        assert own.name not in ("tree", "tree-12345678")
        (own / "mine.txt").write_text("kept")
    folders = [x.parent for x in tmp_path.rglob("mine.txt")]
    assert len(folders) == 3
    assert sum(names(x) == ["mine.txt"] for x in folders) == 2
    assert (tmp_path / "tree" / "thesis.tex").read_text() == "x"
    assert names(tmp_path / "tree") == ["d", "thesis.tex"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with sole_writer(tmp_path) as lock:
        lock.note("tree", None)
        answers: list[BaseException] = []

        def attempt() -> None:
            try:
                checkpoint.save(tmp_path, tree(1))
            except BaseException as error:
                answers.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        assert isinstance(answers[0], FileExistsError)
        owner = f"written by process {os.getpid()} on {platform.node()}"
        assert owner in str(answers[0])
        with pytest.raises(FileNotFoundError, match=owner):
            checkpoint.load(tmp_path)
        lock.tidy(None)
    checkpoint.save(tmp_path, tree(1))
    assert names(tmp_path) == ["octojax.json", "tree"]


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


LOCKS: dict[str, Callable[[], str]] = {
    "empty": lambda: "",
    "text": lambda: "no JSON",
    "list": lambda: "[1]",
    "dead": lambda: json.dumps({"process": dead_process(), "machine": platform.node()}),
    "foreign names": lambda: json.dumps({"folders": ["..", "keep", 3, "tree/../keep"]}),
}


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_lock_without_owner_is_taken_over(
    tmp_path: Path, monkeypatch: Any, kind: str, locks: bool
) -> None:
    if not locks:

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "no locks here")

        monkeypatch.setattr(folder.fcntl, "flock", refuse)
    (tmp_path / "keep").mkdir()
    (tmp_path / "octojax.lock").write_text(LOCKS[kind]())
    if not locks and kind != "foreign names":
        with sole_writer(tmp_path) as lock:
            lock.note("tree", None)
            with pytest.raises(FileExistsError, match="being written by process"):
                checkpoint.save(tmp_path, tree(1))
            lock.tidy(None)
    checkpoint.save(tmp_path, tree(1))
    assert names(tmp_path)[:2] == ["keep", "octojax.json"]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    checkpoint.save(tmp_path, tree(1), step=1)
    verify = folder.verify

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(folder, "verify", verify)
        checkpoint.save(tmp_path, tree(2), step=2, overwrite=True)
        verify(*args)

    monkeypatch.setattr(folder, "verify", overtaken)
    found = checkpoint.load(tmp_path)
    assert found.step == 2
    same(found.params, tree(2))


@pytest.mark.parametrize(
    "name", ["a b%20#?&é", "x/../y", "deep/er/still", "trailing/", "lr[1e-3]", "C:\\a*?[b]"]
)
def test_odd_paths(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.save(f"~/{name}", tree(1))
    for path in (f"~/{name}", name, f"{tmp_path}/{name}/", tmp_path / name):
        same(checkpoint.load(path).params, tree(1))


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")  # to nothing yet
    checkpoint.save(tmp_path / "link", tree(1))
    checkpoint.save(tmp_path / "link", tree(2), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    same(checkpoint.load(tmp_path / "real").params, tree(2))


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for use in (lambda: checkpoint.save(file, tree(1)), lambda: checkpoint.load(file)):
        with pytest.raises(NotADirectoryError, match=f"{file} is a file"):
            use()
    with pytest.raises(OSError, match=str(file)):
        checkpoint.save(file / "below", tree(1))
    with pytest.raises(ValueError, match="gs://bucket/x is an address"):
        checkpoint.save("gs://bucket/x", tree(1))
    with pytest.raises(OSError, match="/proc/octojax"):
        checkpoint.save("/proc/octojax", tree(1))
    assert file.read_text() == "mine"


def test_paths_that_name_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for link, to in (("here", "there"), ("there", "here")):
        (tmp_path / link).symlink_to(to)
    circle = "([Ss]ymlink loop|symbolic links)"
    for name, reason in {"": "is empty", "a\0b": "null byte", "here": circle}.items():
        for use in (lambda n: checkpoint.save(n, tree(1)), checkpoint.load):
            with pytest.raises(ValueError, match=f"cannot be the folder .*{reason}"):
                use(name)
    with pytest.raises(TypeError, match="of type int, expected str or Path"):
        checkpoint.save(3, tree(1))  # type: ignore[arg-type]
    (tmp_path / "odd" / "octojax.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"octojax\.json is a folder"):
        checkpoint.save(tmp_path / "odd", tree(1), overwrite=True)
    with pytest.raises(FormatError, match="is no checkpoint"):
        checkpoint.load(tmp_path / "odd")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["here", "odd", "there"]


def damaged(path: Path, data: Any) -> None:
    """Changes a file of the checkpoint: one bit, its length, or that it is there."""
    files = sorted(x for x in path.rglob("*") if x.is_file())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["bit", "cut", "longer", "gone"])):
        case "bit" if content:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut" if content:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "gone":
            file.unlink()
            return
        case _:
            content += b"x"
    file.write_bytes(content)


@given(st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_damage_is_told_with_the_files_name(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "c"
    checkpoint_files = {
        x.relative_to(tmp_path): x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()
    }
    if not checkpoint_files:
        checkpoint.save(path, tree(1), step=1)
        checkpoint_files = {
            x.relative_to(tmp_path): x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()
        }
    damaged(path, data)
    with pytest.raises((FormatError, FileNotFoundError), match=str(path)):
        checkpoint.load(path)
    for name, content in checkpoint_files.items():
        (tmp_path / name).write_bytes(content)


def test_nothing_is_removed_while_the_index_cannot_be_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, tree(1), step=1)
    good = (tmp_path / "octojax.json").read_text()
    (tmp_path / "octojax.json").write_text(good[:40])
    (tmp_path / "octojax.lock").write_text(json.dumps({"folders": ["tree"]}))  # a killed writer's
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpoint.save(tmp_path, tree(2))
    assert (tmp_path / "tree" / "manifest.ocdbt").exists()
    checkpoint.save(tmp_path, tree(2), step=2, overwrite=True)
    assert checkpoint.load(tmp_path).step == 2
    assert (tmp_path / "tree" / "manifest.ocdbt").exists()
