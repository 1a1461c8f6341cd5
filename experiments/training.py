"""One training run from text to files. Imports JAX: set the device count before."""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import corpus
import jax
import meshes
import numpy as np
import optax
import planning
from optimizers import warmed_up
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from runner import Build, Settings, Sizes, settings_json

import octojax as octopipe
from octojax import report
from octojax.errors import OctoPipeError
from octojax.models import count_parameters

EXTRAS_BEFORE_S = 75.0
EVALUATIONS = 8  # batches of held-out text
RUN_S = 120.0
"""A default run ends within two minutes: no extra begins after 75 s, and the race ends with it."""
INSISTED_S = 1200.0  # the race's limit with --race
RACE = "race of one core against two"
LEVELS = "▁▂▃▄▅▆▇█"


@dataclass
class Experiment:
    """A run in the making: what is known of it grows in `summary`, which is written last."""

    settings: Settings
    build: Build
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    summary: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        s = self.settings
        self.text = corpus.load(s.data, s.length)
        model, self.loss = self.build(Sizes(corpus.VOCABULARY, s.width, s.layers, s.seed))
        meshes.check(s.axes, s.batch, s.microbatches, model)
        s.out.mkdir(parents=True, exist_ok=True)
        self.summary |= {"settings": settings_json(s), "parameters": count_parameters(model)}
        self.say(
            f"[bold]{s.name}[/]: {self.summary['parameters']:,} parameters, {self.text.source}, "
            f"{s.batch} samples of {s.length} bytes a step, {s.ranks} ranks, "
            f"{s.microbatches} microbatches" + (f", {meshes.shape(s.mesh)}" if s.mesh else "")
        )
        batch = self.text.batch(0, s.batch, s.length, s.seed)
        plans = self.plan(model, batch)
        with self.timed("compile"):
            step = self.compile(model, batch, **plans.chosen)
            state = step.init()
        self.show(step, plans)
        if s.check:
            self.compare_with_unpipelined(step, state, batch)
        state = self.train(step, state)
        if s.evaluate or (s.evaluate is None and self.in_time("held-out text", "--evaluate")):
            self.evaluate(step, state)
        if plans.profile and (s.race or (s.race is None and self.in_time(RACE, "--race"))):
            self.race()
        self.summary["total_s"] = time.perf_counter() - self.began
        self.write("summary.json", json.dumps(self.summary, indent=1) + "\n")
        self.say(
            f"took {self.summary['total_s']:.0f} s, of which compiling "
            f"{self.summary['seconds'].get('compile', 0):.0f} s"
        )

    # ------------------------------------------------------------------ planning and compiling

    def plan(self, model: Any, batch: Any) -> planning.Plans:
        s = self.settings
        if s.schedule != "auto":
            return planning.Plans({"schedule": s.schedule})
        with self.timed("profile"), planning.tuner_compilation():
            profile = planning.measured(model, self.loss, self.optimizer, batch, s)
        with self.timed("tune"):
            plans = planning.tuned(profile, s)
        profile.save(s.out / "profile.json")
        return plans

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return warmed_up(self.settings)

    def compile(self, model: Any, batch: Any, **plan: Any) -> Any:
        s = self.settings
        count = meshes.devices(s.axes)
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:count]).reshape(tuple(s.axes.values())), tuple(s.axes)
        )
        return octopipe.compile(
            model,
            self.loss,
            self.optimizer,
            batch,
            mesh=mesh,
            microbatches=s.microbatches,
            param_specs=meshes.param_specs(s.axes),
            **plan,
        )

    def show(self, step: Any, plans: planning.Plans) -> None:
        """Prints the plan as a picture and writes it in every form."""
        profile = plans.profile or planning.from_operations(step.layers, self.settings)
        panels, lines = plans.pictures(step.plan, profile)
        self.say(f"{step.layers.num_layers} layers found, {step.plan.num_stages} stages")
        print(report.render_text(panels), end="")
        for line in lines:
            self.say(line)
        step.plan.save(self.settings.out / "plan.json")
        step.plan.schedule.save(self.settings.out / "schedule.csv")
        self.write("timeline.html", report.render_html(panels, f"{self.settings.name}: plan"))
        self.write("timeline.svg", report.render_svg(panels))
        self.write("trace.json", json.dumps(report.to_trace(panels)) + "\n")
        self.summary["simulated"] = plans.summary(step.plan, profile)

    # ------------------------------------------------------------------ checking and training

    def compare_with_unpipelined(self, step: Any, state: Any, batch: Any) -> None:
        """Prints how far loss and gradients are from those of the model on one device."""
        with self.timed("check"):
            value, _, gradients = step.value_and_grad(state, batch)
            plain_value, plain = step.reference(state, batch)
        errors = [
            relative_error(a, b)
            for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True)
        ]
        loss_error = abs(float(value) - float(plain_value)) / abs(float(plain_value))
        self.summary["check"] = {"loss": loss_error, "gradients": max(errors)}
        self.say(
            f"against the unpipelined model: loss {float(value):.6f} and {float(plain_value):.6f}, "
            f"relative error {loss_error:.1e}; largest of {len(errors)} gradients "
            f"[bold]{max(errors):.1e}[/]"
        )

    def race(self) -> None:
        """Prints what one core and two make of a step; says why if there is no race."""
        from race import race, why_not

        s = self.settings
        left_s = RUN_S - (time.perf_counter() - self.began)
        problem = why_not() or (None if jax.default_backend() == "cpu" else "it is for CPU cores")
        if len(s.axes) > 1:
            problem = "its two processes have one device each"
        if problem is None:
            with self.timed("race"):
                try:
                    outcome = race(s, INSISTED_S if s.race else left_s)
                except (RuntimeError, OctoPipeError) as error:
                    problem = str(error)
                else:
                    self.summary["race"] = asdict(outcome)
                    for line in outcome.lines():
                        self.say(line)
        if problem is not None:
            self.summary["race"] = {"left_out": problem}
            self.say(f"race of one core against two left out: {problem}")

    def train(self, step: Any, state: Any) -> Any:
        s = self.settings
        values, times = [], []
        tokens = s.batch * s.length
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
        )
        with (
            (s.out / "metrics.jsonl").open("w", encoding="utf-8") as file,
            Progress(*columns, console=self.console) as progress,
        ):
            task = progress.add_task("", total=s.steps, loss=float("nan"), rate=0.0)
            for number in range(s.steps):
                batch = self.text.batch(number, s.batch, s.length, s.seed)
                start = time.perf_counter()
                state, metrics = step(state, batch)
                value, norm = float(metrics["loss"]), float(metrics["grad_norm"])
                times.append(time.perf_counter() - start)
                values.append(value)
                if not np.isfinite(value):
                    raise ValueError(f"step {number}: the loss is {value}; try a smaller --lr")
                rate = tokens / statistics.median(times)
                line = {"step": number, "loss": value, "grad_norm": norm, "seconds": times[-1]}
                file.write(json.dumps({**line, "tokens_per_s": tokens / times[-1]}) + "\n")
                progress.update(task, advance=1, loss=value, rate=rate)
        rate = tokens / statistics.median(times)
        self.summary |= {
            "loss": [values[0], values[-1]],
            "tokens_per_s": rate,
            "step_s": statistics.median(times),
        }
        self.say(
            f"loss {values[0]:.3f} {sparkline(values)} [bold]{values[-1]:.3f}[/] "
            f"in {s.steps} steps, {rate:,.0f} tokens/s "
            f"({statistics.median(times) * 1e3:.0f} ms a step, median)"
        )
        return state

    def evaluate(self, step: Any, state: Any) -> None:
        """Prints the loss on the held-out text."""
        s = self.settings
        with self.timed("evaluate"):
            batches = (self.text.evaluation(s.batch, s.length, k) for k in range(EVALUATIONS))
            value = statistics.mean(float(step.evaluate(state, b)["loss"]) for b in batches)
        self.summary["held_out_loss"] = value
        self.say(f"held-out loss {value:.3f} nats a byte ({value / np.log(2):.2f} bits)")

    # ------------------------------------------------------------------ small things

    def in_time(self, what: str, option: str) -> bool:
        """Whether there is time for an extra; says so if there is not."""
        elapsed = time.perf_counter() - self.began
        if elapsed > EXTRAS_BEFORE_S:
            self.say(f"{what} left out after {elapsed:.0f} s; {option} insists")
        return elapsed <= EXTRAS_BEFORE_S

    def say(self, line: str) -> None:
        self.console.print(line)

    def write(self, name: str, content: str) -> None:
        (self.settings.out / name).write_text(content, encoding="utf-8")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.summary.setdefault("seconds", {})[what] = time.perf_counter() - start


def relative_error(a: jax.Array, b: jax.Array) -> float:
    """Returns the largest difference, relative to the largest value."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-12))


def sparkline(values: list[float], width: int = 24) -> str:
    """Returns the values' course as a line of small bars."""
    picked = [values[i * (len(values) - 1) // max(1, width - 1)] for i in range(width)]
    picked = picked if len(values) >= width else values
    low, high = min(picked), max(picked)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((v - low) * scale)] for v in picked)
