"""What `MODULE:NAME` names: a function that makes a model, or a preset of a module of models."""

import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any


def module_of(target: str) -> tuple[ModuleType, str]:
    """Returns the module of `MODULE:NAME`, imported as from the working folder, and the name.

    Raises `ValueError` if there is none.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{target!r}: expected MODULE:NAME, such as my_package.models:tiny")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{target!r}: cannot import {module_name} ({error}); run where it can be imported, "
            f"or set PYTHONPATH"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    return module, name


def is_preset(module: ModuleType, name: str) -> bool:
    """Whether a name in a module of models means one of its `PRESETS`, or may."""
    presets = getattr(module, "PRESETS", None)
    return isinstance(presets, dict) and (name in presets or not hasattr(module, name))


def load_target(target: str) -> tuple[Any, Any, Any, Any]:
    """Returns model, loss, batch and params that the function `MODULE:NAME` makes.

    Raises `ValueError` saying what was found instead.
    """
    module, name = module_of(target)
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(
            f"{target!r}: {module.__name__} has no function {name!r}; it has "
            f"{', '.join(sorted(x for x in vars(module) if not x.startswith('_'))) or 'nothing'}"
        )
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:  # ValueError: a built-in that does not say
        raise ValueError(
            f"{target!r} cannot be called without arguments ({error}); expected a function that "
            f"returns (model, loss_fn, batch[, params])"
        ) from None
    parts = make()
    if not isinstance(parts, tuple) or len(parts) not in (3, 4):
        size = f" of {len(parts)}" if isinstance(parts, tuple) else ""
        raise ValueError(
            f"{target!r} returned a {type(parts).__name__}{size}, expected "
            f"(model, loss_fn, batch) or (model, loss_fn, batch, params)"
        )
    model, loss_fn, batch, *rest = parts
    return model, loss_fn, batch, (rest[0] if rest else None)
