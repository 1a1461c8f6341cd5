"""A machine with one device is no pipeline, and says so."""

import subprocess
import sys

SCRIPT = """
import warnings
import jax, jax.numpy as jnp, numpy as np, optax
import octojax as octopipe
def loss(params, batch): return jnp.mean(jnp.tanh(batch @ params["a"]) @ params["b"])
args = {"a": jnp.eye(2), "b": jnp.eye(2)}, loss, optax.sgd(0.1), np.ones((2, 2), np.float32)
for mesh in (None, jax.make_mesh((1,), ("pipe",))):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        octopipe.compile(*args, mesh=mesh, microbatches=2, progress=False).close()
    print(*[f"{w.filename}: {w.message}" for w in caught if "one device" in str(w.message)])
"""


def test_the_default_mesh_of_one_device_warns():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "JAX_COMPILATION_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    default, chosen = done.stdout.split("\n")[:2]
    assert default.startswith("<string>: JAX has one device here")
    assert "jax_num_cpu_devices" in default
    assert chosen == ""
