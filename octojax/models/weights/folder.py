"""Folders of safetensors: checked by name and shape, read by slices, written back to the bit."""

import contextlib
import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octojax.models.deepseek import DeepSeek, DeepSeekConfig
from octojax.models.jamba import Jamba, JambaConfig
from octojax.models.nemotron_h import NemotronH, NemotronHConfig
from octojax.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from octojax.models.transformer import Transformer
from octojax.models.weights.layout import Index, Leaf
from octojax.models.weights.names import Config, Sources, sources_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 20


def _library() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            "published weights need the package safetensors: pip install 'octojax[weights]'"
        ) from None
    return safetensors


def model_of(config: Config) -> nnx.Module:
    """Returns a model of the configuration; under `nnx.eval_shape` its shapes alone."""
    if isinstance(config, JambaConfig):
        return Jamba(config, rngs=nnx.Rngs(0))
    if isinstance(config, NemotronHConfig):
        return NemotronH(config, rngs=nnx.Rngs(0))
    if isinstance(config, DeepSeekConfig):
        return DeepSeek(config, rngs=nnx.Rngs(0))
    if isinstance(config, Qwen3NextConfig):
        return Qwen3Next(config, rngs=nnx.Rngs(0))
    return Transformer(config, rngs=nnx.Rngs(0))


def _leaves(tree: Any) -> dict[str, Any]:
    """Returns the parameters and router biases of a model or a state, by dotted path."""
    state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    if isinstance(state, nnx.State):
        flat = nnx.to_flat_state(state)
        return {
            ".".join(map(str, path)): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            for path, leaf in flat
        }
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


class _Slice:
    """A tensor of a file, whose parts are read when they are asked for."""

    def __init__(self, piece: Any):
        self._piece = piece
        self.shape = tuple(piece.get_shape())

    def __getitem__(self, index: Index) -> np.ndarray:
        return self._piece[index] if self.shape else np.asarray(self._piece[...])

    @property
    def dtype(self) -> np.dtype:
        return self._piece[tuple(slice(0, 0) for _ in self.shape)].dtype


