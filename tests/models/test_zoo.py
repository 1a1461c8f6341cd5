"""Whole models: published sizes, causality, invariance under microbatching, training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from octojax.models import count_parameters, deepseek, gemma, jamba, llama, nemotron_h, qwen3_next
from octojax.models.language import token_loss
from octojax.models.mamba1 import Mamba1Config
from octojax.models.moe import MoEConfig

CLASSES = {
    nemotron_h: nemotron_h.NemotronH,
    jamba: jamba.Jamba,
    llama: llama.Llama,
    gemma: gemma.Gemma,
    deepseek: deepseek.DeepSeek,
    qwen3_next: qwen3_next.Qwen3Next,
}
MODULES = {module.__name__.rsplit(".", 1)[1]: module for module in CLASSES}
EXPERTS = dataclasses.replace(
    nemotron_h.tiny(width=32, vocabulary=17),
    pattern="ME*E",
    moe=MoEConfig(experts=4, chosen=2, hidden=16, router="sigmoid", normalize=True),
)
MAMBA_1 = dataclasses.replace(
    jamba.tiny(width=32, vocabulary=17), layers=2, mamba=Mamba1Config(64, 4, 4)
)
SMALL = {
    "nemotron_h": (
        nemotron_h,
        dataclasses.replace(nemotron_h.tiny(width=32, vocabulary=17), pattern="M-*"),
    ),
    "nemotron_h experts": (nemotron_h, EXPERTS),
    "jamba": (
        jamba,
        dataclasses.replace(jamba.tiny(width=32, layers=3, vocabulary=17), attention_at=2),
    ),
    "jamba mamba-1": (jamba, MAMBA_1),
    "llama": (llama, llama.tiny(width=32, layers=2, vocabulary=17)),
    "deepseek": (deepseek, deepseek.tiny(width=32, layers=2, vocabulary=17)),
    "gemma": (
        gemma,
        dataclasses.replace(
            gemma.tiny(width=32, layers=2, vocabulary=17), window=4, period=2, global_at=(1,)
        ),
    ),
}
LONGER = ("jamba mamba-1", "nemotron_h experts", "deepseek")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in SMALL]


def make(name: str):
    module, config = SMALL[name]
    return module, CLASSES[module](config, rngs=nnx.Rngs(0))


call = nnx.jit(lambda model, token_BT: model(token_BT))


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 17, (batch, length), np.int32))


QUICK = [
    ("nemotron_h", "nemotron-h-8b", 8.10),
    ("nemotron_h", "nemotron-nano-9b-v2", 8.89),
    ("nemotron_h", "nemotron-3-nano-30b-a3b", 31.6),
    ("nemotron_h", "nemotron-h-s", 0.72),
    ("jamba", "jamba-v0.1", 51.57),
    ("jamba", "jamba-s", 6.65),
    ("llama", "llama-2-7b", 6.74),
    ("llama", "llama-3-8b", 8.03),
    ("llama", "llama-s", 1.40),
    ("gemma", "gemma-2-2b", 2.61),
    ("gemma", "gemma-3-4b", 3.88),
]
LONG = [
    ("nemotron_h", "nemotron-h-47b", 46.8),
    ("nemotron_h", "nemotron-h-56b", 56.3),
    ("nemotron_h", "nemotron-nano-12b-v2", 12.31),
    ("nemotron_h", "nemotron-h-m", 1.44),
    ("nemotron_h", "nemotron-h-l", 2.88),
    ("jamba", "jamba-1.5-large", 398.6),
    ("jamba", "jamba-m", 13.3),
    ("jamba", "jamba-l", 26.6),
    ("llama", "llama-2-13b", 13.02),
    ("llama", "llama-3-70b", 70.55),
    ("llama", "llama-m", 2.79),
    ("llama", "llama-l", 5.59),
    ("deepseek", "deepseek-v3", 671.0),
    ("qwen3_next", "qwen3-next-80b-a3b", 79.7),
]


@pytest.mark.parametrize(
    ("family", "preset", "billions"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in LONG)],
)
def test_published_parameter_counts(family, preset, billions):
    module = MODULES[family]
    config = module.PRESETS[preset]()
    model = nnx.eval_shape(lambda: CLASSES[module](config, rngs=nnx.Rngs(0)))
    digits = len(str(billions).split(".")[1])
    assert round(count_parameters(model) / 1e9, digits) == billions


def test_table_2_large_sizes_repeat_the_small_ones():
    small, large = (nemotron_h.octopipe_table_2(s) for s in "SL")
    assert large.pattern == small.pattern * 4
    assert large.vocabulary == 4 * small.vocabulary
    assert jamba.octopipe_table_2("L").layers == 64
    assert llama.octopipe_table_2("L").layers == 128


def test_patterns_have_the_published_composition():
    def counts(config):
        return tuple(config.pattern.count(symbol) for symbol in "M-*E")

    assert counts(nemotron_h.nemotron_h_8b()) == (24, 24, 4, 0)
    assert counts(nemotron_h.nemotron_h_47b()) == (45, 48, 5, 0)
    assert counts(nemotron_h.nemotron_h_56b()) == (54, 54, 10, 0)
    assert counts(nemotron_h.nemotron_nano_9b_v2()) == (27, 25, 4, 0)
    assert counts(nemotron_h.nemotron_nano_12b_v2()) == (28, 28, 6, 0)
    assert counts(nemotron_h.nemotron_3_nano_30b_a3b()) == (23, 0, 6, 23)
    assert counts(nemotron_h.tiny()) == (7, 6, 1, 0)
    assert jamba.jamba_v0_1().pattern == "mBmBaBmB" * 4
    assert gemma.gemma("gemma-3-4b").pattern[:12] == "LLLLLGLLLLLG"
    assert deepseek.deepseek_v3().pattern == "DDD" + "E" * 58
    assert gemma.gemma("gemma-2-2b").pattern[:4] == "LGLG"


@pytest.mark.parametrize("name", NAMES)
def test_future_tokens_do_not_reach_the_past(name):
    _, model = make(name)
    first = tokens(1, 12)
    second = first.at[:, 7:].set((first[:, 7:] + 5) % 17)
    a, b = call(model, first), call(model, second)
    assert a.shape == (1, 12, 17)
    np.testing.assert_allclose(a[:, :7], b[:, :7], rtol=1e-5, atol=1e-5)
    assert float(jnp.max(jnp.abs(a[:, 7:] - b[:, 7:]))) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_mean_over_microbatches(name):
    """Loss and gradients of a batch are the means over its halves; nothing couples samples."""
    module, model = make(name)
    graph, params = nnx.split(model, nnx.Param)
    both = jax.jit(jax.value_and_grad(lambda p, t: module.loss(nnx.merge(graph, p), {"tokens": t})))
    batch = tokens(4, 9)
    whole, parts = both(params, batch), [both(params, batch[i : i + 2]) for i in (0, 2)]
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *parts)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(mean), strict=True):
        scale = float(jnp.max(jnp.abs(x))) + 1e-9
        np.testing.assert_allclose(x / scale, y / scale, rtol=0, atol=2e-5)
        assert bool(jnp.all(jnp.isfinite(x)))
    zero = [p for p, g in nnx.to_flat_state(whole[1]) if not bool(jnp.any(g[...] != 0))]
    assert not zero, f"no gradient reaches {zero}"


@pytest.mark.parametrize("name", ["nemotron_h", pytest.param("jamba", marks=pytest.mark.slow)])
def test_half_precision_follows_float32(name):
    module, config = SMALL[name]
    half = dataclasses.replace(config, dtype=jnp.bfloat16)
    losses = [
        float(module.loss(CLASSES[module](c, rngs=nnx.Rngs(0)), {"tokens": tokens(2, 9)}))
        for c in (config, half)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_residual_stream_dtype_is_as_configured():
    config = dataclasses.replace(nemotron_h.tiny(width=32, layers=2), dtype=jnp.bfloat16)
    assert config.stream_dtype == jnp.float32
    narrow = dataclasses.replace(config, residual_in_fp32=False)
    for c, expected in ((config, jnp.float32), (narrow, jnp.bfloat16)):
        model = nemotron_h.NemotronH(c, rngs=nnx.Rngs(0))
        assert model.layers[0](model.embedding(tokens(1, 4)))[0].dtype == expected


@pytest.mark.parametrize("name", ["nemotron_h", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_few_steps_learn_a_repeated_text(name):
    module, model = make(name)
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optax.adam(1e-2)
    batch = {"tokens": jnp.broadcast_to(jnp.arange(13) % 5, (2, 13))}

    @jax.jit
    def step(params, memory):
        value, gradient = jax.value_and_grad(lambda p: module.loss(nnx.merge(graph, p), batch))(
            params
        )
        change, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, change), memory, value

    memory, values = optimizer.init(params), []
    for _ in range(25):
        params, memory, value = step(params, memory)
        values.append(float(value))
    assert values[0] > 2.5  # about log(17)
    assert values[-1] < 0.5


def test_token_loss_is_stable_and_exact():
    logits, target = 1e4 * jax.random.normal(jax.random.key(0), (2, 3, 5)), jnp.ones((2, 3), int)
    expected = -jnp.mean(jax.nn.log_softmax(logits)[..., 1])
    np.testing.assert_allclose(token_loss(logits, target), expected, rtol=1e-6)
    logits = logits / 1e4
    plain = jax.grad(lambda x: -jnp.mean(jax.nn.log_softmax(x)[..., 1]))(logits)
    np.testing.assert_allclose(jax.grad(token_loss)(logits, target), plain, rtol=1e-4, atol=1e-6)


def test_bad_patterns_are_refused_by_symbol():
    with pytest.raises(ValueError, match=r"holds \['X'\].*M Mamba-2"):
        dataclasses.replace(nemotron_h.tiny(), pattern="MX-")
    with pytest.raises(ValueError, match=r"expert layers; give moe="):
        dataclasses.replace(nemotron_h.tiny(), pattern="ME")
    with pytest.raises(ValueError, match=r"unknown model 'llama-9'.*llama-3-8b"):
        llama.llama("llama-9")
