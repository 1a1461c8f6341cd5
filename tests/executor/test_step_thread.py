"""Calls in turn, with plain functions in place of steps."""

import contextvars
import gc
import threading
import time
import weakref

import pytest

from octojax.errors import ExecutionError
from octojax.executor.step_thread import StepThread
from octojax.executor.stop import Stop, Stopped
from tests.interrupts import interrupting


def test_calls_run_one_after_the_other_and_return_or_raise():
    calls, running, most = StepThread(), [], []

    def work(i):
        running.append(i)
        most.append(len(running))
        time.sleep(0.001)
        running.remove(i)
        if i % 3 == 0:
            raise KeyError(i)
        return i * i

    results = {}

    def call(i):
        try:
            results[i] = calls.run(lambda: work(i), "work")
        except KeyError as error:
            results[i] = error.args[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: i if i % 3 == 0 else i * i for i in range(12)}
    assert set(most) == {1}


def test_a_call_within_a_call_runs_in_its_place():
    calls = StepThread()
    assert calls.run(lambda: calls.run(lambda: 3, "inner") + 1, "outer") == 4


def test_context_variables_of_the_caller_hold_in_a_call():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert StepThread().run(variable.get, "read") == 7


def test_an_interrupted_call_is_stopped_and_the_next_one_comes_after_it():
    calls, begun, events = StepThread(), threading.Event(), []

    def work():
        stop = calls.stop
        begun.set()
        while True:
            time.sleep(0.002)
            if stop.error is not None:
                events.append("stopped")
                stop.check()

    with pytest.raises(KeyboardInterrupt), interrupting(begun):
        calls.run(work, "work")
    assert calls.run(lambda: events.append("next"), "next") is None
    assert events == ["stopped", "next"]


def test_a_committed_call_runs_to_its_end_though_its_caller_is_interrupted():
    calls, begun, events = StepThread(), threading.Event(), []

    def work():
        calls.stop.commit()
        begun.set()
        time.sleep(0.1)
        calls.stop.check()
        events.append("done")

    with pytest.raises(KeyboardInterrupt), interrupting(begun):
        calls.run(work, "work")
    calls.run(lambda: None, "next")
    assert events == ["done"]


def test_a_second_interrupt_ends_the_wait_and_the_old_call_ends_in_the_background():
    calls, begun, release = StepThread(grace_s=60), threading.Event(), threading.Event()
    events = []

    def work():  # deaf to its stop, as a long action is
        begun.set()
        release.wait(30)
        events.append("old")

    with pytest.raises(KeyboardInterrupt), interrupting(begun, times=2):
        calls.run(work, "work")
    assert events == []
    threading.Timer(0.05, release.set).start()
    calls.run(lambda: events.append("new"), "next")
    assert events == ["old", "new"]


def test_a_call_that_has_not_begun_never_does_once_interrupted():
    calls, begun, release = StepThread(), threading.Event(), threading.Event()
    events = []
    first = threading.Thread(target=calls.run, args=(lambda: release.wait(30), "first"))
    first.start()
    threading.Timer(0.1, begun.set).start()
    with pytest.raises(KeyboardInterrupt), interrupting(begun):
        calls.run(lambda: events.append("second"), "second")
    release.set()
    first.join(30)
    calls.run(lambda: events.append("third"), "third")
    assert events == ["third"]


def test_a_call_that_does_not_go_on_is_named_to_the_next():
    calls = StepThread(timeout_s=0.1, grace_s=0)
    begun, release = threading.Event(), threading.Event()

    def work():
        calls.stop.instructions += 1
        begun.set()
        release.wait(30)

    with pytest.raises(KeyboardInterrupt), interrupting(begun):
        calls.run(work, "the step")
    with pytest.raises(
        ExecutionError, match=r"save waited 0.1 s for the step, .* though it has been interrupted"
    ):
        calls.run(lambda: None, "save")
    release.set()


def test_a_closed_thread_ends_after_earlier_calls_and_refuses_later_ones_by_name():
    calls, events = StepThread(), []
    calls.run(lambda: events.append("call"), "call")
    for _ in range(2):
        calls.close("this step was closed", lambda: events.append("released"))
    assert events == ["call", "released"]
    with pytest.raises(ExecutionError, match="evaluate was called, but this step was closed"):
        calls.run(lambda: None, "evaluate")
    calls._thread.join(10)
    assert not calls._thread.is_alive()


def test_a_thread_ends_when_nobody_holds_it():
    calls = StepThread()
    calls.run(lambda: None, "call")
    thread = calls._thread
    del calls
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_results_and_errors_are_not_kept():
    class Value:
        pass

    calls, gone = StepThread(), []

    def give():
        value = Value()
        weakref.finalize(value, gone.append, "value")
        return value

    calls.run(give, "give")
    calls.run(lambda: None, "next")
    gc.collect()
    assert gone == ["value"]


def test_a_stop_tells_its_listeners_once_and_keeps_the_first_error():
    stop, heard = Stop(), []
    stop.listen(lambda: heard.append(stop.error))
    first = ValueError("first")
    stop.set(first)
    stop.set(ValueError("second"))
    assert stop.error is first
    assert heard[0] is first
    stop.listen(lambda: heard.append("late"))
    assert heard[-1] == "late"
    for attempt in (stop.check, stop.commit):
        with pytest.raises(Stopped):
            attempt()


def test_nothing_is_cancelled_after_its_commit():
    stop = Stop()
    stop.commit()
    stop.cancel(KeyboardInterrupt())
    stop.check()
    stop.set(ValueError("a failure still ends it"))
    with pytest.raises(Stopped):
        stop.check()
