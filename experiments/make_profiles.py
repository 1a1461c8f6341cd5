"""Regenerates the profiles of the OctoPipe paper's TABLE II from configurations and a machine.

python experiments/make_profiles.py                      all, and docs/results/profiles.md
python experiments/make_profiles.py nemotron-h-s llama-s
python experiments/make_profiles.py nemotron-h-s --machine h100 --out /tmp/h100

Writes experiments/profiles/generated/NAME.roofline.json, and NAME.calibrated.json on the same
machine with six fitted constants (experiments/profiles/generated/h800-calibrated.toml; `--fit`
finds them again). No device is used and no parameter made; the large models take a minute each.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STORED = HERE / "profiles"
GENERATED = STORED / "generated"
FITTED = GENERATED / "h800-calibrated.toml"
PAGE = HERE.parent / "docs" / "results" / "profiles.md"
FIT_ON = ("nemotron-h-s", "jamba-s", "llama-s")


@dataclass(frozen=True)
class Configuration:
    """One profile: a preset at a sequence length, on ranks of eight devices."""

    module: str
    preset: str
    ranks: int
    sequence: int = 4096

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks


_RANKS = {"s": 4, "m": 8, "l": 16}
CONFIGURATIONS: dict[str, Configuration] = {
    **{
        f"{model}-{size}": Configuration(model.replace("-", "_"), f"{model}-{size}", ranks)
        for model in ("nemotron-h", "jamba", "llama")
        for size, ranks in _RANKS.items()
    },
    **{
        f"nemotron-h-s-seq{k}k": Configuration("nemotron_h", "nemotron-h-s", 4, 1024 * k)
        for k in (2, 8, 16)
    },
}
"""TABLE II (tensor axis of 8, microbatches of one sequence), and TABLE IV's sequence lengths."""


def traced(name: str) -> Any:
    """Returns the layers of a configuration: bfloat16, with a bfloat16 residual stream as in the
    paper's base, Megatron-LM."""
    from octojax.profiling.from_shapes import trace_preset
    from octojax.profiling.presets import find_preset

    own = CONFIGURATIONS[name]
    module = importlib.import_module(f"octojax.models.{own.module}")
    preset = find_preset(module, own.preset, dtype="bfloat16")
    if hasattr(preset.config, "residual_in_fp32"):
        preset = replace(preset, config=replace(preset.config, residual_in_fp32=False))
    return trace_preset(preset, own.sequence)


def priced(name: str, layers: Any, hardware: Any, costs: str = "roofline") -> Any:
    """Returns the profile of traced layers on a machine, ranks of eight devices."""
    own = CONFIGURATIONS[name]
    sizes = {"ranks": own.ranks, "microbatches": own.microbatches}
    profile = layers.price(hardware, tensor=8, sequence_parallel=True, **sizes)
    extra = {**dict(profile.extra), "costs": costs}
    return replace(profile, name=name, extra=tuple(extra.items()))


def save(profile: Any, path: Path) -> None:
    """Writes a profile with a layer per line."""
    head = profile.to_json()
    layers = ",\n".join(json.dumps(layer) for layer in head.pop("layers"))
    text = json.dumps(head)[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n"layers": [\n{layers}\n]}}\n', encoding="utf-8")


# ---------------------------------------------------------------------- six constants

CONSTANTS = ("contraction", "attention", "recurrence", "memory", "links", "launch_s")
TIMES = ("forward_s", "input_grad_s", "weight_grad_s")


def with_constants(hardware: Any, values: Sequence[float]) -> Any:
    """Returns the machine with other shares of its peaks, and another time of a launch."""
    contraction, attention, recurrence, memory, links, launch_s = values
    machine, device = hardware.machine, hardware.device
    return replace(
        hardware,
        machine=replace(machine, bandwidth_bytes_per_s=200e9 * links),
        device=replace(
            device,
            efficiency=contraction,
            attention_efficiency=attention,
            recurrence_efficiency=recurrence,
            bandwidth_efficiency=memory,
            launch_s=launch_s,
        ),
    )


