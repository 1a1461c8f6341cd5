"""Exception types. Argument mistakes are `ValueError`; broken plans are `PlanError` and friends.

Every message says what was asked, what was found, where, and what to try.
"""


class OctoPipeError(Exception):
    """Base of every error that octojax raises on purpose, except plain `ValueError`s."""


class PlanError(OctoPipeError, ValueError):
    """A partition, placement, schedule or plan is broken or does not fit its model."""


class ScheduleError(PlanError):
    """A schedule table lacks, doubles or misplaces an action, or cannot finish."""


class CapacityError(PlanError):
    """No plan, or not this plan, fits into the memory of every rank."""


class ProfileError(OctoPipeError, ValueError):
    """A profile has missing, negative or inconsistent fields."""


class FormatError(OctoPipeError, ValueError):
    """A text, CSV or JSON file cannot be parsed; names file, row and cell."""


class CutError(OctoPipeError, ValueError):
    """A model's jaxpr cannot be cut into the layers or stages asked for."""


class LossError(OctoPipeError, ValueError):
    """The loss function does not have the form `loss(params, batch) -> scalar or (scalar, aux)`."""


class MeshError(OctoPipeError, ValueError):
    """The mesh lacks the axis or the devices that the plan needs."""


class ExecutionError(OctoPipeError, RuntimeError):
    """A step failed while running; names rank, action, value and peer."""


class PeerError(ExecutionError):
    """Another process has ended, or does not come; names it."""


class NonFiniteError(ExecutionError, FloatingPointError):
    """A step made a NaN or an infinity under `jax.debug_nans` or `jax.debug_infs`; names rank,
    action, operation and the line of the user's code."""


class GradientWarning(UserWarning):
    """A derivative rule makes gradients whatever the loss is, and microbatches add them up."""


class RowsWarning(UserWarning):
    """The loss mixes rows of its batch, so some of its values are those of the microbatches."""
