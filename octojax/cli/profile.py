"""`octopipe profile`: what each layer of a model costs, as a file for the tuner."""

import importlib
import inspect
import json
import os
import sys
from typing import Annotated, Any

import typer

from octojax.cli.read import expect_writable, read_schedule
from octojax.ir import Schedule

_TRANSPORTS = ("device_put", "ppermute")


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A function without arguments that returns (model, loss_fn, batch[, params]); "
            "the batch is one microbatch.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(help="A described machine (JSON), for the cost model; default: timing here."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Time the layers here even with --machine (its links)."),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Name in optax (or none), whose state is counted when layers are measured."
        ),
    ] = "adamw",
    min_layers: Annotated[int, typer.Option(help="Cut finer, if need be, for so many.", min=1)] = 1,
    ranks: Annotated[
        int | None, typer.Option(help="Noted in the profile; default: not.", min=1)
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Noted in the profile; default: not.", min=1)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Medians are of so many rounds.", min=1)] = 5,
    transport: Annotated[str, typer.Option(help="device_put or ppermute.")] = "device_put",
    plan: Annotated[
        str | None,
        typer.Option(
            help="Time this plan's whole stages, and simulate it with them; default: layers."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Write the profile here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Profile a model: measured on the devices at hand, or by the cost model with --machine."""
    expect_writable(output)
    if transport not in _TRANSPORTS:
        raise ValueError(f"--transport {transport!r}: expected {' or '.join(_TRANSPORTS)}")
    if plan is not None and machine is not None and not measure:
        raise ValueError("--plan times stages: leave --machine out, or add --measure for its links")
    chosen: Any = None if plan is None else read_schedule(plan)
    if isinstance(chosen, Schedule):
        raise ValueError(
            f"--plan {plan} is a table; give a plan (.json), which cuts the layers too"
        )
    model, loss_fn, batch, params = load_target(target)
    given, device = (None, None) if machine is None else read_machine(machine)
    from octojax.frontends import adapt
    from octojax.profiling import measure as run

    pure = adapt(model, loss_fn, params)
    if given is None or measure:
        profile: Any = run(
            pure,
            batch,
            optimizer=named_optimizer(optimizer),
            min_layers=min_layers if chosen is None else chosen.partition.num_layers,
            rounds=rounds,
            machine=given,
            transport=transport,
            name=target,
            ranks=ranks,
            microbatches=microbatches,
            partition=None if chosen is None else chosen.partition,
        )
    elif device is None:
        raise ValueError(
            f'{machine} lacks "device", which the cost model needs, such as '
            f'{{"flops_per_s": 9.9e14, "bandwidth_bytes_per_s": 3.3e12}}; add it, or time the '
            f"layers here with --measure"
        )
    else:
        layered = find(pure, batch, min_layers)
        from octojax.costs import estimate

        profile = estimate(
            layered, device, given, name=target, ranks=ranks, microbatches=microbatches
        )
    if output is not None:
        profile.save(output)
    if as_json:
        typer.echo(json.dumps(profile.to_json(), indent=1))
        return
    typer.echo(table(profile))
    if chosen is not None:
        from octojax.simulate import simulate

        step_s = simulate(chosen, profile).makespan_s
        typer.echo(f"{plan} with its stages timed whole: {step_s * 1e3:.4g} ms a step, simulated")
    if output is not None:
        typer.echo(f"written to {output}")


def load_target(target: str) -> tuple[Any, Any, Any, Any]:
    """Returns model, loss, batch and params that the function `MODULE:NAME` makes.

    Raises `ValueError` saying what was found instead.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{target!r}: expected MODULE:NAME, such as my_package.models:tiny")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{target!r}: cannot import {module_name} ({error}); run where it can be imported, "
            f"or set PYTHONPATH"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(
            f"{target!r}: {module_name} has no function {name!r}; it has "
            f"{', '.join(sorted(x for x in vars(module) if not x.startswith('_'))) or 'nothing'}"
        )
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:  # ValueError: a built-in that does not say
        raise ValueError(
            f"{target!r} cannot be called without arguments ({error}); expected a function that "
            f"returns (model, loss_fn, batch[, params])"
        ) from None
    made = make()
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ValueError(
            f"{target!r} returned a {type(made).__name__}{size}, expected "
            f"(model, loss_fn, batch) or (model, loss_fn, batch, params)"
        )
    model, loss_fn, batch, *rest = made
    return model, loss_fn, batch, (rest[0] if rest else None)


def named_optimizer(name: str) -> Any:
    """Returns the optimizer that optax has under `name`, None for 'none'."""
    if name == "none":
        return None
    import optax

    make = getattr(optax, name, None)
    try:
        chosen = make(1e-3) if callable(make) else None
    except TypeError:
        chosen = None
    if not isinstance(chosen, optax.GradientTransformation):
        raise ValueError(
            f"--optimizer {name!r} is no optimizer of optax that takes a learning rate; "
            f"try adam, adamw, sgd, lion, adafactor, or none"
        )
    return chosen


def find(pure: Any, batch: Any, min_layers: int) -> Any:
    """Returns the layers of a loss for one microbatch."""
    from octojax.layers import find_layers
    from octojax.profiling import shapes_of
    from octojax.rows.whole import separated
    from octojax.trace import trace_loss

    return find_layers(
        separated(trace_loss(pure.fn, pure.params, shapes_of(batch), pure.state)), min_layers
    )


def read_machine(path: str) -> tuple[Any, Any]:
    """Returns the `Machine` described in a JSON file, and its `octojax.costs.Device` if given.

    The file holds the fields of the first, and under "device" those of the second. A profile
    will do: its machine is taken. Raises `FormatError`.
    """
    from octojax.costs import Device
    from octojax.errors import FormatError
    from octojax.ir import Machine
    from octojax.ir.files import read_json

    data = read_json(path)
    if not isinstance(data, dict):
        raise FormatError(f"{path}: a machine is a JSON object, found {type(data).__name__}")
    given = dict(data.get("machine", data))
    rates = given.pop("device", None)
    found: list[Any] = []
    records: list[tuple[Any, Any]] = [(Machine, given), (Device, rates)]
    for record, values in records:
        if values is None:
            found.append(None)
            continue
        known = record.__dataclass_fields__
        unknown = [key for key in values if key not in known]
        if unknown:
            raise FormatError(
                f"{path}: unknown {unknown} in {record.__name__.lower()}; fields are "
                f"{', '.join(known)}"
            )
        try:
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            found.append(record(**fields))
        except TypeError as error:
            raise FormatError(f"{path}: {error}") from None
    return found[0], found[1]


def table(profile: Any) -> str:
    """Returns the layers and the machine of a profile as text, equal neighbours as one line."""
    machine = profile.machine
    capacity = machine.capacity_bytes / (1 << 30)
    lines = [
        f"{profile.name}: {profile.num_layers} layers, "
        f"{sum(x.compute_s for x in profile.layers) * 1e3:.4g} ms for one microbatch",
        f"machine: {machine.name}, {capacity:.4g} GiB a rank, transfers "
        f"{machine.latency_s * 1e6:.4g} us + bytes / {machine.bandwidth_bytes_per_s / 1e9:.4g} "
        f"GB/s, host {machine.host_cost_s * 1e6:.4g} us",
        "layers    kind                    F ms      I ms      W ms      B ms  "
        "state MiB  kept MiB   till W   out MiB",
    ]
    start = 0
    for stop in range(1, profile.num_layers + 1):
        if stop < profile.num_layers and profile.layers[stop] == profile.layers[start]:
            continue
        x = profile.layers[start]
        where = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        times = (x.forward_s, x.input_grad_s, x.weight_grad_s, x.fused_backward_s)
        sizes = (x.state_bytes, x.residual_bytes, x.weight_residual_bytes, x.output_bytes)
        lines.append(
            f"{where:9s} {x.kind:18.18s}"
            + "".join(f"{t * 1e3:10.4g}" for t in times)
            + " "
            + "".join(f"{n / (1 << 20):10.4g}" for n in sizes)
        )
        start = stop
    return "\n".join(lines)