class Folder:
    """The tensors of a folder, or of one `.safetensors` file, by name."""

    def __init__(self, place: str | Path):
        self._open = _library().safe_open
        self.place = Path(place)
        files = [self.place] if self.place.is_file() else sorted(self.place.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no .safetensors files in {self.place}")
        self._files = {path.name: self._open(path, "numpy") for path in files}
        self.file_of = {name: key for key, f in self._files.items() for name in f.keys()}  # noqa: SIM118
        index = self.place / INDEX
        if index.is_file():
            listed = json.loads(index.read_text())["weight_map"]
            lost = sorted(set(listed.values()) - set(self._files))
            if lost:
                raise FileNotFoundError(f"{index} names files that are not there: {_some(lost)}")

    def __call__(self, name: str) -> _Slice:
        return _Slice(self._files[self.file_of[name]].get_slice(name))

    def metadata(self, file: str) -> dict[str, str] | None:
        return self._files[file].metadata()


def _some(names: Sequence[str]) -> str:
    text = ", ".join(names[:SHOWN])
    return text if len(names) <= SHOWN else f"{text} and {len(names) - SHOWN} more"


class Weights:
    """The published weights of a model: a reader from the path of a leaf to its array.

    Nothing but names and shapes is read until an array is indexed, and then that slice alone, so
    `step.init(params=weights, state=weights)` loads on every rank what it keeps. Arrays have the
    type of the leaves of `config`, whatever the files have.

    Raises `ValueError` listing all tensors that are missing, that the model does not have (but
    for those whose names match a pattern of `ignore`), or that have another shape;
    `FileNotFoundError` without files, `ImportError` without safetensors.
    """

    def __init__(self, folder: str | Path, config: Config, *, ignore: Sequence[str] = ()):
        self.config = config
        self.folder = Folder(folder)
        self._sources = sources_of(config)
        self._expected = _leaves(nnx.eval_shape(lambda: model_of(config)))
        assert self._expected.keys() == self._sources.keys(), "names of leaves and sources differ"
        self._check(ignore)

    def __call__(self, path: str) -> Leaf:
        """Returns the leaf's array, unread; `KeyError` for a path that the model does not have."""
        expected = np.dtype(self._expected[path].dtype)
        return Leaf(self._sources[path], self.folder, expected)

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields path and array of every leaf, one in memory at a time."""
        for path in self._sources:
            yield path, self(path)[...]

    def _check(self, ignore: Sequence[str]) -> None:
        tensors = {name for source in self._sources.values() for name in source.names()}
        present = set(self.folder.file_of)
        missing = sorted(tensors - present)
        extra = [
            name
            for name in sorted(present - tensors)
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
        ]
        faults = [f"missing {len(missing)}: {_some(missing)}"] if missing else []
        if extra:
            faults.append(
                f"{len(extra)} that the model does not have (ignore=[patterns] leaves them out): "
                f"{_some(extra)}"
            )
        wrong = []
        for path, source in self._sources.items():
            if missing and not present.issuperset(source.names()):
                continue
            try:
                shape, expected = source.shape(self.folder), self._expected[path].shape
                if shape != expected:
                    wrong.append(f"{path} is {list(shape)}, the model's {list(expected)}")
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            faults.append(f"{len(wrong)} of another shape: {_some(wrong)}")
        if faults:
            raise ValueError(
                f"the tensors of {self.folder.place} do not fit the configuration; "
                + "; ".join(faults)
            )


def load(folder: str | Path, config: Config, *, ignore: Sequence[str] = ()) -> nnx.Module:
    """Returns the whole model with its published values; nothing is drawn at random.

    Raises as `Weights` does.
    """
    weights = Weights(folder, config, ignore=ignore)
    graph, state = nnx.split(nnx.eval_shape(lambda: model_of(config)))
    flat = nnx.to_flat_state(state)
    values = [jnp.asarray(weights(".".join(map(str, path)))[...]) for path, _ in flat]
    leaves = [(path, leaf.replace(value)) for (path, leaf), value in zip(flat, values, strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def save(
    folder: str | Path,
    config: Config,
    parameters: Any,
    *,
    like: str | Path | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes the published form of a model's leaves: files of safetensors and their index.

    `parameters` is a model, its state, a tree (such as `step.params(state)`), or a reader from a
    path to an array. With `like`, a folder, every tensor gets the type and the file that it has
    there, and `config.json` is copied, so weights that were loaded and not trained come out to
    the bit. Files appear whole or not at all. Raises `ValueError` listing leaves that are
    missing.
    """
    sources = sources_of(config)
    read = _reader(parameters, sources)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    pattern = None if like is None else Folder(like)
    if pattern is None:
        file_of = _split_by_size(config, max_file_bytes)
    else:
        lost = sorted({n for s in sources.values() for n in s.names()} - set(pattern.file_of))
        if lost:
            raise ValueError(f"{like} lacks {len(lost)} tensors of the model: {_some(lost)}")
        file_of = pattern.file_of
        with contextlib.suppress(FileNotFoundError, shutil.SameFileError):
            shutil.copyfile(Path(pattern.place) / "config.json", target / "config.json")
    total = 0
    for file in sorted(set(file_of.values())):
        tensors: dict[str, np.ndarray] = {}
        for path, source in sources.items():
            if all(file_of[name] != file for name in source.names()):
                continue
            for name, value in source.write(np.asarray(read(path)[...])):
                if file_of[name] == file:
                    dtype = value.dtype if pattern is None else pattern(name).dtype
                    tensors[name] = np.ascontiguousarray(value.astype(dtype, copy=False))
        metadata = {"format": "pt"} if pattern is None else pattern.metadata(file)
        _library().numpy.save_file(tensors, target / f"{file}.part", metadata)
        (target / f"{file}.part").replace(target / file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if set(file_of.values()) != {SINGLE}:
        names = {name for source in sources.values() for name in source.names()}
        weight_map = {name: file_of[name] for name in sorted(names)}
        text = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(text, indent=2) + "\n")


def _reader(parameters: Any, sources: Sources) -> Callable[[str], Any]:
    if callable(parameters) and not isinstance(parameters, nnx.Module):
        return parameters
    leaves = _leaves(parameters)
    missing = sorted(set(sources) - set(leaves))
    if missing:
        raise ValueError(f"leaves that are missing, {len(missing)}: {_some(missing)}")
    return leaves.__getitem__


def _split_by_size(config: Config, max_file_bytes: int) -> Mapping[str, str]:
    """Returns the file of every tensor: leaves in their order, each file up to the limit."""
    expected = _leaves(nnx.eval_shape(lambda: model_of(config)))
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for path, source in sources_of(config).items():
        leaf = expected[path]
        size = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = max_file_bytes
        groups[-1] += source.names()
        room -= size
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    count = len(groups)
    return {
        name: f"model-{k:05}-of-{count:05}.safetensors"
        for k, names in enumerate(groups, 1)
        for name in names
    }
