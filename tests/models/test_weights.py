"""Published folders are read by slices, refused with all names, and written back to the bit."""

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

safetensors = pytest.importorskip("safetensors")
numpy_files = pytest.importorskip("safetensors.numpy")

import octojax as octopipe  # noqa: E402
from octojax.models import nemotron_h  # noqa: E402
from octojax.models.weights import Weights, config_from, config_of, load, save  # noqa: E402
from octojax.models.weights.layout import (  # noqa: E402
    Joined,
    Leaf,
    Stacked,
    Taps,
    Tensor,
    Transposed,
)
from tests.pipelines import FAST, pipe  # noqa: E402

PARITY = Path(__file__).parents[1] / "data" / "parity"
HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors_of(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    with safetensors.safe_open(PARITY / f"{name}.safetensors", "numpy") as file:
        names = set(file.keys()) - {"tokens", "logits"}
        config = json.loads(file.metadata()["config"])
        return config, {key: file.get_tensor(key) for key in sorted(names)}


def publish(folder: Path, name: str, dtype=np.float32, **changes: np.ndarray | None) -> Path:
    """Writes a folder of two files and their index, as they are published."""
    config, tensors = tensors_of(name)
    tensors = {k: v.astype(dtype) for k, v in tensors.items()} | changes
    tensors = {k: v for k, v in tensors.items() if v is not None}
    folder.mkdir(exist_ok=True)
    file_of = {key: HALVES[i % 2] for i, key in enumerate(tensors)}
    for half in HALVES:
        part = {key: tensors[key] for key in tensors if file_of[key] == half}
        numpy_files.save_file(part, folder / half, {"format": "pt"})
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["jamba", "nemotron-h-experts", "gemma-3"])
def test_a_folder_comes_back_to_the_bit(name, dtype, tmp_path):
    folder = publish(tmp_path / "in", name, dtype)
    weights = Weights(folder, config_of(folder))
    save(tmp_path / "out", weights.config, weights, like=folder)
    for file in (*HALVES, "config.json"):
        assert (folder / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    assert Weights(tmp_path / "out", weights.config)  # with the index that was written


def test_without_a_pattern_files_are_split_by_size(tmp_path):
    folder = publish(tmp_path / "in", "llama-3")
    config = config_of(folder)
    model = load(folder, config)
    save(tmp_path / "small", config, model, max_file_bytes=9000)
    save(tmp_path / "one", config, nnx.state(model))
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    expected = tensors_of("llama-3")[1]
    for place in ("small", "one"):
        again = Weights(tmp_path / place, config).folder
        assert {name: again(name)[...].tobytes() for name in again.file_of} == {
            name: value.tobytes() for name, value in expected.items()
        }
    flat = nnx.to_flat_state(nnx.state(model))
    most = nnx.from_flat_state([row for row in flat if row[0] != ("head", "norm", "scale")])
    with pytest.raises(ValueError, match=r"leaves that are missing, 1: head\.norm\.scale"):
        save(tmp_path / "no", config, most)


def test_all_names_and_shapes_that_do_not_fit_are_listed(tmp_path):
    changes = {
        "model.norm.weight": None,
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.0.input_layernorm.weight": np.zeros(3, np.float32),
        "model.layers.0.self_attn.k_proj.weight": np.zeros((5, 16), np.float32),
        "model.mtp.weight": np.zeros(2, np.float32),
        "rotary.inv_freq": np.zeros(2, np.float32),
    }
    folder = publish(tmp_path, "llama-3", **changes)
    with pytest.raises(ValueError) as caught:
        Weights(folder, config_of(folder), ignore=["*.inv_freq"])
    text = str(caught.value)
    assert "missing 2: model.layers.1.mlp.up_proj.weight, model.norm.weight" in text
    assert "1 that the model does not have" in text
    assert "model.mtp.weight" in text
    assert "inv_freq" not in text
    assert "layers.0.attention_norm.scale is [3], the model's [16]" in text
    assert "k_proj.weight is [16, 5], where the configuration has [16, 8]" in text
    assert "2 of another shape" in text


def test_folders_and_configurations_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors files"):
        Weights(tmp_path, config_from(tensors_of("llama-3")[0]))
    folder = publish(tmp_path / "half", "llama-3")
    (folder / HALVES[1]).unlink()
    with pytest.raises(FileNotFoundError, match="names files that are not there: model-00002"):
        Weights(folder, config_of(folder))
    raw = tensors_of("llama-3")[0]
    with pytest.raises(ValueError, match="unknown model_type 'gpt2'; known are deepseek_v3"):
        config_from({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="only switched off: attention_bias"):
        config_from({**raw, "attention_bias": True})
    with pytest.raises(ValueError, match="configuration of a llama lacks 'rms_norm_eps'"):
        config_from({k: v for k, v in raw.items() if k != "rms_norm_eps"})


class Recorder:
    """A tensor that remembers how many of its elements were read."""

    def __init__(self, value: np.ndarray):
        self.value, self.shape, self.dtype, self.read = value, value.shape, value.dtype, 0

    def __getitem__(self, index):
        self.read += self.value[index].size
        return self.value[index]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slices_are_those_of_the_whole_and_nothing_more_is_read(data):
    size = st.integers(1, 4)
    rows, *widths = [data.draw(size) for _ in range(4)]
    count = data.draw(size)
    draws = np.random.default_rng(0)
    values, experts = {}, []
    for e in range(count):
        parts = tuple(Tensor(f"{e}.{k}") for k in range(3))
        values |= {f"{e}.{k}": draws.normal(size=(w, rows)) for k, w in enumerate(widths)}
        experts.append(Joined(tuple(map(Transposed, parts)), tuple(widths)))
    values["taps"] = draws.normal(size=(rows, 1, count))
    wholes = {
        Stacked(tuple(experts)): np.stack(
            [np.concatenate([values[f"{e}.{k}"].T for k in range(3)], 1) for e in range(count)]
        ),
        Taps("taps"): values["taps"][:, 0].T,
    }
    for source, whole in wholes.items():
        files = {name: Recorder(value) for name, value in values.items()}
        index = tuple(
            data.draw(
                st.integers(0, n - 1)
                | st.tuples(st.integers(0, n), st.integers(0, n)).map(
                    lambda ends: slice(min(ends), max(ends))
                )
            )
            for n in whole.shape[: data.draw(st.integers(1, whole.ndim))]
        )
        leaf = Leaf(source, files.__getitem__, whole.dtype)
        assert leaf.shape == whole.shape
        if 0 in whole[index].shape:
            continue
        np.testing.assert_array_equal(leaf[index], whole[index])
        assert sum(file.read for file in files.values()) == whole[index].size
        again = dict(source.write(whole))
        assert again.keys() == set(source.names())
        assert all(np.array_equal(values[name], again[name]) for name in again)


@pytest.mark.parametrize(
    ("method", "capacity"),
    [
        ("ragged", None),
        pytest.param("ragged", 0.6, marks=pytest.mark.slow),
        pytest.param("places", 0.6, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_pipeline_load_train_and_save_a_folder(method, capacity, tmp_path):
    """The published values come back to the bit; a step moves them as the plain model's does,
    whose experts are computed by places."""
    folder = publish(tmp_path / "in", "nemotron-h-experts")
    published = config_of(folder)
    assert published.moe is not None
    moe = dataclasses.replace(published.moe, capacity_factor=capacity)
    plain = dataclasses.replace(published, moe=moe)
    config = dataclasses.replace(plain, moe=dataclasses.replace(moe, method=method))
    weights = Weights(folder, config)
    tokens = {"tokens": np.random.default_rng(0).integers(0, 24, (4, 10), np.int32)}
    step = octopipe.compile(
        lambda: nemotron_h.NemotronH(config, rngs=nnx.Rngs(0)),
        nemotron_h.loss,
        optax.sgd(1.0),
        tokens,
        mesh=pipe(2),
        microbatches=2,
        schedule="zb-h1",
        progress=False,
        compiler_options=FAST,
    )
    state = step.init(params=weights, state=weights)
    save(tmp_path / "out", config, step.model(state), like=folder)
    for half in HALVES:
        assert (folder / half).read_bytes() == (tmp_path / "out" / half).read_bytes()
    state, metrics = step(state, tokens)

    graph, params, rest = nnx.split(load(folder, plain), nnx.Param, ...)
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda p, r: nemotron_h.loss(nnx.merge(graph, p, r), tokens)),
        compiler_options=FAST,
    )(params, rest)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    before, after, moved = map(jax.tree.leaves, (params, step.params(state), gradients))
    for p, q, g in zip(before, after, moved, strict=True):
        np.testing.assert_allclose(p - q, g, rtol=0, atol=2e-5 * max(1, np.max(np.abs(g))))
