"""The inner loop and its threads, with functions in place of compiled programs."""

import threading

import pytest

from octojax.errors import ExecutionError
from octojax.executor.instructions import Do, Operation, RankProgram
from octojax.executor.run import RankThreads, bind, run_rank
from octojax.executor.stop import Stop, Stopped
from octojax.executor.transport import DevicePut, Mailboxes
from octojax.ir import Cargo, Receive, Run, Send, Transfer, parse_action


class Passing:
    """A transport that hands Python values over as they are."""

    def __init__(self, transfers, timeout_s=30.0):
        self.mail = Mailboxes(transfers, timeout_s)

    def post(self, number):
        pass

    def send(self, number, values):
        self.mail.put(number, values)

    def receive(self, number):
        return self.mail.get(number)


def program(rank: int, body: tuple[Operation, ...], num_slots: int) -> RankProgram:
    return RankProgram(rank, (), (), (), (), (), body, num_slots, (), ())


def unit(text: str) -> Run:
    return Run((parse_action(text),))


LINK = (Transfer(0, 1, Cargo.OUTPUT, 0, 0),)


def test_slots_are_read_written_and_freed():
    body = (
        Operation(Do.RUN, 0, (), (0, 1), (), unit("0F0")),
        Operation(Do.RUN, 1, (0, 1), (2,), (0,), unit("0B0")),
    )
    slots = [None] * 3
    functions = [lambda: (1, 2), lambda a, b: (a + b,)]
    run_rank(bind(program(0, body, 3), functions, Passing(())), slots)
    assert slots == [None, 2, 3]


def test_two_ranks_hand_a_value_over():
    sender = (
        Operation(Do.RUN, 0, (), (0,), (), unit("0F0")),
        Operation(Do.SEND, 0, (0,), (), (0,), Send(LINK[0])),
    )
    receiver = (
        Operation(Do.RECEIVE, 0, (), (0,), (), Receive(LINK[0])),
        Operation(Do.RUN, 1, (0,), (1,), (0,), unit("1F0")),
    )
    transport = Passing(LINK)
    functions = [lambda: (20,), lambda x: (x + 1,)]
    slots = [[None] * 2, [None] * 2]
    bound = [
        bind(program(r, body, 2), functions, transport) for r, body in enumerate((sender, receiver))
    ]
    threads = RankThreads([0, 1])
    threads.run([lambda r=r: run_rank(bound[r], slots[r]) for r in (0, 1)], Stop())
    assert slots == [[None, None], [None, 21]]
    threads.close()


def mailboxes() -> tuple[Mailboxes, Stop]:
    mail, stop = Mailboxes(LINK, timeout_s=60), Stop()
    mail.begin(stop)
    return mail, stop


def test_a_failing_rank_stops_the_one_that_waits_for_it_and_is_named():
    mail, stop = mailboxes()
    threads = RankThreads([0, 1])

    def fail():
        raise FloatingPointError("overflow in 1F0")

    with pytest.raises(ExecutionError, match="rank 1 failed: overflow in 1F0") as caught:
        threads.run([lambda: mail.get(0), fail], stop)
    assert isinstance(caught.value.__cause__, FloatingPointError)
    with pytest.raises(Stopped):
        mail.get(0)
    mail.put(0, "of the step that failed")
    mail.begin(again := Stop())
    mail.put(0, "again")
    assert threads.run([lambda: mail.get(0), lambda: 1], again) == ["again", 1]
    threads.close()


def test_a_value_that_never_comes_is_an_error_that_names_it():
    mail = Mailboxes(LINK, timeout_s=0.05)
    with pytest.raises(ExecutionError, match=r"rank 1 waited 0.05 s for 0SEND_F0 from rank 0"):
        mail.get(0)


def test_an_interrupt_in_the_callers_rank_ends_the_others_first():
    mail, stop = mailboxes()
    threads = RankThreads([0, 1])
    ended = threading.Event()

    def interrupted():
        raise KeyboardInterrupt

    def waiting():
        try:
            mail.get(0)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        threads.run([interrupted, waiting], stop)
    assert ended.is_set()
    threads.close()


def test_device_put_delivers_by_name_whatever_the_order():
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    target = SingleDeviceSharding(jax.devices()[1])
    transfers = [Transfer(0, 1, Cargo.OUTPUT, 0, m) for m in range(3)]
    transport = DevicePut(transfers, [[target]] * 3, timeout_s=10)
    transport.begin(range(3), Stop())
    for m in (2, 0, 1):
        transport.send(m, [jnp.float32(m)])
    for m in range(3):
        (value,) = transport.receive(m)
        assert float(value) == m
        assert value.devices() == {jax.devices()[1]}
    transport.close()
