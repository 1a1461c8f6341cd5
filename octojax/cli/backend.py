"""The device platforms that JAX was told to use, and may not have."""

import os


def backend_mistake(error: RuntimeError) -> str | None:
    """Returns what to do about a platform that JAX cannot start; None for any other error."""
    text = str(error)
    if "nable to initialize backend" not in text and "nknown backend" not in text:
        return None
    asked = os.environ.get("JAX_PLATFORMS")
    where = f"JAX_PLATFORMS={asked} asks for a platform" if asked else "a platform is asked for"
    first = text.splitlines()[0]
    return (
        f"{where} that JAX cannot start here ({first}). Set JAX_PLATFORMS=cpu, or unset it to take "
        f"what there is"
    )
