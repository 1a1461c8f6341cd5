"""What splitting a layer's backward costs: operations, bytes and time of F, B, I and W.

    python benchmarks/split.py [--width 256] [--tokens 512] [--repeats 30] [--only mamba2 ...]

Prints one row per layer as a Markdown table:
`units` XLA's own operation counts relative to F's (3.0 is F + B of a matmul layer);
`residual` and `kept` bytes relative to the layer's input; `I+W / B` the median of paired
times, each pair measured back to back in changing order.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from octojax.compat import is_float
from octojax.ir.action import Kind
from octojax.models.attention import Attention
from octojax.models.dense import MLP, RMSNorm
from octojax.models.mamba2 import Mamba2, Mamba2Config
from octojax.stages import (
    ForwardStage,
    Program,
    Ref,
    Role,
    Stage,
    differentiate,
    input_bytes,
    kept_bytes,
    residual_bytes,
)

Layer = Callable[[jax.Array], jax.Array]


class Residual(nnx.Module):
    """A norm, a mixer and the residual stream around them."""

    def __init__(self, width: int, mixer: nnx.Module, norm: nnx.Module):
        self.mixer, self.norm = mixer, norm

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD + self.mixer(self.norm(x_BTD))


def layers(width: int) -> dict[str, nnx.Module]:
    """Returns the layers by name, in the proportions of the published models."""
    kinds = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    init = {"std": 0.02, "out_std": 0.02, **kinds, "rngs": nnx.Rngs(0)}
    heads = max(1, width // 64)
    state = Mamba2Config(heads=2 * heads, head_dim=64, groups=1, state=width // 8, chunk=64)
    mixers = {
        "attention": Attention(width, heads, max(1, heads // 4), 64, **init),
        "swiglu": MLP(width, 4 * width, activation="swiglu", **init),
        "squared_relu": MLP(width, 4 * width, activation="squared_relu", **init),
        "mamba2": Mamba2(width, state, **init),
    }
    return {k: Residual(width, m, RMSNorm(width, **kinds)) for k, m in mixers.items()}


def middle_stage(layer: nnx.Module, x: jax.Array, recompute: bool = False) -> Stage:
    """Returns the layer as a stage between one that makes its input and one that sums."""
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree.flatten(state)

    def run(*values):
        return nnx.merge(graph, jax.tree.unflatten(tree, values[:-1]))(values[-1])

    params = [Ref(Role.PARAM, i + 1) for i in range(len(leaves))]
    stages = (
        _stage(0, lambda x: x * 1.0, [x], [Ref(Role.PARAM, 0)], Role.OUTPUT),
        _stage(1, run, [*leaves, x], [*params, Ref(Role.INPUT, 0)], Role.OUTPUT),
        _stage(2, jnp.sum, [x], [Ref(Role.INPUT, 0)], Role.EMIT),
    )
    return differentiate(stages, None, (False, recompute, False))[1]


def _stage(index, run, values, reads, role) -> ForwardStage:
    closed = jax.make_jaxpr(run)(*values)
    return ForwardStage(
        index, Program(Kind.FORWARD, closed, tuple(reads), (Ref(role, 0),)), (index,)
    )


def compiled(closed: ClosedJaxpr):
    """Returns the jaxpr compiled, and example inputs for it."""
    rng = np.random.default_rng(0)
    values = [_example(v.aval, rng) for v in closed.jaxpr.invars]
    return jax.jit(jaxpr_as_fun(closed)).lower(*values).compile(), values


def _example(aval, rng) -> jax.Array:
    if not is_float(aval):
        return jnp.zeros(aval.shape, aval.dtype)
    return jnp.asarray(rng.normal(size=aval.shape) * 0.1, aval.dtype)


def operations(program) -> float:
    """Returns XLA's operation count of a compiled program."""
    cost = program.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


def paired_ratio(fused, split, repeats: int) -> tuple[float, float]:
    """Returns the median of (split / fused) times, and the fused median in seconds."""
    ratios, seconds = [], []
    for turn in range(repeats):
        order = (fused, split) if turn % 2 else (split, fused)
        took = {id(side): _seconds(side) for side in order}
        ratios.append(took[id(split)] / took[id(fused)])
        seconds.append(took[id(fused)])
    return statistics.median(ratios), statistics.median(seconds)


def _seconds(side) -> float:
    start = time.perf_counter()
    for program, values in side:
        jax.block_until_ready(program(*values))
    return time.perf_counter() - start


def row(name: str, layer: nnx.Module, x: jax.Array, repeats: int) -> str:
    """Returns one line of the table."""
    stage, again = middle_stage(layer, x), middle_stage(layer, x, recompute=True)
    forward, backward = compiled(stage.forward.jaxpr), compiled(stage.backward.jaxpr)
    first = compiled(stage.input_grad.jaxpr)
    split = [first]
    if stage.weight_grad is not None:
        split.append(compiled(stage.weight_grad.jaxpr))
    plain = operations(compiled(again.forward.jaxpr)[0])
    fused = (operations(forward[0]) + operations(backward[0])) / plain
    apart = (operations(forward[0]) + sum(operations(p) for p, _ in split)) / plain
    redone = 1 + operations(compiled(again.backward.jaxpr)[0]) / plain
    ratio, seconds = paired_ratio([backward], split, repeats)
    size = input_bytes(stage)
    return (
        f"| {name} | {fused:.2f} | {apart:.2f} | {redone:.2f} "
        f"| {residual_bytes(stage) / size:.1f} | {kept_bytes(stage) / size:.1f} "
        f"| {1e3 * seconds:.2f} | {ratio:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    x = jnp.ones((options.tokens // 128, 128, options.width), jnp.float32)
    print(f"width {options.width}, {options.tokens} tokens, JAX {jax.__version__}")
    print("| layer | F+B units | F+I+W | recompute | residual | kept | B ms | I+W / B |")
    print("|---|---|---|---|---|---|---|---|")
    for name, layer in layers(options.width).items():
        if not options.only or name in options.only:
            print(row(name, layer, x, options.repeats), flush=True)


if __name__ == "__main__":
    main()
