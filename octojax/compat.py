"""The only door to what differs between JAX versions: jaxpr building, primitive names, keys.

Supported: JAX 0.10.2 to 0.12. Differences met, old | new:
    ClosedJaxpr wraps a Jaxpr (0.10)  | ClosedJaxpr is Jaxpr, which holds its constants (0.12)
    a scan counts its operands        | describes them with flat trees `ft_in`, `ft_out` (0.12)
"""

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

T = TypeVar("T")
Atom = Var | Literal
Tracer: Any = jax.core.Tracer  # type: ignore[attr-defined]
Device = Any  # jax.Device, which is a variable and no type to a type checker
Aval = Any  # jax.core.ShapedArray and friends; the public type has no name in both versions

JIT_NAMES = frozenset({"jit", "closed_call"})  # closed_call: up to 0.10
REMAT_NAMES = frozenset({"remat2"})
CUSTOM_NAMES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_lin"})


def new_var(aval: Aval) -> Var:
    """A fresh variable. 0.10 also takes `initial_qdd`; both default it."""
    return Var(aval)


def new_jaxpr(
    invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """A closed jaxpr without constants; its effects are those of its equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = tuple(f"arg{i}" for i in range(len(invars)))
    results = tuple(f"result{i}" for i in range(len(outvars)))
    debug = jex.DebugInfo("octojax", "octojax", names, results)
    return ClosedJaxpr(Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug), ())


def new_eqn(
    primitive: Any, invars: Sequence[Atom], outvars: Sequence[Var], params: dict[str, Any]
) -> JaxprEqn:
    """An equation without effects."""
    return jex.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, jex.no_effects)


def split_consts(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """The `(jaxpr, constants)` of an open or closed jaxpr, in either version."""
    consts = tuple(getattr(jaxpr, "consts", ()) or ())
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, consts


def trace(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fn(*args)` and the pytree of its output shapes."""
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def eval_jaxpr(jaxpr: ClosedJaxpr, args: Iterable[Any]) -> list[Any]:
    """The outputs of a closed jaxpr, evaluated (or traced) equation by equation."""
    return list(jex.jaxpr_as_fun(jaxpr)(*args))


def path_name(path: tuple[Any, ...], root: str = "") -> str:
    """A key path as dotted text, such as `layers.3.mlp.kernel`, without wrappers of frameworks."""
    words = [root] if root else []
    for key in path:
        word = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
        words.append(str(word))
    if len(words) > 1 and words[-1] in ("value", "raw_value"):
        words.pop()
    return ".".join(words)


def aval_of(atom: Atom) -> Any:
    """The shape and dtype of a variable or literal; JAX's own type names neither attribute."""
    return atom.aval


def is_key(aval: Aval) -> bool:
    """Whether values of this aval are typed PRNG keys."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def is_float(aval: Aval) -> bool:
    """Whether values of this aval carry a gradient: any floating or complex dtype."""
    return not is_key(aval) and jnp.issubdtype(aval.dtype, np.inexact)


def is_offloaded(aval: Aval) -> bool:
    """Whether values of this aval lie in the host's memory, as a checkpoint policy may want."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def num_bytes(aval: Aval) -> int:
    """Bytes of one value of this aval; a typed key counts as its 8 bytes of data."""
    shape = getattr(aval, "shape", ())
    itemsize = 8 if is_key(aval) else np.dtype(aval.dtype).itemsize
    return int(np.prod(shape, dtype=np.int64)) * itemsize


def copy_to(
    shardings: tuple[jax.sharding.Sharding, ...],
) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """A function that copies arrays to the given shardings, one each, without delay.

    `jax.device_put` takes 60-100 microseconds an array; the call below it 5-12. Where its
    private form changes, the public function does the same.
    """
    try:
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        devices = [xla_client.DeviceList(tuple(s._device_assignment)) for s in shardings]  # type: ignore[attr-defined]
        always = [xla_client.ArrayCopySemantics.ALWAYS_COPY] * len(shardings)
        batched = xla_client.batched_copy_array_to_devices_with_sharding
        places = list(shardings)
    except (ImportError, AttributeError):
        return lambda values: jax.device_put(list(values), list(shardings))
    return lambda values: batched(list(values), devices, places, always)


def spec_of(sharding: jax.sharding.Sharding) -> jax.sharding.PartitionSpec:
    """The partition spec of what XLA chose for a result; whole on a single device."""
    return getattr(sharding, "spec", jax.sharding.PartitionSpec())


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values among a scan equation's operands.

    0.10 has them as `num_consts` and `num_carry`; 0.12 packs the operands in a flat tree.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(
    params: Mapping[str, Any], consts: int, carry: int, xs: int, ys: int
) -> dict[str, Any]:
    """A scan equation's parameters with other numbers of operands and results."""
    if "num_consts" in params:
        changed: dict[str, Any] = {"num_consts": consts, "num_carry": carry}
        if "linear" in params:
            changed["linear"] = (False,) * (consts + carry + xs)
        return {**params, **changed}
    from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]

    inputs = tuple(flattree.nones(n) for n in (consts, carry, xs))
    outputs = tuple(flattree.nones(n) for n in (carry, ys))
    return {**params, "ft_in": flattree.pack(inputs), "ft_out": flattree.pack(outputs)}


