"""Makes `tests/data/parity/`: small models of the reference implementation and their logits.

    pip install torch transformers
    python tests/data/make_parity.py

One `NAME.safetensors` per case, as `save_pretrained` writes it (published names, one tensor per
expert), with `tokens` and `logits` beside the weights, and the configuration and the version in
its metadata. Weights are random and large enough that every part shows in the logits; models
are float32 and run on the CPU without kernels.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

WIDTH, VOCABULARY, LENGTH = 16, 24, 13
SIZES = {
    "hidden_size": WIDTH,
    "vocab_size": VOCABULARY,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**SIZES, "query_pre_attn_scalar": 5, "sliding_window": 5}
MAMBA = {
    "ssm_state_size": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "chunk_size": 5,
    "expand": 1,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
CASES = {
    "llama-3": (
        "Llama",
        {**SIZES, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama-3.1": (
        "Llama",
        {**SIZES, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA_3_1},
    ),
    "gemma-2": ("Gemma2", {**GEMMA, "num_hidden_layers": 2, "attn_logit_softcapping": 1.0,
                           "final_logit_softcapping": 3.0}),
    "gemma-3": (
        "Gemma3Text",
        {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 2,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "jamba": (
        "Jamba",
        {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "num_hidden_layers": 3,
         "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3,
         "attn_layer_offset": 2, "mamba_d_state": 3, "mamba_dt_rank": 2, "mamba_expand": 2},
    ),
    "nemotron-h": ("NemotronH", {**SIZES, **MAMBA, "hybrid_override_pattern": "M-*-M"}),
    "nemotron-h-experts": (
        "NemotronH",
        {**SIZES, **MAMBA, "hybrid_override_pattern": "ME*E", "n_routed_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 3, "topk_group": 2,
         "moe_shared_expert_intermediate_size": 12, "routed_scaling_factor": 2.5},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**SIZES, "head_dim": 8, "num_hidden_layers": 2, "full_attention_interval": 2,
         "layer_types": ["linear_attention", "full_attention"],
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
         "shared_expert_intermediate_size": 6, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                             "partial_rotary_factor": 0.25}},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "num_hidden_layers": 2,
         "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 8,
         "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
         "v_head_dim": 5, "num_mtp_layers": 0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
}  # fmt: skip


def draw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns random values of a size at which the part matters and nothing saturates."""
    values = torch.randn(tensor.shape, generator=generator)
    if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
        return 0.5 * values
    if name.endswith("norm.weight") or "norm" in name:
        return tensor + 0.3 * values
    if name.endswith("correction_bias"):
        return 0.2 * values
    if tensor.ndim < 2:
        return 0.5 * values
    return values / tensor.shape[-1] ** 0.5


def make(name: str, folder: Path) -> None:
    family, options = CASES[name]
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = "eager"
    cls = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    model = cls(config).float().eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        kept = [*model.named_parameters(), *model.named_buffers()]
        for key, tensor in kept:
            if "inv_freq" not in key and "embed_scale" not in key:
                tensor.copy_(draw(key, tensor, generator))
        tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        logits = model(tokens, use_cache=False).logits
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        tensors = load_file(Path(place) / "model.safetensors")
        raw = json.loads((Path(place) / "config.json").read_text())
    tensors |= {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}
    about = {"config": json.dumps(raw), "made_with": f"transformers {transformers.__version__}"}
    save_file(tensors, folder / f"{name}.safetensors", about)
    print(f"{name}: {len(tensors)} tensors, logits up to {logits.abs().max():.3f}")


if __name__ == "__main__":
    target = Path(__file__).parent / "parity"
    target.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        make(case, target)
