"""Leaves in pieces: whatever is read of them is what was written."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax import checkpoint
from octojax.checkpoint import sharded
from octojax.checkpoint.leaves import Piece, Row
from octojax.checkpoint.pieces import StoredLeaf, write_arrays
from octojax.checkpoint.sharded import Shard
from octojax.errors import FormatError

NAME = ("params", "w")


@settings(max_examples=40)
@given(data=st.data())
def test_ranges_of_a_leaf_in_pieces_are_those_of_the_whole(
    data: Any, tmp_path_factory: Any
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int32, np.bool_]))
    whole = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    cuts = [sorted(data.draw(st.sets(st.integers(1, n), max_size=2)) | {n}) for n in shape]
    blocks: list[tuple[tuple[int, int], ...]] = [()]
    for ends in cuts:
        spans = list(zip([0, *ends], ends))
        blocks = [(*block, span) for block in blocks for span in spans if span[0] < span[1]]
    folder = tmp_path_factory.mktemp("pieces") / "tree"
    pieces, values = [], {}
    for number, block in enumerate(blocks):
        start, size = tuple(a for a, _ in block), tuple(b - a for a, b in block)
        single = [axis for axis, n in enumerate(size) if n == 1]
        axis = data.draw(st.sampled_from([None, *single]))
        value = whole[tuple(slice(a, b) for a, b in block)]
        at = (*NAME, str(number))
        values[at] = value if axis is None else value.squeeze(axis)
        pieces.append(Piece("", at, start, size, axis))
    write_arrays(folder, values)
    leaf = StoredLeaf(Row(NAME, shape, str(whole.dtype), NAME, None, tuple(pieces)), {"": folder})
    assert (leaf.shape, leaf.dtype) == (whole.shape, whole.dtype)
    for _ in range(3):
        index = tuple(
            data.draw(st.integers(0, n - 1))
            if data.draw(st.booleans())
            else slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
            for n in shape
        )
        np.testing.assert_array_equal(leaf[index], whole[index])
    np.testing.assert_array_equal(leaf[...], whole)


ROWS = [Row(NAME, (4, 3), "float32", NAME), Row(("opt_state", "count"), (), "int32", ("n",))]
WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def shards(number: int) -> list[Shard]:
    block = Shard(NAME, (2 * number, 0), (2, 3), None, WHOLE[2 * number : 2 * number + 2])
    count = Shard(("opt_state", "count"), (), (), None, np.int32(7))
    return [block, count] if number == 0 else [block]


def two_processes(path: Path, broken: int | None = None) -> list[BaseException | None]:
    """Saves from two threads that meet; `broken` brings a leaf that cannot be written."""
    barrier, texts = threading.Barrier(2), ["", ""]

    def process(number: int) -> BaseException | None:
        def meet(text: str) -> list[str]:
            texts[number] = text
            barrier.wait(30)
            told = list(texts)
            barrier.wait(30)
            return told

        mine = shards(number)
        if number == broken:
            mine[0] = replace(mine[0], value=np.zeros((2, 3), "U1"))
        try:
            sharded.save_shards(
                path, ROWS, mine, step=3, plan=None, overwrite=False, process=number, alone=False,
                meet=meet,
            )  # fmt: skip
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(process, range(2)))


def test_two_processes_write_their_parts_and_one_reads_all(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert two_processes(path) == [None, None]
    assert {x.name for x in (path / "tree").iterdir()} == {"process-0", "process-1"}
    assert not (path / "octojax.lock").exists()
    found = checkpoint.load(path)
    np.testing.assert_array_equal(found.params["w"], WHOLE)
    assert (found.opt_state["count"], found.step) == (7, 3)
    with checkpoint.opened(path) as stored:
        (leaf,) = stored.fit({"w": jax.ShapeDtypeStruct((4, 3), np.float32)}, "params")
        np.testing.assert_array_equal(leaf[1:3], WHOLE[1:3])
        other = {"w": np.zeros((4, 3), np.float16), "b": np.zeros(1)}
        text = r"b is not in the file; w is float32\[4, 3\] in the file, expected float16\[4, 3\]"
        with pytest.raises(FormatError, match=f"2 leaves of params do not fit: {text}"):
            stored.fit(other, "params")


def test_a_lost_part_is_told_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert two_processes(path) == [None, None]
    (path / "tree" / "process-1" / "manifest.ocdbt").unlink()
    with pytest.raises(FormatError, match=r"process-1/manifest\.ocdbt is missing"):
        checkpoint.load(path)
    with pytest.raises(FormatError, match=r"process-1/manifest\.ocdbt is missing"):  # noqa: SIM117
        with checkpoint.opened(path):
            pass


def test_the_error_of_one_process_is_raised_in_all_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    errors = two_processes(path, broken=1)
    assert all(isinstance(error, OSError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "could not be written" in str(errors[0])
    assert not path.exists()
    assert two_processes(path) == [None, None]
    (error, _) = two_processes(path)
    assert isinstance(error, FileExistsError)
    np.testing.assert_array_equal(checkpoint.load(path).params["w"], WHOLE)


def test_pieces_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert two_processes(path) == [None, None]
    index = json.loads((path / "octojax.json").read_text())
    index["leaves"][0]["pieces"][0]["folder"] = "../elsewhere"
    index.pop("digest")
    text = json.dumps(index, sort_keys=True).encode()
    index["digest"] = hashlib.sha256(text).hexdigest()
    (path / "octojax.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"leaf 0 cannot be read: .*'\.\./elsewhere'"):
        checkpoint.load(path)