def fit(layers: Mapping[str, Any], hardware: Any) -> tuple[float, ...]:
    """Returns the constants whose profiles are nearest to the calibrated ones, in logarithms, over
    every kind of layer and F, I, W of it."""
    import numpy as np
    from scipy.optimize import least_squares

    def errors(logs: Any) -> Any:
        found = []
        machine = with_constants(hardware, np.exp(logs))
        for name in FIT_ON:
            ours, stored = by_kind(priced(name, layers[name], machine)), by_kind(stored_of(name, 1))
            for kind, theirs in stored.items():
                for time_s in TIMES:
                    a, b = getattr(ours[kind], time_s), getattr(theirs, time_s)
                    if a > 0 and b > 0:
                        found.append(np.log(a / b))
        return np.array(found)

    low = np.log([0.01, 0.005, 0.0005, 0.01, 0.02, 1e-6])
    high = np.log([1.0, 1.0, 1.0, 1.0, 1.0, 2e-3])
    begin = np.log([0.2, 0.1, 0.02, 0.3, 0.3, 1e-4])
    best = least_squares(errors, begin, bounds=(low, high), loss="soft_l1", f_scale=0.2)
    return tuple(float(f"{x:.3g}") for x in np.exp(best.x))


def fitted_text(values: Sequence[float]) -> str:
    """Returns the TOML of the H800 with fitted constants."""
    from importlib import resources

    text = resources.files("octojax.machines").joinpath("h800.toml").read_text("utf-8")
    top = text.partition("\n# Shares")[0].rstrip()
    lines = [line for line in top.split("\n") if not line.startswith(("launch_s", "inter_band"))]
    at = next(i for i, line in enumerate(lines) if line.startswith("inter_latency_s"))
    far = 25e9 * H800["links"] / dict(zip(CONSTANTS, values, strict=True))["links"]
    lines.insert(at + 1, f"inter_bandwidth_bytes_per_s = {far:.4g}  # reaches 20 GB/s, as `h800`")
    *shares, launch_s = zip(CONSTANTS, values, strict=True)
    return "\n".join(
        [
            "# Made by experiments/make_profiles.py --fit.",
            *lines,
            f"launch_s = {launch_s[1]}  # fitted, as the shares below, to the calibrated profiles",
            f"# of {', '.join(FIT_ON)}, which stand for the paper's TABLE IV and Fig. 10.",
            "",
            "[achieved]",
            *(f"{name} = {value}" for name, value in shares),
            "",
        ]
    ).replace('name = "H800 SXM', 'name = "calibrated H800 SXM')


# ---------------------------------------------------------------------- comparison


def stored_of(name: str, calibrated: bool | int) -> Any:
    """Returns the stored profile of a configuration; None where there is none."""
    from octojax import Profile

    path = STORED / f"{name}.{'calibrated' if calibrated else 'roofline'}.json"
    return Profile.load(path) if path.exists() else None


