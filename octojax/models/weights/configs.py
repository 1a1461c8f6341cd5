"""From a published `config.json` to a configuration of this package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octojax.models.deepseek import DeepSeekConfig
from octojax.models.delta import DeltaConfig
from octojax.models.jamba import JambaConfig
from octojax.models.latent import LatentConfig
from octojax.models.mamba1 import Mamba1Config
from octojax.models.mamba2 import Mamba2Config
from octojax.models.moe import MoEConfig
from octojax.models.nemotron_h import NemotronHConfig
from octojax.models.qwen3_next import Qwen3NextConfig
from octojax.models.rotary import Smoothing
from octojax.models.transformer import TransformerConfig
from octojax.models.weights.names import Config

Raw = Mapping[str, Any]


def config_of(folder: str | Path) -> Config:
    """Returns the configuration of a folder's `config.json`.

    Raises `FileNotFoundError` without one, and `ValueError` as `config_from` does.
    """
    return config_from(json.loads((Path(folder) / "config.json").read_text()))


def config_from(raw: Raw) -> Config:
    """Returns the configuration of a published one; parameters are float32.

    Raises `ValueError` for a family that is not here, and for options that our models lack.
    """
    kind = raw.get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(f"unknown model_type {kind!r}; known are {', '.join(sorted(_FAMILIES))}")
    lacking = [
        name
        for name in (
            "attention_bias",
            "mlp_bias",
            "use_bias",
            "mamba_proj_bias",
            "moe_latent_size",
            "num_nextn_predict_layers",
        )
        if raw.get(name)
    ]
    if lacking:
        raise ValueError(f"options that a {kind} has here only switched off: {', '.join(lacking)}")
    try:
        return _FAMILIES[kind](raw)
    except KeyError as error:
        raise ValueError(f"the configuration of a {kind} lacks {error.args[0]!r}") from None


def _heads(raw: Raw) -> dict[str, Any]:
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    return {
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "width": raw["hidden_size"],
        "hidden": raw["intermediate_size"],
        "vocabulary": raw["vocab_size"],
    }


def _rope(raw: Raw, kind: str | None = None) -> tuple[float | None, Raw]:
    """Returns base and scaling, wherever this version of the file has them."""
    both = raw.get("rope_parameters") or {}
    rope = both.get(kind, both) if kind else both
    scaling = raw.get("rope_scaling") or rope
    return rope.get("rope_theta", raw.get("rope_theta")), scaling


def _stretch(scaling: Raw) -> float:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"unknown rope_type {kind!r}; known are default, linear and llama3")
    return 1.0 if kind == "default" else scaling["factor"]


def _llama(raw: Raw) -> TransformerConfig:
    base, scaling = _rope(raw)
    smoothing = None
    if scaling.get("rope_type") == "llama3":
        smoothing = Smoothing(
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
    return TransformerConfig(
        layers=raw["num_hidden_layers"],
        **_heads(raw),
        rope_base=10_000.0 if base is None else base,
        rope_stretch=_stretch(scaling),
        rope_smoothing=smoothing,
        tied=raw.get("tie_word_embeddings", False),
        epsilon=raw["rms_norm_eps"],
    )


def _gemma(raw: Raw) -> TransformerConfig:
    third = raw["model_type"] != "gemma2"
    layers = raw["num_hidden_layers"]
    period = raw.get("sliding_window_pattern") or (6 if third else 2)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
    ]
    base, scaling = _rope(raw, "full_attention")
    local = _rope(raw, "sliding_attention")[0] if raw.get("rope_parameters") else None
    return TransformerConfig(
        layers=layers,
        **_heads(raw),
        activation="geglu",
        tied=raw.get("tie_word_embeddings", True),
        scale_embedding=True,
        post_norm=True,
        centered_norm=True,
        qk_norm=third,
        window=raw["sliding_window"],
        period=layers,
        global_at=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        rope_base=base or (1e6 if third else 1e4),
        local_rope_base=local or raw.get("rope_local_base_freq") or 1e4,
        rope_stretch=_stretch(scaling),
        epsilon=raw["rms_norm_eps"],
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        attention_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
    )


def _jamba(raw: Raw) -> JambaConfig:
    width = raw["hidden_size"]
    rank = raw.get("mamba_dt_rank", "auto")
    return JambaConfig(
        layers=raw["num_hidden_layers"],
        **_heads(raw),
        mamba=Mamba1Config(
            inner=raw["mamba_expand"] * width,
            state=raw["mamba_d_state"],
            dt_rank=-(-width // 16) if rank == "auto" else rank,
            conv=raw["mamba_d_conv"],
        ),
        moe=MoEConfig(
            experts=raw["num_experts"],
            chosen=raw["num_experts_per_tok"],
            hidden=raw["intermediate_size"],
        ),
        attention_every=raw["attn_layer_period"],
        attention_at=raw["attn_layer_offset"],
        experts_every=raw["expert_layer_period"],
        experts_at=raw["expert_layer_offset"],
        balance_weight=raw.get("router_aux_loss_coef", 1e-3),
        epsilon=raw["rms_norm_eps"],
    )


def _routed(raw: Raw, **options: Any) -> MoEConfig:
    """Experts in groups, chosen by sigmoids with a bias: those of DeepSeek-V3 and Nemotron-3."""
    return MoEConfig(
        experts=raw["n_routed_experts"],
        chosen=raw["num_experts_per_tok"],
        hidden=raw["moe_intermediate_size"],
        router="sigmoid",
        normalize=raw["norm_topk_prob"],
        weight_scale=raw["routed_scaling_factor"],
        router_bias=True,
        groups=raw["n_group"],
        chosen_groups=raw["topk_group"],
        **options,
    )


_SYMBOLS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _nemotron_h(raw: Raw) -> NemotronHConfig:
    pattern = raw.get("hybrid_override_pattern")
    if pattern is None:
        kinds = raw.get("layers_block_type") or raw["layer_types"]
        pattern = "".join(_SYMBOLS[kind] for kind in kinds)
    moe = None
    if "E" in pattern:
        shared = raw["moe_shared_expert_intermediate_size"]
        moe = _routed(raw, shared_hidden=shared, activation="squared_relu")
    return NemotronHConfig(
        pattern=pattern,
        **_heads(raw),
        mamba=Mamba2Config(
            heads=raw["mamba_num_heads"],
            head_dim=raw["mamba_head_dim"],
            groups=raw["n_groups"],
            state=raw["ssm_state_size"],
            conv=raw["conv_kernel"],
            chunk=raw["chunk_size"],
            epsilon=raw["layer_norm_epsilon"],
        ),
        moe=moe,
        residual_in_fp32=raw.get("residual_in_fp32", False),
        epsilon=raw["layer_norm_epsilon"],
    )


def _deepseek(raw: Raw) -> DeepSeekConfig:
    base, scaling = _rope(raw)
    if _stretch(scaling) != 1.0 or not raw.get("rope_interleave", True):
        raise ValueError("a DeepSeek-V3 has here only plain, interleaved positions")
    return DeepSeekConfig(
        layers=raw["num_hidden_layers"],
        dense=raw["first_k_dense_replace"],
        width=raw["hidden_size"],
        hidden=raw["intermediate_size"],
        attention=LatentConfig(
            heads=raw["num_attention_heads"],
            query_rank=raw["q_lora_rank"],
            key_rank=raw["kv_lora_rank"],
            plain=raw["qk_nope_head_dim"],
            turning=raw["qk_rope_head_dim"],
            value=raw["v_head_dim"],
        ),
        moe=_routed(
            raw,
            shared_hidden=raw["moe_intermediate_size"] * raw["n_shared_experts"],
            method="ragged",
        ),
        vocabulary=raw["vocab_size"],
        rope_base=10_000.0 if base is None else base,
        epsilon=raw["rms_norm_eps"],
    )


def _qwen3_next(raw: Raw) -> Qwen3NextConfig:
    base, scaling = _rope(raw)
    every = raw.get("full_attention_interval") or 4
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    expected = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if (kinds and kinds != expected) or raw.get("mlp_only_layers") or _stretch(scaling) != 1.0:
        raise ValueError(
            f"a Qwen3-Next has here attention in every {every}th layer, experts in all, and plain "
            f"positions"
        )
    part = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 0.25
    return Qwen3NextConfig(
        layers=layers,
        width=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        delta=DeltaConfig(
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            conv=raw["linear_conv_kernel_dim"],
        ),
        moe=MoEConfig(
            experts=raw["num_experts"],
            chosen=raw["num_experts_per_tok"],
            hidden=raw["moe_intermediate_size"],
            shared_hidden=raw["shared_expert_intermediate_size"],
            shared_gate=True,
            normalize=raw["norm_topk_prob"],
            method="ragged",
        ),
        vocabulary=raw["vocab_size"],
        attention_every=every,
        rope_base=10_000.0 if base is None else base,
        rope_part=part,
        epsilon=raw["rms_norm_eps"],
    )


_FAMILIES = {
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek,
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
}
