"""How Numba compiles the simulator and the search: once per machine, kept on disk.

Each function gets two wrappers by default, one for callers in Python and one for callers in C.
Compiling them takes as long as a short function, so only what Python calls has the first, and
nothing has the second. Inside a hot loop a compiled function that takes arrays costs more than its
work (each array is counted as it comes and goes), so such loops are written out.
"""

CALLED = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
"""Of compiled functions that Python calls: other threads run meanwhile, divisions unchecked."""

INNER = {**CALLED, "no_cpython_wrapper": True}
"""Of those that only compiled code calls."""
