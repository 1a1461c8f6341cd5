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
    `router_bias` adds a bias that is no parameter to the scores when experts are chosen, not to
    their weights (DeepSeek-V3, section 2.1.2). Of `groups` of experts those `chosen_groups`
    whose two best scores have the largest sum are eligible. `shared_gate` weighs the shared
    expert by the sigmoid of a projection (Qwen). `method` is `places`, which computes every
    expert's places whether they are taken or not, or `ragged`, which sorts tokens by expert
    (`jax.lax.ragged_dot`); both give the same values.
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
    router_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    shared_gate: bool = False
    method: str = "places"

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"cannot choose {self.chosen} of {self.experts} experts; choose 1 to {self.experts}"
            )
        if self.router not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown router {self.router!r}; choose softmax or sigmoid")
        if self.method not in ("places", "ragged"):
            raise ValueError(f"unknown method {self.method!r}; choose places or ragged")
        if not 1 <= self.chosen_groups <= self.groups or self.experts % self.groups:
            raise ValueError(
                f"cannot choose {self.chosen_groups} of {self.groups} groups of {self.experts} "
                f"experts; groups must divide the experts, and 1 to {self.groups} be chosen"
            )
        eligible = self.experts // self.groups * self.chosen_groups
        if self.groups > 1 and (self.experts // self.groups < 2 or eligible < self.chosen):
            raise ValueError(
                f"{self.groups} groups of {self.experts // self.groups} experts, "
                f"{self.chosen_groups} of them chosen, leave {eligible} experts for "
                f"{self.chosen} choices; groups of two or more, and as many experts as choices"
            )
        if self.shared_gate and not self.shared_hidden:
            raise ValueError("shared_gate weighs a shared expert; give shared_hidden")

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


class RouterBias(nnx.Variable):
    """A bias on the choice of experts: module state, which balances them without a gradient."""


def _eligible(choice_BTE: jax.Array, config: MoEConfig) -> jax.Array:
    """Returns the scores with those of groups that are not chosen at minus infinity."""
    grouped = choice_BTE.reshape(*choice_BTE.shape[:2], config.groups, -1)
    best_BTG = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    group_BTK = jax.lax.top_k(best_BTG, config.chosen_groups)[1]
    open_BTG = jnp.sum(jax.nn.one_hot(group_BTK, config.groups, dtype=jnp.int32), axis=2) > 0
    return jnp.where(open_BTG[..., None], grouped, -jnp.inf).reshape(choice_BTE.shape)


def route(logits_BTE: jax.Array, config: MoEConfig, bias_E: jax.Array | None = None) -> Routes:
    """Returns each token's experts by probability, and its place there in order of time."""
    logits_BTE = logits_BTE.astype(jnp.float32)
    softmax = config.router == "softmax"
    scores_BTE = jax.nn.softmax(logits_BTE) if softmax else jax.nn.sigmoid(logits_BTE)
    if bias_E is None and config.groups == 1:
        weight_BTK, expert_BTK = jax.lax.top_k(scores_BTE, config.chosen)
    else:
        choice_BTE = jax.lax.stop_gradient(scores_BTE)
        if bias_E is not None:
            choice_BTE = choice_BTE + bias_E[None, None]
        if config.groups > 1:
            choice_BTE = _eligible(choice_BTE, config)
        expert_BTK = jax.lax.top_k(choice_BTE, config.chosen)[1]
        weight_BTK = jnp.take_along_axis(scores_BTE, expert_BTK, axis=-1)
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

    Returns `(y_BTD, balance)`.
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
        self.bias_E = RouterBias(jnp.zeros((experts,))) if config.router_bias else None
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
        gate = config.shared_gate
        self.shared_gate = Linear(width, 1, std=std, dtype=dtype, **kinds) if gate else None

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        bias_E = None if self.bias_E is None else self.bias_E[...]
        routes = route(self.router(x_BTD), self.config, bias_E)
        compute = _by_ragged_products if self.config.method == "ragged" else _by_places
        weights = (self.up_EDF[...].astype(self.dtype), self.down_EFD[...].astype(self.dtype))
        y_BTD = compute(x_BTD.astype(self.dtype), routes, *weights, self.config)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * jax.nn.sigmoid(self.shared_gate(x_BTD))
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routes.balance


def _by_places(
    x_BTD: jax.Array, routes: Routes, up_EDF: jax.Array, down_EFD: jax.Array, config: MoEConfig
) -> jax.Array:
    """Returns the weighted sum of the chosen experts, computed on (B, E, C, D).

    Each weight is read by one matrix product, whose weight gradient is one matrix product too.
    """
    batch, time, width = x_BTD.shape
    places = config.places(time)
    flat_BTK = routes.expert_BTK * places + routes.place_BTK
    flat_BTK = jnp.where(routes.place_BTK < places, flat_BTK, config.experts * places)
    # token_BC[e * C + c] is the token in place c of expert e; T (a row of zeros) if free.
    row_B11 = jnp.arange(batch)[:, None, None]
    token_BC = jnp.full((batch, config.experts * places + 1), time, jnp.int32)
    token_BC = token_BC.at[row_B11, flat_BTK].set(
        jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None, :, None], flat_BTK.shape)
    )[:, :-1]
    padded = jnp.pad(x_BTD, ((0, 0), (0, 1), (0, 0)))
    x_BECD = jnp.take_along_axis(padded, token_BC[..., None], axis=1)
    x_BECD = x_BECD.reshape(batch, config.experts, places, width)
    activation = ACTIVATIONS[config.activation][1]
    h = activation(jnp.einsum("BECD,EDF->BECF", x_BECD, up_EDF))
    y_BECD = jnp.einsum("BECF,EFD->BECD", h, down_EFD)
    y = jnp.pad(y_BECD.reshape(batch, -1, width), ((0, 0), (0, 1), (0, 0)))
    picked = jnp.take_along_axis(y, flat_BTK.reshape(batch, -1, 1), axis=1)
    picked_BTKD = picked.reshape(batch, time, config.chosen, width)
    return jnp.einsum("BTKD,BTK->BTD", picked_BTKD, routes.weight_BTK.astype(x_BTD.dtype))


