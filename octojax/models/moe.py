"""A mixture of experts whose value does not depend on how the batch was cut.

Legend: B batch, T time, D width, F hidden width, E experts, K experts chosen per token,
C places per expert and sequence.

Routing, capacity and the balance loss are per sequence (as DeepSeek-V3's sequence-wise
loss, section 2.1.2), so a mean over microbatches equals the value of the whole batch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import ACTIVATIONS, MLP, Linear


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of one expert layer.

    `capacity_factor` None drops no token; f gives each expert `ceil(f T K / E)` places per
    sequence, and tokens beyond them pass through their other experts alone.
    `normalize` divides the chosen weights by their sum; `router` is `softmax` or `sigmoid`.
    """

    experts: int
    chosen: int
    hidden: int
    shared_hidden: int = 0
    activation: str = "swiglu"
    router: str = "softmax"
    normalize: bool = False
    weight_scale: float = 1.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"cannot choose {self.chosen} of {self.experts} experts; choose 1 to {self.experts}"
            )
        if self.router not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown router {self.router!r}; choose softmax or sigmoid")

    def places(self, time: int) -> int:
        if self.capacity_factor is None:
            return time
        fair = self.capacity_factor * time * self.chosen / self.experts
        return min(time, max(1, math.ceil(fair)))


class Routes(NamedTuple):
    """Where each token goes, and what the router's balance costs."""

    expert_BTK: jax.Array  # int32
    place_BTK: jax.Array  # int32, within the expert; >= places where the token is dropped
    weight_BTK: jax.Array  # float32
    balance: jax.Array  # scalar: E * sum_e (share of choices) * (mean probability), 1 if even


def route(logits_BTE: jax.Array, config: MoEConfig) -> Routes:
    """Returns each token's experts by probability, and its place there in order of time."""
    logits_BTE = logits_BTE.astype(jnp.float32)
    softmax = config.router == "softmax"
    scores_BTE = jax.nn.softmax(logits_BTE) if softmax else jax.nn.sigmoid(logits_BTE)
    weight_BTK, expert_BTK = jax.lax.top_k(scores_BTE, config.chosen)
    if config.normalize:
        weight_BTK = weight_BTK / (jnp.sum(weight_BTK, axis=-1, keepdims=True) + 1e-20)
    hot_BTKE = jax.nn.one_hot(expert_BTK, config.experts, dtype=jnp.int32)
    chosen_BTE = jnp.sum(hot_BTKE, axis=2)
    before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    place_BTK = jnp.take_along_axis(before_BTE, expert_BTK, axis=-1)
    share_BE = jnp.mean(chosen_BTE.astype(jnp.float32), axis=1) / config.chosen
    probability_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    product_BE = share_BE * jnp.mean(probability_BTE, axis=1)
    balance = config.experts * jnp.mean(jnp.sum(product_BE, axis=-1))
    return Routes(expert_BTK, place_BTK, weight_BTK * config.weight_scale, balance)


class MoE(nnx.Module):
    """Routed experts, plus a shared one if `shared_hidden` is not 0.

    Returns `(y_BTD, balance)`. Tokens are gathered into (B, E, C, D), so each weight is read
    by one matrix product, whose weight gradient is one matrix product too.
    """

    def __init__(
        self,
        width: int,
        config: MoEConfig,
        *,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"param_dtype": param_dtype, "rngs": rngs}
        parts, _ = ACTIVATIONS[config.activation]
        experts, hidden = config.experts, config.hidden
        self.config = config
        self.dtype = dtype
        # The router is float32 whatever the experts are: near ties decide where tokens go.
        self.router = Linear(width, experts, std=std, dtype=jnp.float32, **kinds)
        up = jax.random.normal(rngs.params(), (experts, width, parts * hidden), param_dtype)
        down = jax.random.normal(rngs.params(), (experts, hidden, width), param_dtype)
        self.up_EDF = nnx.Param(up * jnp.asarray(std, param_dtype))
        self.down_EFD = nnx.Param(down * jnp.asarray(out_std, param_dtype))
        self.shared = (
            MLP(
                width,
                config.shared_hidden,
                activation=config.activation,
                std=std,
                out_std=out_std,
                dtype=dtype,
                **kinds,
            )
            if config.shared_hidden
            else None
        )

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, self.dtype
        batch, time, width = x_BTD.shape
        places = config.places(time)
        routes = route(self.router(x_BTD), config)
        flat_BTK = routes.expert_BTK * places + routes.place_BTK
        flat_BTK = jnp.where(routes.place_BTK < places, flat_BTK, config.experts * places)
        # token_BC[e * C + c] is the token in place c of expert e; T (a row of zeros) if free.
        row_B11 = jnp.arange(batch)[:, None, None]
        token_BC = jnp.full((batch, config.experts * places + 1), time, jnp.int32)
        token_BC = token_BC.at[row_B11, flat_BTK].set(
            jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None, :, None], flat_BTK.shape)
        )[:, :-1]
        padded = jnp.pad(x_BTD.astype(dtype), ((0, 0), (0, 1), (0, 0)))
        x_BECD = jnp.take_along_axis(padded, token_BC[..., None], axis=1)
        x_BECD = x_BECD.reshape(batch, config.experts, places, width)
        activation = ACTIVATIONS[config.activation][1]
        h = activation(jnp.einsum("BECD,EDF->BECF", x_BECD, self.up_EDF[...].astype(dtype)))
        y_BECD = jnp.einsum("BECF,EFD->BECD", h, self.down_EFD[...].astype(dtype))
        y = jnp.pad(y_BECD.reshape(batch, -1, width), ((0, 0), (0, 1), (0, 0)))
        picked = jnp.take_along_axis(y, flat_BTK.reshape(batch, -1, 1), axis=1)
        picked_BTKD = picked.reshape(batch, time, config.chosen, width)
        y_BTD = jnp.einsum("BTKD,BTK->BTD", picked_BTKD, routes.weight_BTK.astype(dtype))
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, routes.balance
