"""What each primitive does with rows, by comparing its shapes in both traces.

A dimension whose size differs between a microbatch and the whole batch holds rows. The rules
say whether row i of a result comes from row i of the operands; what crosses rows is blamed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from jax.extend.core import Literal

from octojax.rows.pairs import Pair, shape
from octojax.rows.state import Group, Rows, union

States = Sequence[Rows]

ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
        "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj",
        "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
        "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log",
        "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not",
        "optimization_barrier", "or", "polygamma", "population_count", "pow", "real",
        "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
        "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta",
        "clz", "eq_to", "le_to", "lt_to", "mulhi", "random_wrap", "random_unwrap",
        "random_fold_in", "bitcast_convert_type", "random_clone", "threefry4x32", "philox2x32",
        "philox4x32", "sharding_constraint", "layout_constraint", "device_put", "reshard",
        "pvary", "psum", "psum_invariant", "pmax", "pmin",
        "pin", "unpin", "zeros_like", "tie", "with_memory_space_constraint",
    }
)  # fmt: skip
LINEAR = frozenset(
    {
        "add", "add_any", "sub", "neg", "convert_element_type", "copy", "real",
        "imag", "name", "stop_gradient", "reduce_precision", "optimization_barrier",
        "reduce_sum", "reshape", "squeeze", "transpose", "broadcast_in_dim", "slice",
        "concatenate", "rev", "split", "cumsum", "stack", "unstack", "pad",
    }
)  # fmt: skip
"""Linear in all their operands together (of `pad`, with zeros)."""

_JOINS = {"reduce_max": "max", "reduce_min": "min", "reduce_and": "all", "reduce_or": "any"}


def linear_operands(pair: Pair, states: States) -> tuple[int, ...] | None:
    """Returns the operands in which an equation is linear, of those from rows; else None."""
    live = any((s.lumped or s.partial) and not s.fixed for s in states)
    lumped = tuple(
        i for i, s in enumerate(states) if s.partial or (s.lumped and not (live and s.fixed))
    )
    name = pair.name
    if name == "convert_element_type":
        real = pair.probe.params["new_dtype"]
        before = pair.probe.invars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
        kinds = "fcV" if before.kind in "fcV" else "biufcV"
        return lumped if real.kind in kinds and real.kind != "b" else None
    if name in LINEAR:
        return lumped
    if name in ("mul", "dot_general"):
        return lumped if len(lumped) == 1 else None
    if name in ("div", "gather", "dynamic_slice"):
        return lumped if lumped == (0,) else None
    if name == "select_n":
        return lumped if 0 not in lumped else None
    return None


def apply(pair: Pair, states: States, number: int) -> list[Rows]:
    """What the results of an equation have to do with rows. `number` is its own, for blame."""
    results = _by_rule(pair, states, number)
    nonlinear = any(s.partial for s in states) and linear_operands(pair, states) is None
    by_turns = any(s.turn for s in states) and any(s.of_rows for s in states)
    if nonlinear or by_turns or _by_size(pair):
        results = [blamed(state, number) for state in results]
    return [replace(s, even=_even(pair, k, states)) for k, s in enumerate(results)]


def _by_size(pair: Pair) -> bool:
    """Whether an equation has another exponent, or cuts elsewhere, for another number of rows."""
    if pair.name in ELEMENTWISE:
        return pair.probe.params != pair.whole.params
    keys = {"slice": ("start_indices", "limit_indices"), "pad": ("padding_config",)}
    micro, whole = pair.shapes(0) if pair.name in keys else ((), ())
    return any(
        pair.probe.params[key][d] != pair.whole.params[key][d]
        for key in keys.get(pair.name, ())
        for d in range(len(micro))
        if micro[d] == whole[d]
    )


def _even(pair: Pair, output: int, states: States) -> frozenset[int]:
    """Returns dimensions of a result along which all entries are known to be equal."""
    size = pair.results(output)[1]
    params = pair.whole.params
    if pair.name == "iota":
        return frozenset(d for d in range(len(size)) if d != params["dimension"])
    if pair.name in ELEMENTWISE:
        dims = range(len(size))
        return frozenset(
            d for d in dims if all(is_even(pair, k, d, s) for k, s in enumerate(states))
        )
    to = _kept_dims(pair)
    if to is None:
        return frozenset()
    even = {to[d] for d in states[0].even if d in to}
    if pair.name == "broadcast_in_dim":
        before = pair.shapes(0)[1]
        even |= set(range(len(size))) - {to[d] for d in to if before[d] != 1}
    return frozenset(even)


def _kept_dims(pair: Pair) -> dict[int, int] | None:
    """Returns which dimension of the result each of the operand is, where dimensions only move."""
    params, before = pair.whole.params, pair.shapes(0)[1] if pair.whole.invars else ()
    if pair.name == "broadcast_in_dim":
        return dict(enumerate(params["broadcast_dimensions"]))
    if pair.name == "transpose":
        return {d: k for k, d in enumerate(params["permutation"])}
    if pair.name == "squeeze":
        return _without(len(before), (d % len(before) for d in params["dimensions"]))
    if pair.name in _JOINS or pair.name == "reduce_sum":
        return _without(len(before), params["axes"])
    if pair.name == "reshape":
        after = pair.results()[1]
        old = [d for d, n in enumerate(before) if n != 1]
        new = [d for d, n in enumerate(after) if n != 1]
        same = [before[d] for d in old] == [after[d] for d in new]
        return dict(zip(old, new)) if same else None
    return None


def is_even(pair: Pair, operand: int, dim: int, state: Rows) -> bool:
    """Whether all entries of an operand along a dimension (of the result) are equal."""
    size = pair.shapes(operand)[1]
    return not size or size[dim] == 1 or dim in state.even


def _by_rule(pair: Pair, states: States, number: int) -> list[Rows]:
    base = union(states)
    if any(s.lumped for s in states) and not any(s.groups or s.each for s in states):
        return _of_lumps(pair, states, base, number)
    if any(s.lumped for s in states):  # a sum over rows enters the values of each
        added = any(s.added for s in states)
        blame = base.blame | ({number} if added else set())
        base = replace(base, own=False, blame=frozenset(blame), inner=base.inner or added)
        states = [replace(s, added=False, own=False) for s in states]
    rule = _RULES.get(pair.name)
    if pair.name in ELEMENTWISE:
        rule = _elementwise
    if rule is None:
        rule = _unknown
    outcome = rule(pair, states, base, number)
    results = list(outcome) if isinstance(outcome, list) else [outcome] * len(pair.probe.outvars)
    return [checked(pair, k, state, number) for k, state in enumerate(results)]


def blamed(state: Rows, number: int) -> Rows:
    """Returns the state of what mixes rows at this equation."""
    return replace(
        state, own=not state.groups, blame=state.blame | {number}, number=None, each=False
    )


def row_dims(micro: Sequence[int], whole: Sequence[int]) -> list[int]:
    return [k for k, (a, b) in enumerate(zip(micro, whole, strict=True)) if a != b]


def checked(pair: Pair, output: int, state: Rows, number: int) -> Rows:
    """Returns the state, with every dimension that differs between the traces in a group."""
    micro, whole = pair.results(output)
    differ = row_dims(micro, whole)
    lost = [g for g in state.groups if not (g.partial or set(g.dims) & set(differ))]
    if lost and not (state.lumped or len(lost[0].dims) > 1):  # one row was broadcast to many
        state = state.with_groups(g for g in state.groups if g not in lost)
        state = blamed(state, number) if any(g.outer is not None for g in lost) else state
    group_dims = {d for g in state.groups for d in g.dims}
    missing = [d for d in differ if d not in group_dims]
    if state.lumped and differ:  # a sum handed to each row
        if state.added:
            state = replace(state, blame=state.blame | {number}, inner=True)
        state = replace(state, added=False, own=False)
    if missing and state.partial:  # a sum handed to each row
        state = blamed(replace(state, inner=True), number)
    if missing:
        state = state.with_groups([*state.groups, *(Group((d,), None) for d in missing)])
    return state


def _of_lumps(pair: Pair, states: States, base: Rows, number: int) -> list[Rows]:
    """Returns results of operands without rows, some of which come from all rows.

    Next to sums of what depends on parameters, what the batch alone decides is a coefficient.
    """
    if any(s.lumped and not s.fixed for s in states):
        states = [
            replace(s, added=False, own=False, size=False, blame=frozenset()) if s.fixed else s
            for s in states
        ]
        base = union(states)
    added = any(s.added for s in states)
    if linear_operands(pair, states) is not None:
        state = replace(base, added=added)
    else:
        blame = base.blame | ({number} if added else frozenset())
        state = replace(base, own=True, blame=frozenset(blame))
    return [checked(pair, k, state, number) for k in range(len(pair.probe.outvars))]


def merged(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    """Returns the state of values computed element by element from operands of one shape."""
    real: dict[tuple[int, ...], Group] = {}
    constant: dict[tuple[int, ...], Group] = {}
    clash = False
    for state in states:
        for group in state.groups:
            if group.outer is None:
                previous = constant.get(group.dims, group)
                same = previous.blocks == group.blocks
                constant[group.dims] = group if same else replace(group, blocks=None)
                continue
            clash |= real.get(group.dims, group) != group
            real[group.dims] = group
    ends = list(enumerate(states))
    for group in real.values():
        others = [(k, s) for k, s in ends if group not in s.groups]
        if group.spread and not (group.partial and pair.name in ("add", "add_any", "sub")):
            clash |= not all(is_even(pair, k, d, s) for k, s in others for d in group.dims)
        clash |= any(
            g.dims == group.dims
            and g.blocks != group.outer
            and not all(is_even(pair, k, d, s) for d in g.dims)
            for k, s in others
            for g in s.groups
        )
    several = [s for s in states if any(g.outer is not None for g in s.groups)]
    mixes = len(real) > 1 and any(
        {g.dims for g in s.groups if g.outer is not None} != set(real) for s in several
    )
    covered = {d for dims in real for d in dims}
    groups = [*real.values(), *(g for d, g in constant.items() if not covered & set(d))]
    state = base.with_groups(groups)
    return blamed(state, number) if clash or mixes else state


def _elementwise(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    numbers = [s for s in states if s.number is not None]
    if numbers and pair.name == "lt" and _zero(pair.probe.invars[1]):
        return replace(merged(pair, states, base, number), number=None)
    state = merged(pair, states, base, number)
    if numbers and pair.name in ("convert_element_type", "copy"):
        return replace(state, number=numbers[0].number)
    if numbers:
        return replace(state, number=None, own=not state.groups, size=True)
    return state


def _zero(atom: object) -> bool:
    return isinstance(atom, Literal) and not shape(atom) and atom.val == 0


def _with_dims(groups: Iterable[Group], to: Mapping[int, int]) -> list[Group] | None:
    """Returns the groups with their dimensions renamed; None where one is gone."""
    result = []
    for group in groups:
        if any(d not in to for d in group.dims):
            return None
        result.append(replace(group, dims=tuple(to[d] for d in group.dims)))
    return result


def _without(rank: int, gone: Iterable[int]) -> dict[int, int]:
    gone = set(gone)
    remaining = [d for d in range(rank) if d not in gone]
    return {d: k for k, d in enumerate(remaining)}


def _reduce(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    axes = pair.probe.params["axes"]
    state = states[0]
    rank = len(pair.shapes(0)[0])
    return reduced(replace(base, groups=state.groups), rank, axes, number, pair.name)


def reduced(state: Rows, rank: int, axes: Iterable[int], number: int, name: str) -> Rows:
    """Returns the state after a reduction over some dimensions."""
    axes = set(axes)
    to = _without(rank, axes)
    stay, whole, part = [], [], []
    for group in state.groups:
        inside = [d for d in group.dims if d in axes]
        if not inside:
            stay.append(replace(group, dims=tuple(to[d] for d in group.dims)))
        elif len(inside) == len(group.dims):
            whole.append(group)
        else:
            rest = tuple(to[d] for d in group.dims if d not in axes)
            part.append(replace(group, dims=rest, partial=True))
    state = state.with_groups([*stay, *part])
    if not whole and not part:
        return state
    clean = not state.blame
    if name != "reduce_sum":
        join = _JOINS.get(name, "") if clean and not stay and not part else ""
        partial = any(g.partial for g in whole)
        return replace(blamed(state, number), join="" if partial else join)
    if part:
        return state
    if stay:  # values of pairs of rows, added for each
        real = any(g.outer is not None for g in whole) and any(g.outer is not None for g in stay)
        return replace(state, inner=True) if real else blamed(replace(state, inner=True), number)
    if len([g for g in whole if g.outer is not None]) > 1:
        return replace(blamed(state, number), inner=False)
    return replace(state, added=True, own=False, inner=False, number=None)


def _argreduce(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    axes = pair.probe.params["axes"]
    rank = len(pair.shapes(0)[0])
    return reduced(replace(base, groups=states[0].groups), rank, axes, number, pair.name)


def _along(axis_of: Callable[[Pair], Iterable[int]]) -> Callable[..., Rows]:
    """Returns the rule of what mixes along some dimensions and keeps the shape."""

    def rule(pair: Pair, states: States, base: Rows, number: int) -> Rows:
        axes = set(axis_of(pair))
        state = merged(pair, states, base, number)
        still = states[0].even if pair.name in ("rev", "sort") else frozenset()
        along = [g for g in state.groups if set(g.dims) & axes]
        mixes = any(g.outer is not None or not set(g.dims) <= still for g in along)
        numbers = any(s.number is not None for s in states)
        return blamed(state, number) if mixes or numbers else state

    return rule


def _transpose(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    to = {d: k for k, d in enumerate(pair.probe.params["permutation"])}
    return base.with_groups(_with_dims(states[0].groups, to) or ())


def _squeeze(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    rank = len(pair.shapes(0)[0])
    to = _without(rank, (d % rank for d in pair.probe.params["dimensions"]))
    groups = _with_dims(states[0].groups, to)
    state = replace(base, number=states[0].number)
    return state.with_groups(groups) if groups is not None else blamed(state, number)


def _broadcast(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    dims = pair.probe.params["broadcast_dimensions"]
    groups = _with_dims(states[0].groups, dict(enumerate(dims))) or []
    return replace(base, number=states[0].number).with_groups(groups)


def _reshape(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    state = replace(base, number=states[0].number)
    if not states[0].groups:
        return state
    before, after = pair.shapes(0), pair.results()
    groups = []
    for group in states[0].groups:
        new_group = _regrouped(group, before, after)
        if new_group is None:
            scrambled = state.with_groups(
                Group((d,), 1) for d in row_dims(*after) or range(len(after[0]))[:1]
            )
            return blamed(scrambled, number)
        groups.append(new_group)
    return state.with_groups(groups)


Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def _regrouped(group: Group, before: Shapes, after: Shapes) -> Group | None:
    """Returns a group of dimensions after a reshape of (microbatch, whole batch) shapes."""
    segments = _segments(before, after)
    inside = [s for s in segments if set(group.dims) & set(range(*s[0]))]
    if len(inside) != 1 or not set(group.dims) <= set(range(*inside[0][0])):
        return None
    if list(group.dims) != list(range(group.dims[0], group.dims[-1] + 1)):
        return None
    (first, last), (start, stop) = inside[0]
    differ = [d for d in range(start, stop) if after[0][d] != after[1][d]]
    if group.partial and (first, last) != (start, stop):
        return None if len(differ) > 1 else replace(group, dims=tuple(range(start, stop)))
    if len(differ) != 1:
        return None
    (at,) = differ
    count = group.blocks if group.outer is None else group.outer
    outside = prod(before[1][first : group.dims[0]]) * (count or 0)
    leading = prod(after[1][start:at])
    if group.outer is None:
        whole = outside and outside % leading == 0
        return Group((at,), None, blocks=outside // leading if whole else None)
    if outside % leading == 0:
        return Group((at,), outside // leading)
    # The rows are cut into a fixed number of chunks: they lie over all these dimensions.
    lead = start
    while lead < at and outside % after[1][lead] == 0:
        outside //= after[1][lead]
        lead += 1
    return Group(tuple(range(lead, at + 1)), outside)


def _segments(before: Shapes, after: Shapes) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the smallest runs of dimensions of equal size, in both traces, before and after."""
    segments, i, j = [], 0, 0
    while i < len(before[0]) or j < len(after[0]):
        first, start = i, j
        old, new = [1, 1], [1, 1]
        while True:
            if old == new and (i > first or j > start):
                break
            if i < len(before[0]) and (old[1] <= new[1] or j >= len(after[0])):
                old = [x * before[t][i] for t, x in enumerate(old)]
                i += 1
            elif j < len(after[0]):
                new = [x * after[t][j] for t, x in enumerate(new)]
                j += 1
            else:
                break
        segments.append(((first, i), (start, j)))
    return segments


