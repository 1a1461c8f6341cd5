"""Which published tensors each leaf of a model is made of, by family.

Source: the names in the published folders of `meta-llama`, `google`, `ai21labs` and `nvidia`,
which `transformers` reads.
"""

from octojax.models.deepseek import DeepSeekConfig
from octojax.models.dense import ACTIVATIONS
from octojax.models.jamba import JambaConfig
from octojax.models.mamba1 import Mamba1Config
from octojax.models.moe import MoEConfig
from octojax.models.nemotron_h import NemotronHConfig
from octojax.models.qwen3_next import Qwen3NextConfig
from octojax.models.transformer import TransformerConfig
from octojax.models.weights.layout import Joined, Source, Stacked, Taps, Tensor, Transposed

Sources = dict[str, Source]
"""Path of a leaf -> where it comes from."""

Config = TransformerConfig | JambaConfig | NemotronHConfig | DeepSeekConfig | Qwen3NextConfig


def sources_of(config: Config) -> Sources:
    """Returns the published tensors of every leaf; `TypeError` for a model without such names."""
    if isinstance(config, TransformerConfig):
        return _transformer(config)
    if isinstance(config, JambaConfig):
        return _jamba(config)
    if isinstance(config, NemotronHConfig):
        return _nemotron_h(config)
    if isinstance(config, DeepSeekConfig):
        return _deepseek(config)
    if isinstance(config, Qwen3NextConfig):
        return _qwen3_next(config)
    raise TypeError(f"no published names are known for a {type(config).__name__}")


def _weight(name: str) -> Source:
    return Transposed(Tensor(f"{name}.weight"))


def _linear(path: str, name: str) -> Sources:
    return {f"{path}.weight": _weight(name)}


def _norm(path: str, name: str) -> Sources:
    return {f"{path}.scale": Tensor(f"{name}.weight")}


def _attention(
    path: str, name: str, heads: int, kv_heads: int, head_dim: int, qk_norm: bool = False
) -> Sources:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    parts = tuple(_weight(f"{name}.{which}_proj") for which in "qkv")
    leaves: Sources = {f"{path}.qkv.weight": Joined(parts, sizes)}
    leaves |= _linear(f"{path}.out", f"{name}.o_proj")
    if qk_norm:
        leaves |= _norm(f"{path}.q_norm", f"{name}.q_norm")
        leaves |= _norm(f"{path}.k_norm", f"{name}.k_norm")
    return leaves


def _up(name: str, hidden: int, activation: str) -> Source:
    if ACTIVATIONS[activation][0] == 1:
        return _weight(f"{name}.up_proj")
    gate, up = _weight(f"{name}.gate_proj"), _weight(f"{name}.up_proj")
    return Joined((gate, up), (hidden, hidden))


def _mlp(path: str, name: str, hidden: int, activation: str) -> Sources:
    up: Sources = {f"{path}.up.weight": _up(name, hidden, activation)}
    return up | _linear(f"{path}.down", f"{name}.down_proj")


def _experts(path: str, name: str, moe: MoEConfig, router: str, shared: str) -> Sources:
    each = [f"{name}.experts.{i}" for i in range(moe.experts)]
    ups = tuple(_up(one, moe.hidden, moe.activation) for one in each)
    leaves: Sources = {
        f"{path}.up_EDF": Stacked(ups),
        f"{path}.down_EFD": Stacked(tuple(_weight(f"{one}.down_proj") for one in each)),
    }
    leaves |= _linear(f"{path}.router", f"{name}.{router}")
    if moe.router_bias:
        leaves[f"{path}.bias_E"] = Tensor(f"{name}.{router}.e_score_correction_bias")
    if moe.shared_hidden:
        leaves |= _mlp(f"{path}.shared", f"{name}.{shared}", moe.shared_hidden, moe.activation)
    if moe.shared_gate:
        leaves |= _linear(f"{path}.shared_gate", f"{name}.{shared}_gate")
    return leaves


def _ends(embedding: str, norm: str, tied: bool = False) -> Sources:
    leaves: Sources = {"embedding.table": Tensor(f"{embedding}.weight")}
    leaves |= _norm("head.norm", norm)
    return leaves if tied else leaves | _linear("head.project", "lm_head")


