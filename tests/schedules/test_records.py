"""The records of schedules: names, options, and what is said about bad input."""

import subprocess
import sys

import pytest

from octojax.schedules import SCHEDULES, Family, family, generate
from octojax.schedules.comparison import compare, table

NAMES = (
    "gpipe 1f1b 1f1b-overlap interleaved looped-bfs zb-h1 zb-h2 zb-auto zb-v v-half v-min "
    "1f1b-v dualpipe dualpipe-v hanayo chimera tessel dynapipe"
)


def test_every_published_name_is_there():
    assert " ".join(SCHEDULES).startswith(NAMES)
    for name, record in SCHEDULES.items():
        assert isinstance(record, Family)
        assert record.name == name
        assert record.summary
        assert record.source
        assert record.constraints
    assert family("zb1p").name == "zb-h1"


def refusal(*arguments, **options):
    with pytest.raises(ValueError) as error:
        generate(*arguments, **options)
    return str(error.value)


def test_unknown_names_suggest_the_nearest():
    assert "unknown schedule 'zbv'; did you mean 'zb-v'" in refusal("zbv", 4, 8)
    assert "unknown schedule 'qqq'. Known: gpipe, 1f1b" in refusal("qqq", 4, 8)
    assert "did you mean 'group_size'" in refusal("interleaved", 4, 8, group=2)
    assert "1f1b has no option 'memory'. Its options: none" in refusal("1f1b", 4, 8, memory=2)


def test_microbatches_that_a_rule_forbids():  # users' case 28
    message = refusal("interleaved", 4, 9)
    assert "cannot run 9 microbatches on 4 ranks (p=4, m=9, chunks=2" in message
    assert "nearest valid microbatch count is 8 (or 10)" in message
    message = refusal("interleaved", 4, 10, group_size=4)
    assert "group_size=4" in message
    assert "p <= g <= m" in message
    assert generate("interleaved", 6, 3, 2).num_microbatches == 3  # one group of 3
    assert generate("interleaved", 4, 10, 2).num_microbatches == 10  # groups of 5
    assert "nearest valid microbatch count is 8" in refusal("dualpipe", 4, 7)
    assert "nearest valid microbatch count is 8" in refusal("dualpipe-v", 4, 3)
    assert "nearest valid microbatch count is 4 (or 6)" in refusal("chimera", 4, 5)


def test_ranks_that_a_rule_forbids():
    assert "cannot run on 3 ranks" in refusal("dualpipe", 3, 12)
    assert "nearest valid rank count is 4 (or 6)" in refusal("chimera", 5, 10)


def test_chunks_that_a_rule_forbids():
    assert "takes 1 chunks per rank, asked for 2" in refusal("1f1b", 4, 8, 2)
    assert "takes at least 2 chunks per rank, asked for 1" in refusal("interleaved", 4, 8, 1)
    assert "chunks = 2 x waves" in refusal("hanayo", 4, 8, 3)
    assert "waves=3 means 6 chunks" in refusal("hanayo", 4, 8, 4, waves=3)


def test_values_that_cannot_be_read():
    assert "expected fifo or lifo" in refusal("gpipe", 4, 8, backward_order="random")
    assert "expected a whole number >= 1" in refusal("interleaved", 4, 8, group_size="two")
    assert "expected true or false" in refusal("interleaved", 4, 8, moe_overlap="maybe")
    assert "expected finite numbers >= 0" in refusal("zb-auto", 4, 8, forward=-1)
    assert "expected one number or 4 (one per stage), found 3" in refusal(
        "zb-auto", 4, 8, forward="1,2,3"
    )
    assert "expected whole numbers >= 1" in refusal("zb-auto", 4, 8, memory=0)
    assert "needs memory for at least 2 activations, and has 1" in refusal(
        "tessel", 2, 4, 2, memory=1
    )
    assert "activations has 2 numbers for 3 microbatches" in refusal(
        "dynapipe", 2, 3, activations="1,2"
    )
    assert "raise memory" in refusal("dynapipe", 2, 3, 2, memory=1)
    assert "names rank 2, but there are 2 ranks" in refusal("tessel", 2, 3, placement="0 1 2")
    assert "holds at most" in refusal("zb-v", 4, 8, memory=1)
    assert "microbatches must be a whole number >= 1, found 0" in refusal("1f1b", 4, 0)
    assert "ranks must be a whole number >= 1, found 2.0" in refusal("1f1b", 2.0, 4)


def test_text_and_values_mean_the_same():
    assert generate("interleaved", 4, 8, group_size="8") == generate(
        "interleaved", 4, 8, group_size=8
    )
    assert generate("dynapipe", 2, 4, placement="0,1,0") == generate(
        "dynapipe", 2, 4, placement=(0, 1, 0)
    )
    assert generate("zb-auto", 2, 4, forward="1,2") == generate("zb-auto", 2, 4, forward=[1, 2])


def test_comparison_reproduces_the_guides_table():
    names = ("gpipe", "1f1b", "zb-greedy", "interleaved")
    rows = {(r.name, r.microbatches): r for r in compare(names, 8, (8, 16, 32, 64))}
    guide = {
        8: (0.467, 0.467, 0.226, 0.304),
        16: (0.304, 0.304, 0.127, 0.179),
        32: (0.179, 0.179, 0.068, 0.099),
        64: (0.099, 0.099, 0.035, 0.052),
    }
    for m, ratios in guide.items():
        assert tuple(round(rows[name, m].bubble_ratio, 3) for name in names) == ratios
        assert rows["gpipe", m].peak_until_input_grad == m
        assert rows["1f1b", m].peak_until_weight_grad == 8
        assert rows["zb-greedy", m].peak_until_input_grad == 8
        assert rows["zb-greedy", m].peak_until_weight_grad == m
    text = table(tuple(rows.values()))
    assert "gpipe          |  0.467     8     8" in text


def test_comparison_says_what_is_refused():
    (row,) = compare(["dualpipe"], 8, [8])
    assert "nearest valid microbatch count is 16" in row.refused
    assert "refused: dualpipe cannot run 8" in table([row])


def test_listing_loads_neither_jax_nor_a_compiler():
    code = (
        "import sys, octojax.schedules as s; s.generate('zb-auto', 4, 8); "
        "s.generate('tessel', 4, 8); list(s.SCHEDULES); "
        "print([m for m in ('jax', 'numba', 'scipy', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
