"""`octopipe profile`: what each layer of a model costs, as a file for the tuner."""

import json
from typing import Annotated, Any

import typer

from octojax.cli.read import expect_writable, read_schedule
from octojax.cli.targets import is_preset, load_target, module_of
from octojax.ir import Schedule
from octojax.machines import describe, load, names

_TRANSPORTS = ("device_put", "ppermute")


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A preset of a module of models (octojax.models.llama:llama-3-8b), or a function "
            "without arguments that returns (model, loss_fn, batch[, params]); the batch is one "
            "microbatch.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            help="A machine for the cost model: a name (`list` shows them), TOML or JSON; "
            "default: timing here."
        ),
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
    tensor: Annotated[
        int | None,
        typer.Option(help="Of a preset: devices of a rank's tensor axis; default: 1.", min=1),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Of a preset: tokens of a sample; default: 4096.", min=1)
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(help="Of a preset: samples of a microbatch; default: 1.", min=1)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of a preset: bfloat16 (the default), float16 or float32.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of a preset: so many layers; default: its own.", min=1)
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="Of a preset: one letter per layer; default: its own.")
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Of a preset: the tensor axis divides what passes between layers, too.",
        ),
    ] = False,
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
    if machine == "list":
        typer.echo("\n".join(describe(name, load(name)) for name in names()))
        return
    module, name = module_of(target)
    described: Any = None if machine is None else load(machine)
    sizes = {
        "tensor": tensor, "sequence": sequence, "microbatch_size": microbatch_size, "dtype": dtype,
        "layers": layers, "pattern": pattern, "sequence_parallel": sequence_parallel or None,
    }  # fmt: skip
    sizes = {key: value for key, value in sizes.items() if value is not None}
    noted = {"ranks": ranks, "microbatches": microbatches}
    profile: Any
    if is_preset(module, name):
        if described is None or measure or chosen is not None or min_layers > 1:
            raise ValueError(
                f"{target} is a preset, which is priced from its shapes and never made: give "
                f"--machine ({', '.join(names())}, or a file), and neither --measure, --plan nor "
                f"--min-layers"
            )
        profile = _preset(module, name, described, sizes, noted)
    elif sizes:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in sizes)
        raise ValueError(
            f"{options}: only for presets of a module of models; {name} makes its own model and "
            f"batch"
        )
    else:
        profile = _function(
            target,
            described,
            machine,
            measure,
            chosen,
            optimizer,
            min_layers,
            rounds,
            transport,
            noted,
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


def _preset(
    module: Any, name: str, described: Any, sizes: dict[str, Any], noted: dict[str, Any]
) -> Any:
    """The profile of a preset on a described machine."""
    from octojax.profiling.from_shapes import preset_profile
    from octojax.profiling.presets import find_preset

    sizes = {"dtype": "bfloat16", **sizes, **noted}
    own = {key: sizes.pop(key) for key in ("layers", "pattern", "dtype") if key in sizes}
    return preset_profile(find_preset(module, name, **own), described, **sizes)


def _function(
    target: str,
    described: Any,
    machine: str | None,
    measure: bool,
    chosen: Any,
    optimizer: str,
    min_layers: int,
    rounds: int,
    transport: str,
    noted: dict[str, Any],
) -> Any:
    """The profile of what a function makes: measured, or by the cost model."""
    model, loss_fn, batch, params = load_target(target)
    from octojax.frontends import adapt
    from octojax.profiling import measure as run

    pure = adapt(model, loss_fn, params)
    if described is None or measure:
        return run(
            pure,
            batch,
            optimizer=named_optimizer(optimizer),
            min_layers=min_layers if chosen is None else chosen.partition.num_layers,
            rounds=rounds,
            machine=None if described is None else described.machine,
            transport=transport,
            name=target,
            partition=None if chosen is None else chosen.partition,
            **noted,
        )
    if described.device is None:
        raise ValueError(
            f'{machine} lacks "device", which the cost model needs, such as '
            f'{{"flops_per_s": 9.9e14, "bandwidth_bytes_per_s": 3.3e12}}; add it, or time the '
            f"layers here with --measure"
        )
    layered = find(pure, batch, min_layers)
    from octojax.costs import estimate

    return estimate(layered, described.device, described.machine, name=target, **noted)


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


def table(profile: Any) -> str:
    """Returns the layers and the machine of a profile as text, equal neighbours as one line."""
    machine = profile.machine
    capacity = machine.capacity_bytes / (1 << 30)
    latency, bandwidth = machine.link(0, 1)
    lines = [
        f"{profile.name}: {profile.num_layers} layers, "
        f"{sum(x.compute_s for x in profile.layers) * 1e3:.4g} ms for one microbatch",
        f"machine: {machine.name}, {capacity:.4g} GiB a rank, transfers "
        f"{latency * 1e6:.4g} us + bytes / {bandwidth / 1e9:.4g} "
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
