"""From what a user has (a Flax module or a pytree, and a loss) to one pure function."""

from octojax.frontends.adapt import adapt
from octojax.frontends.constructor import is_constructor
from octojax.frontends.pure import PureLoss

__all__ = ["PureLoss", "adapt", "is_constructor"]
