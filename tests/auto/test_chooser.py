"""The choice between one device and several: its states, and how ranks agree."""
from theano_mgpu.auto import chooser as module
from theano_mgpu.auto.chooser import COUNTED, GROWN, LONGEST, SHORTEST, WARM_UP, Chooser, State, Way
from theano_mgpu.comm.communicator import Communicator

import numpy as np
import pytest
from support.dispatch_clock import Clock

CALLS = WARM_UP + COUNTED


@pytest.fixture
def calls(monkeypatch):
    """Return a function that runs n calls by a Chooser on a Clock; it returns how each call was computed."""
    def run(chooser, divided, whole, n):
        clock = Clock(divided, whole)
        monkeypatch.setattr(module, 'time', clock)
        for _ in range(n):
            chooser.run(clock.call)
        return clock.calls
    return run


@pytest.mark.parametrize('first, divided, whole, state', [
    (State.TIMES_ONE, 1, SHORTEST / 2, State.ONE), (State.TIMES_ONE, 1, 2, State.SEVERAL),
    (State.TIMES_ONE, 2, 1, State.ONE), (State.TIMES_SEVERAL, 2 * LONGEST, 1e-9, State.SEVERAL),
    (State.TIMES_SEVERAL, 1e-3, 1e-4, State.ONE), (State.TIMES_SEVERAL, 1e-3, 2e-3, State.SEVERAL)])
def test_where_it_settles(first, divided, whole, state, calls):
    chooser = Chooser(first, Communicator())
    calls(chooser, divided, whole, 2 * CALLS)
    assert chooser.state is state
    assert set(calls(chooser, divided, whole, 9)) == {'divided' if state is State.SEVERAL else 'whole'}


def test_a_call_that_does_not_count_is_computed_all_the_same():
    chooser = Chooser(State.TIMES_ONE, Communicator())
    assert [chooser.run(lambda way: (way, False)) for _ in range(3 * CALLS)] == [Way.ONE] * 3 * CALLS
    assert chooser.state is State.TIMES_ONE and not chooser.seconds


def test_the_choice_is_made_anew_when_calls_have_grown(calls):
    chooser = Chooser(State.TIMES_ONE, Communicator())
    calls(chooser, 1, 1e-4, CALLS)
    chooser.rest()
    assert calls(chooser, 1, GROWN * 1e-4, 9 * CALLS) == ['whole'] * 9 * CALLS and chooser.state is State.RESTS
    assert 'divided' in calls(chooser, 1, 2, 40 * CALLS) and chooser.state is State.SEVERAL
    assert chooser.reason() == '2e+03 ms a call on one device, 1e+03 ms divided'


class TwoRanks(Communicator):
    """Two ranks; the other one takes twice as long as this one."""

    def __init__(self):
        super().__init__()
        self.shared = []

    def handshake(self, activity, integers=()):
        self.shared.append(len(integers))
        return np.array([integers, 2 * np.array(integers)])


def test_the_slowest_rank_counts(calls):
    ranks = TwoRanks()
    chooser = Chooser(State.TIMES_SEVERAL, ranks)
    calls(chooser, LONGEST * .9, 1, CALLS)
    assert chooser.state is State.SEVERAL and chooser.seconds[Way.SEVERAL] == pytest.approx(LONGEST * 1.8)
    assert ranks.shared == [CALLS]
