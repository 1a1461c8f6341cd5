"""Where chains of widths are cut: text in, positions out.

One word per step: its live bytes, `h` if heavy, `w` if it reads weights, `n` if a norm begins,
`e` if it looks up an embedding, `m` if marked, `j` if joined to the next.
"""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.layers.borders import Step, find_borders


def steps(text: str) -> list[Step]:
    return [_step(word) for word in text.split()]


def _step(word: str) -> Step:
    digits = "".join(c for c in word if c.isdigit())
    heavy = "h" in word or "e" in word
    return Step(
        live_bytes=int(digits),
        made_bytes=int(digits),
        work=100.0 if heavy else 1.0,
        heavy=heavy,
        reads_params="w" in word or "e" in word,
        embeds="e" in word,
        begins="n" in word,
        marked="m" in word,
        inseparable="j" in word,
    )


BLOCK = "200 200n 200w 300hw 100 "  # square, mean, norm, product, residual add

CASES = {
    "dense layers with bias and tanh": ("100hw 100w 100 100hw 100w 100 100hw 100w 4n", (2, 5)),
    "two passes side by side": ("100hwj 100hw 100j 100 100hwj 100hw 100j 100 100hwj 100hw", (3, 7)),
    "two marked passes": ("100hwj 100hw 100mj 100m 100hwj 100hw 100mj 100m 4", (3, 7)),
    "a residual stream": ("100e " + BLOCK * 3 + "100hw 4n", (0, 5, 10, 15)),
    "a hidden layer inside a residual block": (
        "100e 200n 200w 500hw 500 200hw 100 200n 200w 500hw 500 200hw 100 100hw 4n",
        (0, 6, 12),
    ),
    "the norm before the head belongs to it": ("100e " + BLOCK + "100nw 100hw 4", (0, 5)),
    "a pyramid that narrows": ("800hw 400hw 200hw 100hw 4n", (0, 1, 2)),
    "a pyramid that widens": ("100hw 200hw 400hw 800hw 4n", (0, 1, 2)),
    "a scalar more after the second block": (
        "1000e 2000n 2000w 3000hw 1000 2000n 2004w 3004hw 1004 2004w 3004hw 1004 1004hw 8",
        (0, 4, 8, 11),
    ),
    "two look-ups make one embedding": ("100e 200e 100 " + BLOCK + "100hw 4n", (2, 7)),
    "marks are borders, last of a run": ("100hw 100m 100m 100 100m 100hw 100hw 4n", (2, 4, 5)),
    "a mark on the last step ends nothing": ("100hw 100m", ()),
    "a mark instead of a candidate": ("100hw 100 100m 200 100hw 4n", (2,)),
    "nothing heavy": ("10 10 10", ()),
    "nothing": ("", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_borders(name: str) -> None:
    text, wanted = CASES[name]
    assert find_borders(steps(text)) == wanted


def test_a_unet_is_one_hill_until_it_is_large_or_asked_for() -> None:
    small = steps("100hw 200hw 200hw 100hw 4n")
    assert find_borders(small) == (0,)
    assert find_borders(small, min_layers=3) == (0, 2)
    assert find_borders(small, min_layers=9) == (0, 1, 2)
    large = steps("100hw 200hw 300hw 400hw 400hw 300hw 200hw 100hw 4n")
    assert len(find_borders(large)) >= 5


words = st.builds(
    lambda n, kind: f"{n}{kind}",
    st.sampled_from([10, 11, 20, 30, 80]),
    st.sampled_from(["", "h", "hw", "w", "n", "e", "m"]),
)


@settings(deadline=None, max_examples=50)
@given(text=st.lists(words, max_size=40).map(" ".join), more=st.integers(1, 8))
def test_borders_are_inner_positions_that_only_grow_finer(text: str, more: int) -> None:
    found = steps(text)
    borders = find_borders(found)
    assert list(borders) == sorted(set(borders))
    assert all(0 <= p < len(found) - 1 for p in borders)
    finer = find_borders(found, min_layers=more)
    assert set(finer) >= set(borders)
    for start, stop in pairwise(borders):
        inside = found[start + 1 : stop + 1]
        assert any(s.heavy or s.marked for s in inside)
