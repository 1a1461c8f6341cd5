"""Profiles of presets, from shapes: a layer per letter of the pattern, sizes that fit the axis."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octojax.costs import Device, blocks_of, layer_operations
from octojax.frontends import adapt
from octojax.ir import Machine
from octojax.ir.collectives import Group
from octojax.layers import find_layers
from octojax.machines import Hardware
from octojax.models import deepseek, gemma, jamba, llama, nemotron_h, qwen3_next
from octojax.profiling.from_shapes import preset_profile, trace_preset
from octojax.profiling.presets import Preset, find_preset, pattern_of
from octojax.rows.whole import separated
from octojax.trace import trace_loss

MACHINE = Machine("two nodes", 1e9, 1e-6, 1e9, ranks_per_node=4, inter_bandwidth_bytes_per_s=1e8)
HARDWARE = Hardware(MACHINE, Device(1e12, 1e11))
WORDS = {"M": "mamba2", "*": "attention", "-": "mlp", "T": "attention+mlp"}
T, D, V = 32, 128, 256


def tiny_of(module: ModuleType, **changes: Any) -> Preset:
    return find_preset(module, "tiny", **changes)


def hybrid_of(dtype: str = "bfloat16", groups: int = 1) -> Preset:
    """One layer of each kind, between embedding and head."""
    preset = tiny_of(nemotron_h, dtype=dtype, layers=4, pattern="M-*-")
    mamba = replace(preset.config.mamba, groups=groups)
    return replace(preset, config=replace(preset.config, mamba=mamba))


def test_there_is_a_layer_per_letter_between_embedding_and_head() -> None:
    preset = hybrid_of()
    found = preset_profile(preset, HARDWARE, sequence=T, ranks=4, microbatches=8)
    kinds = ["embedding", *(WORDS[x] for x in preset.config.pattern), "head+loss"]
    assert [x.kind for x in found.layers] == kinds
    assert (found.ranks, found.microbatches) == (4, 8)
    extra = dict(found.extra)
    assert extra["pattern"] == preset.config.pattern
    assert (extra["sequence"], extra["vocab"], extra["hidden"]) == (T, V, D)
    mlp = found.layers[kinds.index("mlp")]
    assert mlp.param_bytes == 2 * (2 * D * preset.config.hidden + D)
    assert mlp.state_bytes == 9 * mlp.param_bytes  # 18 bytes a parameter
    assert mlp.output_bytes == 4 * T * D  # the residual stream is float32
    embedding, head = found.layers[0], found.layers[-1]
    assert embedding.param_bytes == 2 * V * D
    assert embedding.input_grad_s == 0
    assert embedding.forward_s == 2 * 2 * T * D / 1e11  # the rows looked up, read and written
    assert head.param_bytes == 2 * V * D  # its norm is before the cut, where bfloat16 leaves


@pytest.mark.parametrize(
    ("module", "mixers"), [(jamba, {"mamba2", "attention"}), (llama, {"attention"})]
)
def test_pairs_of_mixer_and_feed_forward_are_one_layer(
    module: ModuleType, mixers: set[str]
) -> None:
    preset = tiny_of(module)
    found = preset_profile(preset, HARDWARE, sequence=T)
    assert len(found.layers) == preset.config.layers + 2
    parts = [x.kind.split("+") for x in found.layers[1:-1]]
    assert {mixer for mixer, _ in parts} == mixers
    assert {half for _, half in parts} <= {"mlp", "moe"}
    assert found.layers[1].state_bytes == 4 * found.layers[1].param_bytes  # float32: 16 bytes


@pytest.mark.parametrize(
    ("module", "letters"), [(nemotron_h, 5), (jamba, 6), (llama, 3), (deepseek, 3), (gemma, 12)]
)
def test_layers_alike_are_traced_once(module: ModuleType, letters: int) -> None:
    sizes = {} if module is nemotron_h else {"layers": {jamba: 16, gemma: 18}.get(module, 6)}
    preset = tiny_of(module, **sizes)
    pattern = str(pattern_of(preset.config))
    short, places = preset.shortened()
    there = str(pattern_of(short.config))
    assert len(there) == letters
    assert [there[at] for at in places] == list(pattern)
    assert (places[0], places[-1]) == (0, letters - 1)
    assert not {0, letters - 1} & set(places[1:-1])


@pytest.mark.parametrize("module", [nemotron_h, llama])
def test_costs_are_those_of_the_whole_model(module: ModuleType) -> None:
    changes = {"pattern": "M-M*--M-", "layers": 8} if module is nemotron_h else {"layers": 5}
    preset = tiny_of(module, **changes)
    traced = trace_preset(preset, T)
    assert len(set(traced.places)) < len(traced.places)
    pure = adapt(preset.make, preset.loss, None)
    batch = {"tokens": jax.ShapeDtypeStruct((1, T + 1), jnp.int32)}
    loss = trace_loss(pure.fn, pure.params, batch, pure.state)
    whole = blocks_of(find_layers(separated(loss)))
    work = layer_operations(traced.layered)
    assert tuple(work[at] for at in traced.places) == layer_operations(whole)


def test_tied_weights_are_priced_where_they_are_read() -> None:
    found = preset_profile(tiny_of(gemma), HARDWARE, sequence=T)
    assert found.layers[0].kind == "embedding"
    assert found.layers[-1].param_bytes >= found.layers[0].param_bytes


def test_a_tensor_axis_divides_work_and_adds_collectives_of_the_arithmetic_type() -> None:
    preset = hybrid_of(groups=2)
    one, two = (preset_profile(preset, HARDWARE, sequence=T, tensor=n) for n in (1, 2))
    at = [x.kind for x in one.layers].index("mlp")
    ring = Group(2, 1e-6, 1e9).all_reduce_s(2 * T * D)  # bfloat16, though the stream is float32
    for name in ("forward_s", "input_grad_s"):
        alone, shared = (getattr(p.layers[at], name) for p in (one, two))
        assert shared == pytest.approx(alone / 2 + ring)
    assert two.layers[at].param_bytes == one.layers[at].param_bytes // 2
    assert two.layers[0].input_grad_s == 0
    assert two.machine.ranks_per_node == 2
    assert dict(two.extra)["tensor_parallel"] == 2
    divided = preset_profile(preset, HARDWARE, sequence=T, tensor=2, sequence_parallel=True)
    assert divided.layers[at].output_bytes == two.layers[at].output_bytes // 2
    assert divided.layers[at].forward_s == two.layers[at].forward_s
    assert divided.layers[at].residual_bytes < two.layers[at].residual_bytes


def test_sizes_and_types_count_as_asked() -> None:
    fast = replace(HARDWARE, device=Device(1e12, 1e30, float32_flops_per_s=1e11))
    preset = hybrid_of()
    one, two = (preset_profile(preset, fast, sequence=T, microbatch_size=n) for n in (1, 2))
    assert two.layers[2].forward_s == pytest.approx(2 * one.layers[2].forward_s)
    assert two.layers[2].output_bytes == 2 * one.layers[2].output_bytes
    wide = preset_profile(hybrid_of("float32"), fast, sequence=T)
    assert wide.layers[2].forward_s == pytest.approx(10 * one.layers[2].forward_s)
    assert dict(wide.extra)["dtype"] == "float32"


def test_layers_and_patterns_may_be_others() -> None:
    assert find_preset(nemotron_h, "tiny", layers=2, pattern="M*").config.pattern == "M*"
    assert find_preset(llama, "llama-3-8b", layers=3).config.layers == 3
    assert find_preset(jamba, "jamba-s", pattern="mBmBaBmB" * 2).config.layers == 16


@pytest.mark.parametrize(
    ("module", "name", "changes", "message"),
    [
        (nemotron_h, "nemotron-h-8", {}, "no preset 'nemotron-h-8', did you mean nemotron-h-8b"),
        (nemotron_h, "zebra!", {}, r"no preset 'zebra!'. It has nemotron-h-8b"),
        (nemotron_h, "tiny", {"pattern": "M-*"}, "has 3 layers, expected 14. .* say --layers 3"),
        (nemotron_h, "tiny", {"pattern": "M-*", "layers": 4}, "has 3 layers, expected 4"),
        (nemotron_h, "tiny", {"layers": 4}, "4 layers, and its pattern .* has 14"),
        (nemotron_h, "tiny", {"pattern": "MX", "layers": 2}, r"holds \['X'\]"),
        (jamba, "tiny", {"pattern": "mm"}, "pattern 'mm' .2 layers.; .* choose --layers alone"),
        (llama, "tiny", {"dtype": "int8"}, "dtype 'int8': expected bfloat16"),
        (llama, "tiny", {"dtype": "wide"}, "dtype 'wide': expected bfloat16"),
    ],
)
def test_mistakes_are_told(
    module: ModuleType, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_preset(module, name, **changes)


def test_axes_that_divide_no_heads_or_experts_are_refused_with_every_size() -> None:
    nemotron = find_preset(nemotron_h, "nemotron-h-8b")
    with pytest.raises(ValueError, match="tensor axis of 3 does not divide heads = 32"):
        preset_profile(nemotron, HARDWARE, tensor=3)
    nemotron.expect_divisible(8)
    with pytest.raises(ValueError, match=r"16 does not divide mamba\.groups = 8"):
        nemotron.expect_divisible(16)
    with pytest.raises(ValueError, match=r"32 does not divide heads = 16, moe\.experts = 16"):
        find_preset(jamba, "jamba-s").expect_divisible(32)
    next_ = find_preset(qwen3_next, "qwen3-next-80b-a3b")
    next_.expect_divisible(8)  # two heads of keys and values, each on four devices
    with pytest.raises(ValueError, match=r"heads = 16, kv_heads = 2, delta\.key_heads = 16"):
        next_.expect_divisible(3)
    with pytest.raises(ValueError, match="tensor = 0"):
        preset_profile(nemotron, HARDWARE, tensor=0)
    with pytest.raises(ValueError, match=r"add \[device\] with flops_per_s"):
        preset_profile(nemotron, replace(HARDWARE, device=None))


def test_a_module_of_ones_own_is_read_by_its_annotation() -> None:
    def loss(model: nemotron_h.NemotronH, batch: Any) -> Any:
        return nemotron_h.loss(model, batch)

    own = ModuleType("own")
    vars(own).update(PRESETS={"mine": lambda: hybrid_of().config}, loss=loss)
    preset = find_preset(own, "mine")
    assert preset.model is nemotron_h.NemotronH
    total = sum(x.param_bytes for x in preset_profile(preset, HARDWARE, sequence=T).layers)
    assert total == jnp.dtype(preset.config.param_dtype).itemsize * _parameters(preset)


def _parameters(preset: Preset) -> int:
    from flax import nnx

    from octojax.models import count_parameters

    return count_parameters(nnx.eval_shape(preset.make))