@contextlib.contextmanager
def coordinator_elsewhere() -> Iterator[None]:
    """Within it `jax.distributed.initialize` starts no coordinator in process 0.

    It has no option for that: the function that makes the service is replaced meanwhile.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    class Elsewhere:
        def shutdown(self) -> None:
            pass

    make = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = lambda *_, **__: Elsewhere()
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = make


def distributed_client() -> Any:
    """The client of `jax.distributed`'s key-value store; it has no public name in any version."""
    from jax._src import distributed

    return distributed.global_state.client


def without_preemption_service() -> None:
    """Leaves SIGTERM what it is: JAX's service for cluster schedulers would catch it, and the
    process would go on. `JAX_ENABLE_PREEMPTION_SERVICE` in the environment keeps it."""
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def distributed_place() -> tuple[int, int]:
    """This process's number and how many there are. `jax.process_index()` says the same, but
    touches the devices, after which JAX's configuration cannot change."""
    from jax._src import distributed

    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


_forgotten: list[Any] = []


def forget_distributed() -> None:
    """At the end of Python `jax.distributed` will not say farewell, for which all must come.

    Its client does so in its destructor too: it is kept for ever.
    """
    from jax._src import distributed

    state = distributed.global_state
    for kept in (state.client, state.preemption_sync_manager, state.service):
        if kept is not None:
            _forgotten.append(kept)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.preemption_sync_manager = state.service = None


def key_impl(aval: Aval) -> str:
    """The name of the PRNG that typed keys of this aval belong to, such as "threefry2x32".

    `jax.random.key_impl` takes arrays only, in both versions.
    """
    return aval.dtype._impl.name


def user_lines(eqn: JaxprEqn) -> tuple[tuple[str, int, str], ...]:
    """The user's `(file, line, function)` that an equation was traced from, innermost first.

    Frames of JAX itself are left out. No version has a public name for it.
    """
    return _user_lines(eqn.source_info.traceback)


@functools.lru_cache(maxsize=4096)
def _user_lines(traceback: Any) -> tuple[tuple[str, int, str], ...]:
    from jax._src import source_info_util

    frames = source_info_util.user_frames(traceback)
    return tuple((f.file_name, f.start_line, f.function_name) for f in frames)


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What the calling thread has set for itself, as a maker of contexts for other threads.

        settings = thread_settings()        under `jax.enable_x64(True)`, say
        with settings(): ...                in another thread: the same holds there

    Covers every context manager of `jax.config`, `jax.make_user_context`, and those for devices
    and metadata: JAX keeps each in a `Config` object whose local value belongs to one thread, and
    offers no way to hand them on. Global values hold in every thread anyway. The caller's mesh
    stays with the caller: a rank's programs are compiled for the rank's own.
    """
    from jax._src import config

    unset = config.config_ext.unset
    local = [(c, value) for c, get in _configs() if (value := get()) is not unset]

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        before = [(c, c.swap_local(value)) for c, value in local]
        for c, value in local:
            _tell(c, value)
        try:
            yield
        finally:
            for c, value in before:
                c.set_local(value)
                _tell(c, None if value is unset else value)

    return settings if local else contextlib.nullcontext


def under_thread_settings(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, for another thread: what the calling thread has set for itself holds in it."""
    settings = thread_settings()

    def call(*args: Any) -> T:
        with settings():
            return function(*args)

    return call


