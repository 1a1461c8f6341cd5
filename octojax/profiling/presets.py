"""Models by name: a preset of a module of models, of which nothing is made."""

import inspect
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import Any

KINDS = (
    ("mamba1", "mamba1"),
    ("mamba2", "mamba2"),
    ("delta", "delta"),
    ("attention", "attention"),
    ("moe", "moe"),
    ("mlp", "mlp"),
)
"""Words in the name of a module's class, and the kind of layer that it makes; mixers come first."""
_ORDER = tuple(kind for _, kind in KINDS)

DIVIDED = ("heads", "hidden", "shared_hidden", "experts", "inner", "key_heads", "value_heads")
"""Fields of a configuration, at any depth, that the tensor axis divides; `kv_heads` it may also
be a multiple of (each is copied then), and `groups` those of Mamba-2 alone."""


@dataclass(frozen=True)
class Preset:
    """A configuration with its model class, `model(config, rngs=...)`, and its loss."""

    name: str
    config: Any
    model: Callable[..., Any]
    loss: Callable[..., Any]

    def make(self) -> Any:
        """Makes the model; to be called inside a trace alone."""
        from flax import nnx

        return self.model(self.config, rngs=nnx.Rngs(0))

    def shortened(self) -> tuple["Preset", tuple[int, ...]]:
        """Returns the preset with as few layers as have one of each letter of the pattern between
        two others, and for every layer of this preset the one like it there.

        The first and the last layer stay what they are: they are cut beside embedding and head.
        """
        pattern = pattern_of(self.config)
        if pattern is None:
            return self, tuple(range(self.config.layers))
        short = _shortest(self.config, pattern)
        last = len(pattern) - 1
        places = tuple(
            0 if at == 0 else len(short) - 1 if at == last else 1 + short[1:-1].rindex(letter)
            for at, letter in enumerate(pattern)
        )
        changes = {"pattern": short} if "pattern" in _names(self.config) else {"layers": len(short)}
        return replace(self, config=replace(self.config, **changes)), places

    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers (`mamba2`, `attention+moe`), embedding first, head last."""
        from flax import nnx

        model = nnx.eval_shape(self.make)
        return ("embedding", *map(_kind, model.layers), "head+loss")

    def expect_divisible(self, tensor: int, whole: Collection[str] = ()) -> None:
        """Raises `ValueError` naming all sizes that a tensor axis does not divide.

        Fields named in `whole` stay whole on every device, and need not be divided.
        """
        wrong = [
            f"{path} = {value}"
            for path, value in _sizes(self.config)
            if path.rpartition(".")[2] not in whole
            and value % tensor
            and not (path.endswith("kv_heads") and tensor % value == 0)
        ]
        if wrong:
            raise ValueError(
                f"{self.name}: a tensor axis of {tensor} does not divide {', '.join(wrong)}. "
                f"Choose a divisor of all"
            )


def find_preset(
    module: ModuleType,
    name: str,
    *,
    layers: int | None = None,
    pattern: str | None = None,
    dtype: str | None = None,
) -> Preset:
    """Returns the preset `name` of a module that has `PRESETS` and a `loss` whose first argument
    is annotated with the class of the model.

    `layers` and `pattern` replace the configuration's, `dtype` that of arithmetic and parameters.
    Raises `ValueError` for an unknown name, suggesting another, and for a pattern of another
    length or with unknown letters.
    """
    presets = module.PRESETS
    if name not in presets:
        near = get_close_matches(name, presets, 1, 0.4)
        hint = f", did you mean {near[0]}?" if near else "."
        raise ValueError(
            f"{module.__name__} has no preset {name!r}{hint} It has {', '.join(presets)}"
        )
    config = _with_layers(name, presets[name](), layers, pattern)
    if dtype is not None:
        kept = _dtype(dtype)
        config = replace(config, dtype=kept, param_dtype=kept)
    hints = typing.get_type_hints(module.loss)
    model = hints[next(iter(inspect.signature(module.loss).parameters))]
    return Preset(name, config, model, module.loss)


def pattern_of(config: Any) -> str | None:
    """Returns one letter per layer of a configuration; None if it does not say."""
    own = getattr(config, "pattern", None)
    return own if isinstance(own, str) else None


def _shortest(config: Any, pattern: str) -> str:
    """The shortest pattern of a configuration with the pattern's first and last letter, and all
    of its letters in between."""
    inner = set(pattern[1:-1])
    if "pattern" in _names(config):
        short = pattern[:1] + "".join(sorted(inner, key=pattern.index)) + pattern[1:][-1:]
        return short if len(short) < len(pattern) else pattern
    for layers in range(2, len(pattern)):
        short = str(pattern_of(replace(config, layers=layers)))
        if set(short[1:-1]) == inner and short[0] + short[-1] == pattern[0] + pattern[-1]:
            return short
    return pattern


def _names(config: Any) -> set[str]:
    return {field.name for field in fields(config)}


def _with_layers(name: str, config: Any, layers: int | None, pattern: str | None) -> Any:
    """The configuration of so many layers, or with those of the pattern."""
    if "pattern" not in _names(config):
        if layers is not None:
            config = replace(config, layers=layers)
        if pattern is not None and pattern != pattern_of(config):
            own = pattern_of(config) or "no pattern"
            raise ValueError(
                f"{name}: pattern {pattern!r} ({len(pattern)} layers); that of its "
                f"{config.layers} layers is {own!r}, which follows from the configuration: choose "
                f"--layers alone"
            )
        return config
    if pattern is None:
        if layers is not None and layers != len(config.pattern):
            raise ValueError(
                f"{name}: {layers} layers, and its pattern {config.pattern!r} has "
                f"{len(config.pattern)}. Give the pattern of {layers} layers with --pattern"
            )
        return config
    wanted = len(config.pattern) if layers is None else layers
    if len(pattern) != wanted:
        raise ValueError(
            f"{name}: pattern {pattern!r} has {len(pattern)} layers, expected {wanted}. If that is "
            f"meant, say --layers {len(pattern)}"
        )
    return replace(config, pattern=pattern)


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype {name!r}: expected bfloat16, float16 or float32")
    return dtype


def _sizes(config: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Everything that a tensor axis divides, by its path in the configuration."""
    for field in fields(config):
        value, where = getattr(config, field.name), f"{path}{field.name}"
        if is_dataclass(value):
            yield from _sizes(value, f"{where}.")
        elif value and (
            field.name in (*DIVIDED, "kv_heads")
            or (field.name == "groups" and path.endswith("mamba."))
        ):
            yield where, value


def _kind(layer: Any) -> str:
    """`attention+moe` of a layer whose parts are an `Attention` and a `MoE`; norms do not count."""
    parts = [type(part).__name__.lower() for part in vars(layer).values() if _is_module(part)]
    parts = [part for part in parts if not part.endswith("norm")]
    words = [next((kind for word, kind in KINDS if word in part), part) for part in parts]
    words.sort(key=lambda word: _ORDER.index(word) if word in _ORDER else 0)
    return "+".join(words) or type(layer).__name__.lower()


def _is_module(value: Any) -> bool:
    from flax import nnx

    return isinstance(value, nnx.Module)
