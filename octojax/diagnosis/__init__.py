"""Why a step takes as long as it does, what would change that, and how several compare.

Nothing here imports JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octojax.diagnosis.accounts import RankAccount, StepPart
    from octojax.diagnosis.changes import Change
    from octojax.diagnosis.comparison import Comparison, compare
    from octojax.diagnosis.critical_path import Segment, critical_path
    from octojax.diagnosis.explanation import Explanation, explain

__all__ = [
    "Change",
    "Comparison",
    "Explanation",
    "RankAccount",
    "Segment",
    "StepPart",
    "compare",
    "critical_path",
    "explain",
]

_HOMES = {
    "Change": "changes",
    "Comparison": "comparison",
    "Explanation": "explanation",
    "StepPart": "accounts",
    "RankAccount": "accounts",
    "Segment": "critical_path",
    "compare": "comparison",
    "critical_path": "critical_path",
    "explain": "explanation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
