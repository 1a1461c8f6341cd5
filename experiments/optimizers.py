"""The optimizer of the experiments."""

import optax
from runner import Settings


def warmed_up(settings: Settings) -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients; its rate rises for a while and then falls to a tenth
    (a cosine)."""
    s = settings
    rates = optax.warmup_cosine_decay_schedule(
        s.lr / 10, s.lr, max(1, s.steps // 10), max(2, s.steps), s.lr / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.95, weight_decay=0.01)
    )
