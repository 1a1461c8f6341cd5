"""Set before JAX is imported anywhere: several CPU devices, strict promotion, no surprises.

Workers and other processes of tests have huge pages: they take a tenth less time.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

from octojax.launch_environment import with_huge_pages

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.update(with_huge_pages(os.environ))


def _drop_stale_compilations() -> None:
    """Removes compiled functions older than any source of their package.

    numba looks at the file of the function alone: a caller keeps what it inlined of another file.
    """
    for package in ("simulate", "tune"):
        folder = Path(__file__).parents[1] / "octojax" / package
        newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
        for kept in (*folder.glob("__pycache__/*.nbi"), *folder.glob("__pycache__/*.nbc")):
            if kept.stat().st_mtime < newest:
                kept.unlink(missing_ok=True)


_drop_stale_compilations()

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # how long an example takes says more of a busy machine than of the code
settings.load_profile("any machine")