def _tell(config: Any, value: Any) -> None:
    """Runs what JAX does beside storing a local value, where it does."""
    hook = getattr(config, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


def _configs() -> Sequence[tuple[Any, Callable[[], Any]]]:
    """Every object that keeps a setting by thread, and how to read it."""
    from jax._src import config

    # `jax.make_user_context` and an extension may add to them.
    return _configs_of(len(config.config._value_holders), len(config.config_ext.trace_context()))


@functools.lru_cache(maxsize=1)
def _configs_of(num_named: int, num_in_context: int) -> Sequence[tuple[Any, Callable[[], Any]]]:
    """`_configs` when JAX knows so many of them. What it keeps by thread for itself is not among
    them: the state of a trace, of MLIR, and the hook that `jax.debug_nans` sets."""
    from jax._src import config

    holders: Any = config.config._value_holders
    named = [x for x in holders.values() if hasattr(x, "get_local")]
    mine = [x._obj for x in gc.get_objects() if isinstance(x, config.UserConfig)]
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("jax._src.")]
    contexts = [
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, config.config_ext.Config)
        and name.endswith("_context_manager")
        and "mesh" not in name
    ]
    unique = {id(x): x for x in (*named, *mine, *contexts)}
    return tuple((x, x.get_local) for x in unique.values())


@contextlib.contextmanager
def without_mesh() -> Iterator[Any]:
    """Within it no mesh of the caller is in force. Yields the one that was: a `Mesh` of
    `jax.set_mesh` or of `with mesh:`, an `AbstractMesh` of `use_abstract_mesh`, or None."""
    from jax._src import mesh

    meshes = (mesh.get_concrete_mesh(), mesh.thread_resources.env.physical_mesh)
    before = [m for m in (*meshes, jax.sharding.get_abstract_mesh()) if not m.empty]
    with jax.set_mesh(None):
        yield before[0] if before else None


def mesh_of(eqn: JaxprEqn) -> jax.sharding.AbstractMesh:
    """The mesh that was in force when an equation was traced, which it remembers."""
    context: Any = eqn.ctx
    return context.cur_abstract_mesh


def bind_here(eqn: JaxprEqn, values: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of an equation with other parameters: under its own settings and source line,
    as in `eval_jaxpr`, but under the mesh that is in force now."""
    from jax._src import mesh, source_info_util

    config: Any = getattr(mesh, "abstract_mesh_context_manager", None)  # 0.12
    if config is None:
        from jax._src.config import abstract_mesh_context_manager as config
    source: Any = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    here = config.get_local()
    primitive, context = eqn.primitive, eqn.ctx
    with source_info_util.user_context(source.traceback, name_stack=stack), context.manager:
        traced = config.swap_local(here)
        try:
            results = primitive.bind(*values, **primitive.get_bind_params(dict(params)))
        finally:
            config.set_local(traced)
    return list(results) if primitive.multiple_results else [results]


def jit_enabled() -> contextlib.AbstractContextManager[None]:
    """Lifts `jax.disable_jit`: a step consists of compiled programs, which JAX refuses to call
    under it, and a loss without jit would be traced with its loops written out."""
    config: Any = jax.config
    return jax.disable_jit(False) if config.jax_disable_jit else contextlib.nullcontext()


def copies_allowed() -> contextlib.AbstractContextManager[None]:
    """Lets a step copy from device to device under `jax.transfer_guard("disallow")`, which is
    there to find implicit copies. Those of a step are explicit, but lie below `jax.device_put`,
    where JAX does not see that. `"disallow_explicit"` stays in force."""
    config: Any = jax.config
    if config.jax_transfer_guard_device_to_device in ("log", "disallow"):
        return jax.transfer_guard_device_to_device("allow")
    return contextlib.nullcontext()


def in_callback() -> bool:
    """Whether the caller runs inside a Python callback of a compiled program.

    XLA gives no sign of it but the frames of the modules that serve callbacks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("jax._src.callback", "jax._src.debugging"):
            return True
        frame = frame.f_back
    return False


def is_nan_report(error: BaseException) -> bool:
    """Whether JAX raised this because of `jax_debug_nans` or `jax_debug_infs`.

    Compiled programs that are called themselves raise JAX's internal type, in both versions.
    """
    return isinstance(error, FloatingPointError) or (
        type(error).__name__ == "InternalFloatingPointError"
    )


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code that an equation comes from; "" if unknown."""
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)
