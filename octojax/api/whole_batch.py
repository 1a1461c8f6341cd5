"""The loss of every microbatch as a summand of the whole batch's, and what that reads of it."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import octojax
from octojax import compat
from octojax.api.options import Options
from octojax.errors import LossError, OctoPipeError, RowsWarning
from octojax.frontends import PureLoss
from octojax.jaxprs.shardings import evaluate
from octojax.programs.microbatch import Kind, Microbatches
from octojax.rows.join import Join, declared
from octojax.rows.whole import WEIGHT, Portion, WholeLoss, whole_loss
from octojax.trace import TracedLoss, trace_loss

_MOST_LINES = 6  # of the user's that a warning names


class WholeBatch:
    """A loss, and a batch that is cut into microbatches.

    `traced(m)` is the loss of microbatch m, rewritten so that losses add up; `batch` is the cut
    of the batch with the values of the whole batch that microbatches read as further leaves.
    """

    def __init__(self, pure: PureLoss, split: Microbatches, tree: Any, options: Options) -> None:
        self.pure, self.split, self.tree, self.options = pure, split, tree, options
        self._by_size: dict[int, WholeLoss] = {}
        self.batch = split.extended([(e.name, e.aval, e.rows) for e in self.first.extras])

    @cached_property
    def first(self) -> WholeLoss:
        return self._rewritten(0)

    @property
    def joins(self) -> tuple[Join, ...]:
        return self.first.joins

    def traced(self, microbatch: int) -> TracedLoss:
        """Returns the loss of a microbatch, as one data shard sees it.

        Raises `LossError` where microbatches of two sizes want other values of the whole batch.
        """
        loss = self._rewritten(microbatch)
        places = [[e.place for e in x.extras] for x in (loss, self.first)]
        if places[0] != places[1] or loss.joins != self.first.joins:
            raise LossError(
                f"the loss of {self.split.sizes[microbatch]} rows has other operations than the "
                f"loss of {self.split.sizes[0]} rows. Choose microbatches that divide the "
                f"{self.split.num_rows} rows of the batch"
            )
        return loss.traced

    # ------------------------------------------------------------------ tracing

    def _rewritten(self, microbatch: int) -> WholeLoss:
        size = self.split.sizes[microbatch]
        if size not in self._by_size:
            traced = self._trace_part(microbatch)
            rules = declared(self.options.aux, traced.aux.names)
            whole = traced if self._pieces == 1 else self._whole
            portion = self._portion(microbatch)
            loss = None
            for probe in self._probes(microbatch):
                loss = whole_loss(traced, whole, portion, rules, probe)
                if loss.unaligned is None:
                    break
            assert loss is not None
            self._by_size[size] = loss
        return self._by_size[size]

    @property
    def _pieces(self) -> int:
        return self.split.count * self.split.shards

    def _portion(self, microbatch: int) -> Portion:
        split = self.split
        share = split.shares[microbatch] / split.shards
        if self.options.reduction == "sum":
            share = 1.0
        weighted = self.options.weight is not None and self._pieces > 1
        kinds = tuple(kind.value for kind in split.kinds)
        return Portion(kinds, share, self._pieces, weighted and "rows" in kinds)

    def _trace(self, leaves: Sequence[Any]) -> TracedLoss:
        batch = self.tree.unflatten(leaves)
        return trace_loss(self.pure.fn, self.pure.params, batch, self.pure.state)

    @cached_property
    def _whole(self) -> TracedLoss:
        return self._trace(self.split.avals)

    def _trace_part(self, microbatch: int) -> TracedLoss:
        """Returns the loss of a microbatch. Raises `LossError` where only that of all rows runs."""
        try:
            return self._trace(self.split.shapes(microbatch))
        except OctoPipeError:
            raise
        except Exception as error:
            if self._pieces == 1 or not self._runs_whole():
                raise
            rows = self.split.sizes[microbatch] // self.split.shards
            frames = traceback.extract_tb(error.__traceback__)
            where = [f"{f.filename}:{f.lineno}" for f in frames if _is_users(f.filename)]
            place = where[-1] if where else "an unknown line"
            alike = [
                name
                for name, kind in zip(self.split.names, self.split.kinds, strict=True)
                if kind is Kind.ROWS
            ]
            raise LossError(
                f"the loss takes the whole batch of {self.split.num_rows} rows, but not the "
                f"{rows} rows of a microbatch, for which it is traced: at {place}: {error}\n"
                f"A leaf of the batch that has no rows but is as long ({', '.join(alike)} are "
                f"split) must be named: shared=('path',). An array of {self.split.num_rows} rows "
                f"that the loss closes over belongs into the batch; a number of rows taken from "
                f"outside must be taken from the batch's shape"
            ) from error

    def _runs_whole(self) -> bool:
        try:
            return bool(self._whole)
        except Exception:  # whatever it is, the microbatch's own error says it
            return False

    def _probes(self, microbatch: int) -> Iterator[TracedLoss | None]:
        """Yields traces to compare the whole batch's with, the best first; None: the
        microbatch's own. Of a single row JAX leaves out operations that others need."""
        rows, every = self.split.sizes[microbatch] // self.split.shards, self.split.num_rows
        if self._pieces == 1 or Kind.ROWS not in self.split.kinds:
            yield None
            return
        if rows > 1:
            yield None
        for other in (2 * rows, 4 * rows):
            if other != every and (trace := self._trace_rows(other)) is not None:
                yield trace
        if rows == 1:
            yield None

    def _trace_rows(self, rows: int) -> TracedLoss | None:
        shapes = [
            jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) if kind is Kind.ROWS else a
            for a, kind in zip(self.split.avals, self.split.kinds, strict=True)
        ]
        try:
            return self._trace(shapes)
        except Exception:  # a loss of just these numbers of rows
            return None

    # ------------------------------------------------------------------ what mixes rows

    def check(self) -> None:
        """Warns (or raises, with `strict`) of rows that the loss mixes in other ways than by
        sums, once, with the user's lines."""
        loss = self.first
        if self._pieces == 1 or (not loss.mixing and loss.unaligned is None):
            return
        if self.options.weight is not None and not self.options.strict:
            return
        split = self.split
        size = split.sizes[0] // split.shards
        if loss.unaligned is not None:
            eqn = loss.unaligned.eqn
            where = "" if eqn is None else f" at {user_line(eqn)}"
            why = (
                f"the loss of {size} rows has other operations than that of all {split.num_rows}"
                f"{where} ({loss.unaligned.why}), so its rows cannot be followed"
            )
        else:
            lines = lines_of(loss.mixing)
            more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
            why = f"the loss mixes the rows of its batch at {'; '.join(lines[:_MOST_LINES])}{more}"
        text = (
            f"these gradients will be those of the {split.count} microbatches of {size} rows, not "
            f"of the whole batch: {why}. See docs/exactness.md; weight= says what a microbatch "
            f"counts, strict=True makes this an error"
        )
        if self.options.strict:
            raise LossError(f"strict=True: {text}")
        warnings.warn(text, RowsWarning, stacklevel=5)  # the caller of compile or value_and_grad

    # ------------------------------------------------------------------ values of the whole batch

    @cached_property
    def evaluate(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """From the leaves of a batch to the further leaves of `batch`; None if there are none."""
        extras, program = self.first.extras, self.first.evaluate
        if not extras:
            return None

        def run(leaves: Sequence[Any]) -> list[Any]:
            values = [] if program is None else evaluate(program, leaves, None)
            if extras[-1].place == WEIGHT:
                values.append(self._weights(leaves))
            return values

        return run

    def _weights(self, leaves: Sequence[Any]) -> Any:
        """Returns every row's part of the weight of its microbatch."""
        split, weight = self.split, self.options.weight
        assert weight is not None
        shards = tuple(range(split.shards)) if split.shards > 1 else (None,)
        weights, sizes = [], []
        for m, size in enumerate(split.sizes):
            for shard in shards:
                parts = [split.piece(i, x, m, shard) for i, x in enumerate(leaves)]
                value = jnp.asarray(weight(self.tree.unflatten(parts)), jnp.float32)
                if value.shape:
                    raise LossError(f"weight= returned an array {value.shape}, expected a scalar")
                weights.append(value)
                sizes.append(size // split.shards)
        stacked = jnp.stack(weights)
        each = stacked / stacked.sum() / np.asarray(sizes, np.float32)
        return jnp.repeat(each, np.asarray(sizes), total_repeat_length=split.num_rows)


def lines_of(eqns: Sequence[Any]) -> list[str]:
    """Returns the user's lines of equations, each once, with the first operation there."""
    texts: dict[str, str] = {}
    for eqn in eqns:
        text = user_line(eqn)
        texts.setdefault(text.split(" (")[0], text)
    located = [text for text in texts.values() if " (" in text]
    return located or list(texts.values())


def user_line(eqn: Any) -> str:
    """Where an equation comes from: `file:line (function)`, the innermost of the user's."""
    lines = compat.user_lines(eqn)
    outside = [x for x in lines if _is_users(x[0])]
    if not lines:
        return eqn.primitive.name
    file, line, function = (outside or lines)[0]
    return f"{file}:{line} ({eqn.primitive.name} in {function.split('.')[-1]})"


def _is_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith(str(Path(octojax.__file__).parent))


def leaves_without_rows(
    names: Sequence[str], ndims: Sequence[int], options: Options
) -> frozenset[int]:
    """Returns which leaves of the batch `rows=` and `shared=` say to be the same for all.

    Raises `ValueError` for a name that no leaf has.
    """
    choice = options.rows if options.rows is not None else options.shared
    if choice is None:
        return frozenset()
    paths = (str(choice),) if isinstance(choice, (str, int)) else tuple(map(str, choice))
    named = {
        path: {k for k, name in enumerate(names) if name == path or name.startswith(f"{path}.")}
        for path in paths
    }
    unknown = [path for path, leaves in named.items() if not leaves]
    if unknown:
        option = "rows" if options.rows is not None else "shared"
        raise ValueError(
            f"{option}= names {', '.join(unknown)}, which the batch does not have; its leaves are "
            f"{', '.join(names)}"
        )
    hits = set().union(*named.values())
    arrays = {k for k, ndim in enumerate(ndims) if ndim}
    return frozenset(arrays - hits if options.rows is not None else hits)