def _transformer(config: TransformerConfig) -> Sources:
    leaves = _ends("model.embed_tokens", "model.norm", config.tied)
    sizes = config.heads, config.kv_heads, config.head_dim
    second = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
    for i in range(config.layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        leaves |= _norm(f"{path}.attention_norm", f"{name}.input_layernorm")
        leaves |= _attention(f"{path}.attention", f"{name}.self_attn", *sizes, config.qk_norm)
        leaves |= _norm(f"{path}.mlp_norm", f"{name}.{second}")
        leaves |= _mlp(f"{path}.mlp", f"{name}.mlp", config.hidden, config.activation)
        if config.post_norm:
            after = f"{name}.post_attention_layernorm", f"{name}.post_feedforward_layernorm"
            leaves |= _norm(f"{path}.attention_post_norm", after[0])
            leaves |= _norm(f"{path}.mlp_post_norm", after[1])
    return leaves


def _mamba_1(path: str, name: str) -> Sources:
    leaves: Sources = {
        f"{path}.conv_weight": Taps(f"{name}.conv1d.weight"),
        f"{path}.conv_bias": Tensor(f"{name}.conv1d.bias"),
        f"{path}.dt_bias": Tensor(f"{name}.dt_proj.bias"),
        f"{path}.a_log": Tensor(f"{name}.A_log"),
        f"{path}.skip": Tensor(f"{name}.D"),
        f"{path}.dt_scale": Tensor(f"{name}.dt_layernorm.weight"),
        f"{path}.b_scale": Tensor(f"{name}.b_layernorm.weight"),
        f"{path}.c_scale": Tensor(f"{name}.c_layernorm.weight"),
    }
    pairs = (("into", "in_proj"), ("select", "x_proj"), ("dt", "dt_proj"), ("out", "out_proj"))
    for ours, theirs in pairs:
        leaves |= _linear(f"{path}.{ours}", f"{name}.{theirs}")
    return leaves


def _mamba_2(path: str, name: str) -> Sources:
    leaves: Sources = {
        f"{path}.conv_weight": Taps(f"{name}.conv1d.weight"),
        f"{path}.conv_bias": Tensor(f"{name}.conv1d.bias"),
        f"{path}.dt_bias": Tensor(f"{name}.dt_bias"),
        f"{path}.a_log": Tensor(f"{name}.A_log"),
        f"{path}.skip": Tensor(f"{name}.D"),
        f"{path}.scale": Tensor(f"{name}.norm.weight"),
    }
    leaves |= _linear(f"{path}.into", f"{name}.in_proj")
    return leaves | _linear(f"{path}.out", f"{name}.out_proj")


def _jamba(config: JambaConfig) -> Sources:
    if not isinstance(config.mamba, Mamba1Config):
        raise TypeError("published Jambas have Mamba-1 mixers; this configuration has Mamba-2")
    leaves = _ends("model.embed_tokens", "model.final_layernorm")
    sizes = config.heads, config.kv_heads, config.head_dim
    for i in range(config.layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        leaves |= _norm(f"{path}.mixer_norm", f"{name}.input_layernorm")
        leaves |= _norm(f"{path}.feed_forward_norm", f"{name}.pre_ff_layernorm")
        if config.attends(i):
            leaves |= _attention(f"{path}.mixer", f"{name}.self_attn", *sizes)
        else:
            leaves |= _mamba_1(f"{path}.mixer", f"{name}.mamba")
        half = f"{path}.feed_forward", f"{name}.feed_forward"
        if config.routes(i):
            leaves |= _experts(*half, config.moe, "router", "shared_expert")
        else:
            leaves |= _mlp(*half, config.hidden, "swiglu")
    return leaves


def _nemotron_h(config: NemotronHConfig) -> Sources:
    leaves = _ends("backbone.embeddings", "backbone.norm_f")
    sizes = config.heads, config.kv_heads, config.head_dim
    for i, symbol in enumerate(config.pattern):
        path, name = f"layers.{i}.mixer", f"backbone.layers.{i}.mixer"
        leaves |= _norm(f"layers.{i}.norm", f"backbone.layers.{i}.norm")
        if symbol == "M":
            leaves |= _mamba_2(path, name)
        elif symbol == "*":
            leaves |= _attention(path, name, *sizes)
        elif symbol == "-":
            leaves |= _mlp(path, name, config.hidden, "squared_relu")
        else:
            assert config.moe is not None
            leaves |= _experts(path, name, config.moe, "gate", "shared_experts")
    return leaves


_LATENT = {
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "key_down": "kv_a_proj_with_mqa",
    "key_up": "kv_b_proj",
    "out": "o_proj",
}


def _deepseek(config: DeepSeekConfig) -> Sources:
    leaves = _ends("model.embed_tokens", "model.norm")
    for i in range(config.layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        leaves |= _norm(f"{path}.attention_norm", f"{name}.input_layernorm")
        leaves |= _norm(f"{path}.feed_forward_norm", f"{name}.post_attention_layernorm")
        for ours, theirs in _LATENT.items():
            leaves |= _linear(f"{path}.attention.{ours}", f"{name}.self_attn.{theirs}")
        leaves |= _norm(f"{path}.attention.query_norm", f"{name}.self_attn.q_a_layernorm")
        leaves |= _norm(f"{path}.attention.key_norm", f"{name}.self_attn.kv_a_layernorm")
        half = f"{path}.feed_forward", f"{name}.mlp"
        if i < config.dense:
            leaves |= _mlp(*half, config.hidden, "swiglu")
        else:
            leaves |= _experts(*half, config.moe, "gate", "shared_experts")
    return leaves


def _gated_delta(path: str, name: str) -> Sources:
    leaves: Sources = {
        f"{path}.conv_weight": Taps(f"{name}.conv1d.weight"),
        f"{path}.dt_bias": Tensor(f"{name}.dt_bias"),
        f"{path}.a_log": Tensor(f"{name}.A_log"),
    }
    leaves |= _norm(f"{path}.norm", f"{name}.norm")
    leaves |= _linear(f"{path}.into", f"{name}.in_proj_qkvz")
    leaves |= _linear(f"{path}.rates", f"{name}.in_proj_ba")
    return leaves | _linear(f"{path}.out", f"{name}.out_proj")


def _qwen3_next(config: Qwen3NextConfig) -> Sources:
    leaves = _ends("model.embed_tokens", "model.norm")
    for i in range(config.layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        leaves |= _norm(f"{path}.mixer_norm", f"{name}.input_layernorm")
        leaves |= _norm(f"{path}.experts_norm", f"{name}.post_attention_layernorm")
        if config.attends(i):
            pairs = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj"))
            for ours, theirs in pairs:
                leaves |= _linear(f"{path}.mixer.{ours}", f"{name}.self_attn.{theirs}")
            leaves |= _norm(f"{path}.mixer.q_norm", f"{name}.self_attn.q_norm")
            leaves |= _norm(f"{path}.mixer.k_norm", f"{name}.self_attn.k_norm")
        else:
            leaves |= _gated_delta(f"{path}.mixer", f"{name}.linear_attn")
        leaves |= _experts(f"{path}.experts", f"{name}.mlp", config.moe, "gate", "shared_expert")
    return leaves
