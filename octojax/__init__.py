"""OctoPipe in JAX. By convention: `import octojax as octopipe`.

Importing this module imports neither JAX nor Flax: every public name loads on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octojax.api.dry_run import dry_run as dry_run
    from octojax.api.gradient import value_and_grad as value_and_grad
    from octojax.api.options import Options as Options
    from octojax.api.options import pipeline as pipeline
    from octojax.api.step import TrainState as TrainState
    from octojax.api.step import TrainStep as TrainStep
    from octojax.api.step import compile as compile
    from octojax.diagnosis import Comparison as Comparison
    from octojax.diagnosis import Explanation as Explanation
    from octojax.diagnosis import compare as compare
    from octojax.diagnosis import explain as explain
    from octojax.errors import GradientWarning as GradientWarning
    from octojax.errors import RowsWarning as RowsWarning
    from octojax.frontends import adapt as adapt
    from octojax.ir import LayerGraph as LayerGraph
    from octojax.ir import Partition as Partition
    from octojax.ir import Placement as Placement
    from octojax.ir import Plan as Plan
    from octojax.ir import Profile as Profile
    from octojax.ir import Schedule as Schedule
    from octojax.ir import Timeline as Timeline
    from octojax.layers.boundary import boundary as boundary
    from octojax.processes import initialize as initialize

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "octojax.diagnosis",
    "Explanation": "octojax.diagnosis",
    "GradientWarning": "octojax.errors",
    "LayerGraph": "octojax.ir",
    "Options": "octojax.api.options",
    "Partition": "octojax.ir",
    "Placement": "octojax.ir",
    "Plan": "octojax.ir",
    "Profile": "octojax.ir",
    "RowsWarning": "octojax.errors",
    "Schedule": "octojax.ir",
    "Timeline": "octojax.ir",
    "TrainState": "octojax.api.step",
    "TrainStep": "octojax.api.step",
    "adapt": "octojax.frontends",
    "boundary": "octojax.layers.boundary",
    "compare": "octojax.diagnosis",
    "compile": "octojax.api.step",
    "dry_run": "octojax.api.dry_run",
    "explain": "octojax.diagnosis",
    "initialize": "octojax.processes",
    "pipeline": "octojax.api.options",
    "value_and_grad": "octojax.api.gradient",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octojax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