def _concatenate(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    axis = pair.probe.params["dimension"]
    state = merged(pair, states, base, number)
    along = [g for g in state.groups if axis in g.dims]
    if not along:
        columns = [s for s in states if s.number is not None]
        last = axis == len(pair.shapes(0)[0]) - 1
        single = all(shape(x)[axis] == 1 for x in pair.whole.invars)
        if len(columns) == 1 and last and single:
            return replace(state, number=list(states).index(columns[0]))
        return state
    sizes = {shape(x)[axis] for x in pair.whole.invars}
    here = [next((g for g in s.groups if axis in g.dims), None) for s in states]
    count = len(states)
    even = len(sizes) == 1 and all(g is not None and len(g.dims) == 1 for g in here)
    outers = {g.outer for g in here if g is not None} - {None}
    if not even or len(outers) > 1:
        return blamed(state, number) if count > 1 else state
    outer = count * (outers.pop() or 1) if outers else None
    others = [g for g in state.groups if axis not in g.dims]
    repeats = {g.blocks for g in here if g is not None and g.outer is None}
    blocks = {count * k for k in repeats if k}
    if outer is not None and repeats and blocks != {outer}:
        return blamed(state, number)
    regular = len(repeats) == 1 and bool(blocks)
    group = Group((axis,), outer, blocks=blocks.pop() if regular and outer is None else 1)
    if outer is None and not regular:
        group = replace(group, blocks=None)
    return state.with_groups([*others, group])


def _pieces(pair: Pair, states: States, base: Rows, number: int, bounds: Sequence[Shapes]) -> Rows:
    """Returns the state of a part of an array: `bounds`: (start, stop) per dimension and trace."""
    state = replace(base, groups=states[0].groups)
    micro, whole = pair.shapes(0)
    groups = []
    mixes = False
    for group in state.groups:
        for d in group.dims:
            (a0, a1), (b0, b1) = bounds[d]
            if (a0, a1, b0, b1) == (0, micro[d], 0, whole[d]):
                continue
            if group.outer is None:
                group = replace(group, blocks=None)
                continue
            if len(group.dims) > 1 and micro[d] == whole[d]:
                mixes = True
                continue
            block = micro[d] // group.outer, whole[d] // group.outer
            starts = a0 / block[0] == b0 / block[1] and a0 % block[0] == 0
            sizes = (a1 - a0) / block[0] == (b1 - b0) / block[1] and (a1 - a0) % block[0] == 0
            if not (starts and sizes) or len(group.dims) > 1:
                mixes = True
                continue
            group = replace(group, outer=(a1 - a0) // block[0])
        groups.append(group)
    out = row_dims(*pair.results())
    if mixes:
        remaining = [g for g in groups if set(g.dims) & set(out) or len(g.dims) > 1]
        return blamed(state.with_groups(remaining), number)
    return state.with_groups(groups)


def _slice(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    p, q = pair.probe.params, pair.whole.params
    strides = [p["strides"] or (1,) * len(p["start_indices"])][0]
    bounds = []
    for d, stride in enumerate(strides):
        mine = (p["start_indices"][d], p["limit_indices"][d])
        other = (q["start_indices"][d], q["limit_indices"][d])
        differ = pair.shapes(0)[0][d] != pair.shapes(0)[1][d]
        bounds.append((mine, other) if stride == 1 or not differ else ((-1, -1), (-1, -1)))
    return _pieces(pair, states, base, number, bounds)


def _dynamic_slice(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    sizes, micro = pair.probe.params["slice_sizes"], pair.shapes(0)[0]
    starts_by_rows = any(s.groups or s.each or s.lumped for s in states[1:])
    whole_sizes, whole = pair.whole.params["slice_sizes"], pair.shapes(0)[1]
    bounds = [
        ((0, micro[d]), (0, whole[d]))
        if sizes[d] == micro[d] and whole_sizes[d] == whole[d]
        else ((-1, -1), (-1, -1))
        for d in range(len(sizes))
    ]
    state = _pieces(pair, states, base, number, bounds)
    if starts_by_rows and not any(s.each for s in states[1:]):
        return blamed(state, number)
    return state


def _update_slice(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    operand, update, *starts = states
    state = merged(pair, [operand, update], base, number)
    covered = all(
        pair.shapes(0)[t][d] == pair.shapes(1)[t][d]
        for g in state.groups
        for d in g.dims
        for t in (0, 1)
    )
    by_rows = any(s.groups or s.lumped for s in starts)
    return state if covered and not by_rows else blamed(state, number)


def _split(pair: Pair, states: States, base: Rows, number: int) -> list[Rows]:
    axis = pair.probe.params["axis"]
    parts, at = [], [0, 0]
    ends = zip(pair.probe.params["sizes"], pair.whole.params["sizes"], strict=True)
    micro, whole = pair.shapes(0)
    for mine, other in ends:
        bounds = [((0, a), (0, b)) for a, b in zip(micro, whole, strict=True)]
        bounds[axis] = ((at[0], at[0] + mine), (at[1], at[1] + other))
        at = [at[0] + mine, at[1] + other]
        parts.append(_pieces(pair, states, base, number, bounds))
    return parts


def _pad(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    config = pair.probe.params["padding_config"]
    state = replace(base, groups=states[0].groups)
    padded_dims = {d for d, amounts in enumerate(config) if tuple(amounts) != (0, 0, 0)}
    mixes = any(set(g.dims) & padded_dims for g in state.groups)
    return blamed(state, number) if mixes else state


def _dot(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    (contract, batch) = pair.probe.params["dimension_numbers"]
    shapes = [pair.shapes(0)[0], pair.shapes(1)[0]]
    groups: dict[tuple[int, ...], Group] = {}
    summed: list[tuple[bool, Group]] = []  # whether of the left operand
    clash = False
    width = len(batch[0])
    free = [
        [d for d in range(len(s)) if d not in contract[k] and d not in batch[k]]
        for k, s in enumerate(shapes)
    ]
    at = width
    for k in (0, 1):
        to = {d: i for i, d in enumerate(batch[k])}
        to |= {d: at + i for i, d in enumerate(free[k])}
        at += len(free[k])
        for group in states[k].groups:
            inside = [d for d in group.dims if d in contract[k]]
            if len(inside) == len(group.dims):
                summed.append((k == 0, group))
            elif inside:
                rest = tuple(to[d] for d in group.dims if d not in contract[k])
                groups[rest] = replace(group, dims=rest, partial=True)
            else:
                image = replace(group, dims=tuple(to[d] for d in group.dims))
                previous = groups.get(image.dims)
                if previous is not None and previous.outer is None:
                    previous = None
                clash |= previous is not None and image.outer is not None and previous != image
                groups[image.dims] = image if previous is None else previous
    state = base.with_groups(groups.values())
    real = [g for g in groups.values() if g.outer is not None]
    left = [g for of_left, g in summed if of_left]
    right = [g for of_left, g in summed if not of_left]
    orders = {g.outer for _, g in summed if g.outer is not None}
    clash |= len(orders) > 1 or len(left) != len(right)
    sources = [any(g.outer is not None for g in s.groups) for s in states]
    pairs = len(real) > 1 and all(sources)
    for k in (0, 1):  # what is multiplied with spread rows must be the same for each of them
        here, other = (*contract[k], *batch[k]), (*contract[1 - k], *batch[1 - k])
        there = dict(zip(here, other, strict=True))
        for d in (d for g in states[k].groups if g.spread for d in g.dims if d in there):
            alike = shapes[1 - k][there[d]] == 1 or there[d] in states[1 - k].even
            clash |= not (
                alike or any(there[d] in g.dims for g in states[1 - k].groups if g.spread)
            )
        clash |= any(
            g.outer is not None
            and [there.get(d) for d in g.dims] == list(c.dims)
            and c.outer is None
            and c.blocks != g.outer
            and not set(c.dims) <= states[1 - k].even
            for g in states[k].groups
            for c in states[1 - k].groups
        )
    if clash or pairs:
        return blamed(state, number)
    if not summed:
        return state
    if real:
        return replace(state, inner=True, blame=state.blame | {number})
    if len(left) > 1:
        return blamed(state, number)
    if groups:  # the sum, or the number of rows, for each row
        return blamed(replace(state, inner=True), number)
    return replace(state, added=True, own=False, inner=False)


def _iota(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    differ = row_dims(*pair.results())
    along = pair.probe.params["dimension"]
    state = base.with_groups(Group((d,), 1 if d == along else None) for d in differ)
    return replace(state, number=0 if along in differ else None)


def _draws(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    """Random numbers: each row has its own, also where they come from one key."""
    differ = row_dims(*pair.results())
    return base.with_groups(Group((d,), 1) for d in differ)


def _gather(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    numbers = pair.probe.params["dimension_numbers"]
    operand, indices = states[0], states[1]
    ranks = len(pair.shapes(0)[0]), len(pair.shapes(1)[0])
    rank = len(pair.results()[0])
    offsets = numbers.offset_dims
    batch_out = [d for d in range(rank) if d not in offsets]
    to_indices = dict(zip(range(ranks[1] - 1), batch_out))
    window = [
        d
        for d in range(ranks[0])
        if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
    ]
    to_operand = dict(zip(window, offsets))
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    groups: dict[tuple[int, ...], Group] = {}
    mixes = indices.number is not None and not operand.groups
    mixes |= bool(batching) and any(g.spread for g in indices.groups)
    index_groups = _with_dims(indices.groups, to_indices)
    mixes |= index_groups is None
    groups.update((g.dims, g) for g in index_groups or ())
    sizes = pair.probe.params["slice_sizes"], pair.whole.params["slice_sizes"]
    aligned = False
    for group in operand.groups:
        d = group.dims[0]
        full = all(sizes[t][x] == pair.shapes(0)[t][x] for t in (0, 1) for x in group.dims)
        if len(group.dims) == 1 and d in batching:
            aligned = True
            continue  # the rows of the indices are those of the operand
        if full and all(x in to_operand for x in group.dims):
            dims = tuple(to_operand[x] for x in group.dims)
            real = any(g.outer is not None for g in groups.values())
            mixes |= real and group.outer is not None
            groups[dims] = replace(group, dims=dims)
            continue
        if (
            group.outer == 1
            and indices.number is not None
            and (numbers.start_index_map[indices.number] == d)
        ):
            aligned = True
            continue
        mixes |= group.outer is not None
    state = base.with_groups(groups.values())
    if (mixes and not aligned) or (mixes and index_groups is None):
        return blamed(state, number)
    return state


def _scatter(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    numbers = pair.probe.params["dimension_numbers"]
    operand, indices, updates = states
    if not (indices.groups or updates.groups or operand.groups):
        return base
    add = pair.name == "scatter-add"
    if not operand.groups and (add or not _real(updates)) and indices.number is None:
        return replace(base, added=True, own=False) if add else blamed(base, number)
    rank = len(pair.shapes(0)[0])
    window = [
        d
        for d in range(rank)
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    state = base.with_groups(operand.groups or ())
    for group in operand.groups:
        d = group.dims[0]
        along = d in numbers.operand_batching_dims
        spans = d in window and not _real(indices)
        own_row = group.outer in (1, None) and indices.number is not None
        own_row = own_row and numbers.scatter_dims_to_operand_dims[indices.number] == d
        if not (along or spans or own_row):
            return blamed(state, number)
    if all(g.outer is None for g in operand.groups):
        return state.with_groups(replace(g, outer=1) for g in operand.groups)
    return state


def _real(state: Rows) -> bool:
    return any(g.outer is not None for g in state.groups)


def _conv(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    spec = pair.probe.params["dimension_numbers"]
    state = base.with_groups(Group((spec.out_spec[0],), g.outer) for g in states[0].groups)
    fine = all(g.dims == (spec.lhs_spec[0],) for g in states[0].groups)
    if not fine or states[1].groups or pair.probe.params["batch_group_count"] != 1:
        return blamed(state, number)
    return state


def _window(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    sizes = pair.probe.params["window_dimensions"]
    state = merged(pair, states[:1], base, number)
    mixes = any(sizes[d] != 1 for g in state.groups for d in g.dims)
    return blamed(state, number) if mixes else state


def _fft(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    rank = len(pair.shapes(0)[0])
    axes = range(rank - len(pair.probe.params["fft_lengths"]), rank)
    return _along(lambda _: axes)(pair, states, base, number)


def _square(pair: Pair, states: States, base: Rows, number: int) -> list[Rows]:
    """Linear algebra over the last two dimensions."""
    results = []
    rank = len(pair.shapes(0)[0])
    for k in range(len(pair.probe.outvars)):
        state = base.with_groups(g for s in states for g in s.groups if g.dims[-1] < rank - 2)
        inside = any(d >= rank - 2 for s in states for g in s.groups for d in g.dims)
        size = len(pair.results(k)[0])
        inside |= any(d >= size for g in state.groups for d in g.dims)
        results.append(blamed(state, number) if inside else state)
    return results


def _ragged_dot(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    """Products by groups of entries: which belong together depends on other operands, so rows
    along any dimension meet; one row by itself (in a loop over rows) does not."""
    return blamed(base, number) if any(state.groups for state in states) else base


def _stack(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    axis = pair.probe.params["axis"]
    state = merged(pair, states, base, number)
    to = {d: d + (d >= axis) for d in range(len(pair.shapes(0)[0]))}
    return state.with_groups(_with_dims(state.groups, to) or ())


def _unstack(pair: Pair, states: States, base: Rows, number: int) -> Rows:
    axis = pair.probe.params["axis"]
    to = _without(len(pair.shapes(0)[0]), [axis])
    groups = _with_dims(states[0].groups, to)
    return base.with_groups(groups) if groups is not None else blamed(base, number)


def _unknown(pair: Pair, states: States, base: Rows, number: int) -> list[Rows]:
    """Returns constants for a primitive without a rule, if no operand has to do with rows."""
    touched = any(s.groups or s.each for s in states)
    results = []
    for k in range(len(pair.probe.outvars)):
        state = base.with_groups(Group((d,), 1) for d in row_dims(*pair.results(k)))
        results.append(blamed(state, number) if touched else state)
    return results


def _last_axis(pair: Pair, states: States, base: Rows, number: int) -> list[Rows]:
    params = pair.probe.params
    axis = params.get("axis", params.get("reduction_dimension", params.get("operand_axis", -1)))
    axis = axis % max(1, len(pair.shapes(0)[0]))
    rule = _along(lambda _: [axis])
    return [rule(pair, states, base, number)] * len(pair.probe.outvars)


_axis = _along(lambda pair: [pair.probe.params["axis"]])

_RULES: dict[str, Callable[..., Rows | list[Rows]]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
         "reduce_xor"),
        _reduce,
    ),
    **dict.fromkeys(("argmax", "argmin"), _argreduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _axis),
    "rev": _along(lambda pair: pair.probe.params["dimensions"]),
    "sort": _along(lambda pair: [pair.probe.params["dimension"]]),
    "top_k": _last_axis,
    "approx_top_k": _last_axis,
    "fft": _fft,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "split": _split,
    "pad": _pad,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "iota": _iota,
    "random_bits": _draws,
    "random_split": _draws,
    "random_seed": _draws,
    "random_gamma": _draws,
    "iota_2x32_shape": _draws,
    "rng_bit_generator": _draws,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "conv_general_dilated": _conv,
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
         "select_and_gather_add", "select_and_scatter_add"),
        _window,
    ),
    **dict.fromkeys(
        ("cholesky", "triangular_solve", "qr", "svd", "eigh", "eig", "lu", "householder_product"),
        _square,
    ),
    "stack": _stack,
    "unstack": _unstack,
}  # fmt: skip
