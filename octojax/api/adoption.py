"""A training state of one step becomes that of another, in memory."""

from typing import TYPE_CHECKING

import jax

from octojax.api.opt_state import opt_state_of
from octojax.api.origin import Origin, optimizer_text

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep


def adopt(step: "TrainStep", state: "TrainState", reset_optimizer: bool) -> "TrainState":
    """Returns `state` as `step` holds it; see `TrainStep.adopt`."""
    origin = state.origin
    layout, update = origin.layout, origin.optimizer
    if layout is None or update is None:
        raise ValueError(
            "this training state was pickled, and does not know any more how it lies on its "
            "devices. Adopt it in the process that made it, or use step.save and step.restore"
        )
    params, module_state = layout.gathered(state.model), layout.gathered(state.model, state=True)
    source = step.loss.source(params, module_state)  # another model comes first among the reasons
    if not reset_optimizer:
        _check_optimizer(step.origin, origin)
    model = step.loss.place(source)
    if reset_optimizer:
        return step.renewed(model, step.first_opt_state(model), state.step)
    tree = opt_state_of(update, state.opt_state, layout)
    return step.renewed(model, step.update.scatter(tree), state.step)


def _check_optimizer(mine: Origin, theirs: Origin) -> None:
    """Raises `ValueError` unless the optimizers keep the same leaves and compute alike."""
    assert mine.optimizer is not None
    assert theirs.optimizer is not None
    texts = optimizer_text(theirs.optimizer), optimizer_text(mine.optimizer)
    old, new = _leaves(theirs), _leaves(mine)
    if texts[0] == texts[1] and old == new:
        return
    parts = [f"it is {texts[0]} there, {texts[1]} here"]
    differing = {"there": old.items() - new.items(), "here": new.items() - old.items()}
    for where, rows in differing.items():
        if rows:
            listed = sorted(f"{name} {text}" for name, text in rows)
            more = f", and {len(listed) - 20} more" if len(listed) > 20 else ""
            parts.append(f"leaves only {where}: {', '.join(listed[:20])}{more}")
    raise ValueError(
        f"the optimizer of this training state is another one: {'; '.join(parts)}. Adopt the "
        f"parameters alone, with a new optimizer state: step.adopt(state, reset_optimizer=True)"
    )


def _leaves(origin: Origin) -> dict[str, str]:
    assert origin.optimizer is not None
    paths = jax.tree_util.tree_leaves_with_path(origin.optimizer.state_shapes)
    return {jax.tree_util.keystr(p): f"{x.dtype}{list(x.shape)}" for p, x in paths}
