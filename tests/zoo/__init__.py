"""Small models with losses and batches, one per thing that a real loss contains.

    from tests.zoo import CASES
    case = CASES["tied-lm"]()
    pure = case.pure()                      # PureLoss(fn, params, state, merge)
    batch = case.batch(8)                   # 8 samples along axis 0 of every leaf but keys

Losses are means over samples, so that the mean over equal microbatches is the loss of the full
batch, except for cases whose `per_sample` is False (dropout, batch statistics): there the
reference is the mean over the same microbatches.
"""

from tests.zoo.case import Case
from tests.zoo.flax_cases import FLAX_CASES
from tests.zoo.plain_cases import PLAIN_CASES
from tests.zoo.scan_cases import SCAN_CASES

CASES = {**PLAIN_CASES, **SCAN_CASES, **FLAX_CASES}

__all__ = ["CASES", "FLAX_CASES", "PLAIN_CASES", "SCAN_CASES", "Case"]
