"""Norms, projections and feed-forward layers that keep few residuals.

Legend: B batch, T time, D width of the residual stream, F hidden width, V vocabulary.

Plain JAX code keeps every intermediate that a derivative reads. The functions here state
their derivatives, so that only what a textbook keeps is kept: the norm its input, the
activation its input.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

EPSILON = 1e-5


def keeping_inputs(core: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `core(config, *inputs)` with a backward that runs it again: of all that it computes
    only its inputs are kept. `config` is hashable and has no derivative."""
    function = jax.custom_vjp(core, nondiff_argnums=(0,))
    function.defvjp(
        lambda config, *inputs: (core(config, *inputs), inputs),
        lambda config, inputs, gradient: jax.vjp(functools.partial(core, config), *inputs)[1](
            gradient
        ),
    )
    return function


def rms_norm(
    x: jax.Array, scale: jax.Array, dtype: DTypeLike, epsilon: float = EPSILON
) -> jax.Array:
    """Returns `x / rms(x) * scale` over the last axis, computed in float32, cast to `dtype`.

    `epsilon` is added to the mean square.
    """
    return _norm(x, scale, dtype, epsilon)


def _rms_norm(x: jax.Array, scale: jax.Array, dtype: DTypeLike, epsilon: float) -> jax.Array:
    return _rms_norm_forward(x, scale, dtype, epsilon)[0]


def _row(scale: jax.Array, like: jax.Array) -> jax.Array:
    return scale.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


def _normalized(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return wide * inverse, inverse


def _rms_norm_forward(x, scale, dtype, epsilon):
    return (_normalized(x, epsilon)[0] * _row(scale, x)).astype(dtype), (x, scale)


def _rms_norm_backward(dtype, epsilon, residuals, gradient):
    del dtype
    x, scale = residuals
    hat, inverse = _normalized(x, epsilon)
    gradient = gradient.astype(jnp.float32)
    scaled = gradient * _row(scale, x)
    dx = inverse * (scaled - hat * jnp.mean(scaled * hat, axis=-1, keepdims=True))
    dscale = jnp.sum(gradient * hat, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


_norm = jax.custom_vjp(_rms_norm, nondiff_argnums=(2, 3))
_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def squared_relu(h: jax.Array) -> jax.Array:
    """Returns `max(h, 0) ** 2` (Primer); keeps `h` alone."""
    return jnp.square(jnp.maximum(h, 0))


squared_relu.defvjp(
    lambda h: (squared_relu(h), h),
    lambda h, gradient: (2 * jnp.maximum(h, 0) * gradient,),
)


def _gated(activation):
    """Returns `gated(h) = activation(first half of h) * second half`, which keeps `h` alone."""

    def plain(h):
        gate, up = jnp.split(h, 2, axis=-1)
        return activation(gate) * up

    gated = jax.custom_vjp(plain)
    gated.defvjp(lambda h: (plain(h), h), lambda h, gradient: jax.vjp(plain, h)[1](gradient))
    return gated


ACTIVATIONS = {
    "squared_relu": (1, squared_relu),
    "swiglu": (2, _gated(jax.nn.silu)),
    "geglu": (2, _gated(functools.partial(jax.nn.gelu, approximate=True))),
}
"""Name -> (how many times F the first projection makes, the function)."""


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale; its output has the layer's compute dtype.

    With `centered` the parameter is the scale's distance from 1, as Gemma keeps it.
    """

    def __init__(
        self,
        width: int,
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        epsilon: float = EPSILON,
        centered: bool = False,
    ):
        first = jnp.zeros if centered else jnp.ones
        self.scale = nnx.Param(first((width,), param_dtype))
        self.dtype, self.epsilon, self.centered = dtype, epsilon, centered

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        if self.centered:
            scale = 1 + scale.astype(jnp.float32)
        return rms_norm(x, scale, self.dtype, self.epsilon)


class Linear(nnx.Module):
    """A projection without bias: `x @ weight`, weight (inputs, outputs), normal with `std`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        draw = jax.random.normal(rngs.params(), (inputs, outputs), param_dtype)
        self.weight = nnx.Param(draw * jnp.asarray(std, param_dtype))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) @ self.weight[...].astype(self.dtype)


class MLP(nnx.Module):
    """Feed-forward layer: squared ReLU (Nemotron-H), SwiGLU (LLaMA, Jamba) or GeGLU (Gemma)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        parts, _ = ACTIVATIONS[activation]
        self.activation = activation
        self.up = Linear(width, parts * hidden, std=std, **kinds)
        self.down = Linear(hidden, width, std=out_std, **kinds)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation][1](self.up(x_BTD)))
