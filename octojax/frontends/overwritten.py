"""Values whose "gradient" is their new value: scales and histories of fp8 operations."""

from collections.abc import Iterable

from octojax.errors import LossError

OVERWRITTEN = "_overwrite_with_gradient"
"""The collection of fp8 scales and histories, `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`."""


def refuse_overwritten(collections: Iterable[str], names: Iterable[str] = ()) -> None:
    """Raises `LossError` if one of the collections is overwritten with its gradient.

    `names` are the variables of the model that belong to it, for the message.
    """
    if OVERWRITTEN not in collections:
        return
    listed = sorted(names)
    which = f" ({', '.join(listed[:8])}{', ...' if len(listed) > 8 else ''})" if listed else ""
    raise LossError(
        f"the model has variables of the collection {OVERWRITTEN!r}{which}: fp8 scales and "
        f"histories, whose gradient is the new value itself, joined over microbatches by max and "
        f"not by sum. A pipelined step does not carry them: train without fp8 operations"
    )
