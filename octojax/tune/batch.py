"""The number of microbatches as a choice, under a fixed global batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octojax.errors import CapacityError
from octojax.ir.profile import LayerCost, Profile
from octojax.tune.result import TuneResult
from octojax.tune.tuner import DEFAULT_SECONDS, tune

SCALED = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "backward_s",
    "residual_bytes",
    "weight_residual_bytes",
    "output_bytes",
)


def with_microbatches(profile: Profile, microbatches: int) -> Profile:
    """Returns the profile of the same global batch in another number of microbatches.

    Assumes that a layer's times, residuals and output are proportional to the samples in a
    microbatch; weights and state are not. Small microbatches are slower than that on real
    devices, so measure again before choosing many. Raises `ValueError` if the profile does not
    say for how many microbatches it was made.
    """
    if not profile.microbatches:
        raise ValueError(
            f"profile {profile.name!r} does not say how many microbatches its costs are for; "
            f"set 'microbatches' in it to choose among several"
        )
    share = profile.microbatches / microbatches
    layers = tuple(
        LayerCost(
            **{
                name: (
                    value * share
                    if name.endswith("_s")
                    else round(value * share)
                    if name in SCALED
                    else value
                )
                for name in LayerCost.__dataclass_fields__
                if (value := getattr(layer, name)) is not None
            }
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers, microbatches=microbatches)


def tune_microbatches(profile: Profile, offered: Sequence[int], **options: Any) -> TuneResult:
    """Returns the quickest result among the offered numbers of microbatches; see `tune`.

    A budget of `seconds` is shared out among them. Raises `CapacityError` if none fits.
    """
    if not offered or any(m < 1 for m in offered):
        raise ValueError(f"offered microbatch counts {list(offered)}: expected numbers >= 1")
    if options.get("iterations") is None:
        seconds = options.get("seconds")
        options["seconds"] = (DEFAULT_SECONDS if seconds is None else seconds) / len(offered)
    results, lacks = [], []
    for microbatches in offered:
        try:
            results.append(tune(with_microbatches(profile, microbatches), **options))
        except CapacityError as error:
            lacks.append(f"{microbatches} microbatches: {error}")
    if not results:
        raise CapacityError("\n".join(lacks))
    return min(results, key=lambda r: r.makespan_s)
