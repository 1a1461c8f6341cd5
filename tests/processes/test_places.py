import pytest
from hypothesis import given
from hypothesis import strategies as st

from octojax.processes.places import DONE, ERROR, INSIDE, Log, Place, differs, left_alone, missing

CALLS = st.lists(st.tuples(st.sampled_from(["step", "save"]), st.booleans()), max_size=6)


def states(calls):
    """Every log that a process has on its way through `(topic, fails)` calls, with its place."""
    log = Log()
    seen = [({}, log.last)]
    for topic, fails in calls:
        log.enter(topic)
        seen.append((dict(log.places), log.last))
        log.leave("ValueError: no" if fails else "")
        seen.append((dict(log.places), log.last))
    return seen


@given(CALLS)
def test_processes_that_make_the_same_calls_never_differ(calls):
    for own, _ in states(calls):
        for _, peer in states(calls):
            assert not differs(own, peer, "process 1")
            assert not left_alone(own, peer, "process 1", waits=False)


@given(CALLS, CALLS)
def test_processes_that_have_made_other_calls_differ(mine, theirs):
    own, here = states(mine)[-1]
    other, there = states(theirs)[-1]
    if mine != theirs and min(len(mine), len(theirs)) and mine[0] != theirs[0]:
        texts = [
            differs(own, there, "process 1") or left_alone(own, there, "process 1", waits=True),
            differs(other, here, "process 0") or left_alone(other, here, "process 0", waits=True),
        ]
        assert any(texts)


def test_the_first_other_call_names_number_and_topics():
    own, _ = states([("step 0", False), ("step 1", False)])[-1]
    _, peer = states([("step 0", False), ("save", False)])[-1]
    assert differs(own, peer, "process 2") == (
        "call 2 is 'save' in process 2 and 'step 1' in this process"
    )


def test_an_earlier_error_explains_the_difference():
    own, _ = states([("step 0", False), ("step 0", False)])[-1]
    _, peer = states([("step 0", True), ("step 0", False)])[-1]
    text = differs(own, peer, "process 2")
    assert "different ways to call 2, 'step 0'" in text
    assert "in process 2 'step 0' (call 1) failed: ValueError: no" in text


def test_an_error_that_follows_from_another_process_explains_nothing():
    log = Log()
    log.enter("step 0")
    log.leave("ValueError: no")
    log.enter("step 0")
    assert log.leave("PeerError: out of step", follows=True).error.endswith("ValueError: no")
    assert log.last.outcome == ERROR


def test_who_waits_for_one_that_has_left_the_call_is_told():
    own, _ = states([("step 0", False)])[1]
    _, peer = states([("step 0", True)])[-1]
    assert not left_alone(own, peer, "process 2", waits=False)
    assert "this process is in it" in left_alone(own, peer, "process 2", waits=True)


@pytest.mark.parametrize(
    ("peer", "comes"),
    [
        (Place(3, "step 1", outcome=DONE, end="ended"), False),
        (Place(4, "step 2", outcome=DONE, end="ended"), True),
        (Place(4, "step 2", outcome=INSIDE, end="was killed by SIGKILL", well=False), False),
        (Place(3, "step 1", outcome=DONE), True),
        (Place(5, "step 3", outcome=INSIDE, end="ended"), True),
    ],
)
def test_who_has_ended_before_a_call_will_not_come(peer, comes):
    text = missing(Place(4, "step 2", outcome=INSIDE), peer, "process 1")
    assert comes == (not text)
    if text:
        assert f"after call {peer.number}, {peer.topic!r}" in text
        assert "call 4, 'step 2'" in text


@given(
    st.builds(
        Place,
        number=st.integers(0, 9),
        topic=st.text(max_size=5),
        outcome=st.sampled_from([INSIDE, DONE, ERROR]),
        error=st.text(max_size=5),
        end=st.text(max_size=5),
        well=st.booleans(),
    )
)
def test_a_place_is_read_as_it_is_posted(place):
    assert Place.from_text(place.to_text()) == place


def test_old_calls_are_forgotten():
    log = Log(kept=3)
    for number in range(5):
        log.enter(f"step {number}")
        log.leave()
    assert sorted(log.places) == [3, 4, 5]