def _by_ragged_products(
    x_BTD: jax.Array, routes: Routes, up_EDF: jax.Array, down_EFD: jax.Array, config: MoEConfig
) -> jax.Array:
    """Returns the same sum, computed on the N = T K choices of a sequence, sorted by expert.

    No place stays free and nothing of size E C is built; choices beyond the capacity go last,
    where they belong to no expert. Sequences come one after the other, so that none meets
    another's tokens.
    """
    time = x_BTD.shape[1]
    activation = ACTIVATIONS[config.activation][1]

    def sequence(inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x_TD, expert_TK, place_TK, weight_TK = inputs
        kept_N = (place_TK < config.places(time)).reshape(-1)
        expert_N = jnp.where(kept_N, expert_TK.reshape(-1), config.experts)
        order_N = jnp.argsort(expert_N, stable=True)
        rows_E = jnp.sum(jax.nn.one_hot(expert_N, config.experts, dtype=jnp.int32), axis=0)
        x_ND = jnp.take(x_TD, order_N // config.chosen, axis=0, mode="clip")
        h_NF = activation(jax.lax.ragged_dot(x_ND, up_EDF, rows_E))
        y_ND = jax.lax.ragged_dot(h_NF, down_EFD, rows_E)
        y_ND = jnp.take(y_ND, jnp.argsort(order_N), axis=0, mode="clip")
        y_TKD = jnp.where(kept_N[:, None], y_ND, 0).reshape(time, config.chosen, -1)
        return jnp.einsum("TKD,TK->TD", y_TKD, weight_TK.astype(x_TD.dtype))

    return jax.lax.map(sequence, (x_BTD, routes.expert_BTK, routes.place_BTK, routes.weight_BTK))