def by_kind(profile: Any) -> dict[str, Any]:
    """Returns one layer of each kind, from the middle of the model where there are several."""
    found: dict[str, list[Any]] = {}
    for layer in profile.layers:
        found.setdefault(layer.kind, []).append(layer)
    return {kind: layers[len(layers) // 2] for kind, layers in found.items()}


COLUMNS = (
    ("F us", "forward_s", 1e6),
    ("I us", "input_grad_s", 1e6),
    ("W us", "weight_grad_s", 1e6),
    ("kept MB", "residual_bytes", 1e-6),
    ("till W MB", "weight_residual_bytes", 1e-6),
    ("state MB", "state_bytes", 1e-6),
    ("out MB", "output_bytes", 1e-6),
)


def comparison(ours: Any, theirs: Any) -> Iterable[str]:
    """Yields the rows of a table: each kind of layer, generated / stored."""
    yield "| kind | " + " | ".join(name for name, _, _ in COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    mine, stored = by_kind(ours), by_kind(theirs)
    for kind, layer in stored.items():
        cells = []
        for _, field, scale in COLUMNS:
            a, b = getattr(mine[kind], field) * scale, getattr(layer, field) * scale
            cells.append(f"{a:.4g} / {b:.4g}")
        yield f"| {kind} | " + " | ".join(cells) + " |"


def steps_ms(profile: Any) -> tuple[float, float]:
    """Returns the step of 1F1B with split backward on uniform stages, and the busiest possible:
    all work divided evenly, both in ms."""
    from octojax import Plan
    from octojax.ir import uniform_partition
    from octojax.passes import SplitBackward
    from octojax.schedules import generate
    from octojax.simulate import simulate

    table = generate("1f1b", profile.ranks, profile.microbatches)
    plan = Plan(uniform_partition(profile.kinds, profile.ranks), table.placement, table)
    even = profile.microbatches * sum(x.compute_s for x in profile.layers) / profile.ranks
    return 1e3 * simulate(SplitBackward()(plan), profile).makespan_s, 1e3 * even


def page(found: Mapping[str, tuple[Any, Any]], constants: Mapping[str, float]) -> str:
    """Returns docs/results/profiles.md."""
    lines = [INTRODUCTION.strip(), "", "## The step", "", STEP.strip(), ""]
    lines.append(
        "| configuration | 1F1B, split | balanced | ratio | stored: 1F1B | balanced | ratio |"
    )
    lines.append("|---|---|---|---|---|---|---|")
    for costs in (0, 1):
        for name, pair in found.items():
            stored = stored_of(name, costs)
            label = f"{name} {'calibrated' if costs else 'roofline'}"
            a, b = steps_ms(pair[costs])
            cells = [f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"]
            if stored is None:
                cells += ["-"] * 3
            else:
                c, d = steps_ms(stored)
                cells += [f"{c:.1f}", f"{d:.1f}", f"{c / d:.2f}"]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "## Layer by layer, roofline", "", "Generated / stored.", ""]
    for name, (roofline, _) in found.items():
        if (stored := stored_of(name, 0)) is not None:
            lines += [f"### {name}", "", *comparison(roofline, stored), ""]
    lines += ["## What differs, and why", "", REASONS.strip(), "", "## Calibrated", ""]
    lines += [CALIBRATED.strip(), "", "| constant | fitted | `h800` |", "|---|---|---|"]
    for name, value in constants.items():
        lines.append(f"| {name} | {value} | {H800[name]} |")
    lines.append("")
    for name, (_, calibrated) in found.items():
        if "-s" in name and (stored := stored_of(name, 1)) is not None:
            lines += [f"### {name}, calibrated", "", *comparison(calibrated, stored), ""]
    return "\n".join(lines).rstrip() + "\n"


H800 = dict(zip(CONSTANTS, (0.65, 0.5, 0.2, 0.85, 0.8, 5e-6), strict=True))

INTRODUCTION = """
# Profiles from configurations

Made by `python experiments/make_profiles.py` from the presets of `octojax.models` and the machine
`h800`, without a device: no figure here is measured.

Three sets of profiles, and which is which:

* `experiments/profiles/*.roofline.json` and `*.calibrated.json`: *stored*. They came with the
  project, and its studies, tests and pages stand on them; they stay as they are. The calibrated
  ones are an analytic model with six constants fitted to TABLE IV and Fig. 10 of the paper, so
  agreement there is in-sample.
* `experiments/profiles/generated/*.roofline.json`: what our cost model says of the same
  configurations, from equations and shapes.
* `experiments/profiles/generated/*.calibrated.json`: the same with six constants of the machine
  (`h800-calibrated.toml`) fitted to the stored calibrated profiles of the three small models.

All are for a rank of eight H800 (tensor axis of 8, the residual stream divided, too) and a
microbatch of one sequence of 4,096 tokens where the name does not say otherwise, in bfloat16 with a
bfloat16 residual stream, as in Megatron-LM.
"""
STEP = """
Milliseconds, simulated: 1F1B with split backward on uniform stages, and all work divided evenly
over the ranks (a bound). What matters for a schedule is their ratio: how uneven layers are.
"""
REASONS = """
Bytes are within a few per cent, and so are times where products and collectives make them. Else:

* *Head, F and I.* The stored model writes and reads float32 logits several times, and keeps them.
  Our loss keeps them in bfloat16 and builds the softmax again (`models/language.py`), and the cost
  model takes elementwise work as fused: it counts the logits once. Half the bytes kept, a third to
  a half of F, half to two thirds of I. On real devices the truth is in between, and here is most of
  the difference in how uneven the models are: the stored head is a heavier stage.
* *`mamba2`, I.* The stored model counts the recurrence's forward again and the memory that its
  chunks move; ours counts twice the operations of the forward at the share `recurrence`, and not
  what a `custom_vjp` computes again.
* *`moe`.* Ours has a capacity of 1.25 times the even load, as the preset; kept until W are the
  experts' inputs and hidden values, where the stored model also keeps copies sorted by expert.
* *W.* Both gather the divided input of a layer again. Ours has 5 us of latency for each of the
  seven steps of a ring, which is more than the stored model's at narrow widths.
* *Embedding.* Ours keeps no tokens, and no gradient until W. *Head, out*: ours is the loss itself;
  nothing is sent after the last layer.
"""
CALIBRATED = """
One share of the peak for all products cannot be right for large and small ones: the stored
calibrated head has a W at five times the rate of a layer's. Six constants of a machine thus leave
up to a factor of two at the head, and 10 to 40 % elsewhere. Nor are their sequence lengths those
of the stored profiles: fixed shares make times proportional to the tokens, while the stored ones
grow more slowly (2k to 16k tokens: a factor of 2 in the step, here 6.6). TABLE IV wants the stored
ones, and so do the studies.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="configurations; default: all, and the page")
    parser.add_argument("--machine", default="h800", help="a name, TOML or JSON; default: h800")
    parser.add_argument("--out", type=Path, default=GENERATED, help="folder; default: %(default)s")
    parser.add_argument("--fit", action="store_true", help="find the six constants again")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in CONFIGURATIONS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(CONFIGURATIONS)}")
    from octojax import machines

    hardware = machines.load(given.machine)
    names = given.names or list(CONFIGURATIONS)
    layers: dict[str, Any] = {}
    for name in dict.fromkeys([*names, *(FIT_ON if given.fit else ())]):
        start = time.perf_counter()
        layers[name] = traced(name)
        print(f"{name}: traced in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if given.fit:
        FITTED.parent.mkdir(parents=True, exist_ok=True)
        FITTED.write_text(fitted_text(fit(layers, hardware)), encoding="utf-8")
    found = {}
    for name in names:
        roofline = priced(name, layers[name], hardware)
        save(roofline, given.out / f"{name}.roofline.json")
        calibrated = roofline
        if given.machine == "h800":
            calibrated = priced(name, layers[name], machines.load(FITTED), "calibrated")
            save(calibrated, given.out / f"{name}.calibrated.json")
        found[name] = (roofline, calibrated)
    print(f"{len(names)} configurations in {given.out}")
    if not given.names and given.machine == "h800" and given.out == GENERATED:
        PAGE.write_text(page(found, constants_of(FITTED)), encoding="utf-8")
        print(f"compared in {PAGE}")


def constants_of(path: Path) -> dict[str, float]:
    """Returns the six constants of a fitted machine."""
    import tomllib

    data = tomllib.loads(path.read_text("utf-8"))
    return {**data["achieved"], "launch_s": data["device"]["launch_s"]}


if __name__ == "__main__":
    main()
