"""The choice of the way of a call: the order in which ways are timed, what settles it, and how ranks agree."""
from theano_mgpu.auto import choice as module
from theano_mgpu.auto.choice import COUNTED, GROWN, LONGEST, SHORTEST, WARM_UP, Chooser, Treatment, Way
from theano_mgpu.comm.communicator import Communicator

import numpy as np
import pytest
from support.dispatch_clock import Clock

CALLS = WARM_UP + COUNTED
TWO, THREE = (Way.HOST, Way.SEVERAL), (Way.HOST, Way.DEVICE, Way.SEVERAL)
OF_KERAS = Way.SEVERAL, Way.DEVICE, Way.HOST


@pytest.fixture
def calls(monkeypatch):
    """Return a function that runs n calls by a Chooser on a Clock; it returns how each call was computed."""
    def run(chooser, n, **seconds):
        clock = Clock(**seconds)
        monkeypatch.setattr(module, 'time', clock)
        for _ in range(n):
            chooser.run(clock.call)
        return clock.calls
    return run


def chooser_of(ways, ranks=None):
    return Chooser(lambda: iter(ways), ranks or Communicator())


@pytest.mark.parametrize('ways, seconds, way', [
    (TWO, dict(divided=1, whole=SHORTEST / 2), Way.HOST), (TWO, dict(divided=1, whole=2), Way.SEVERAL),
    (TWO, dict(divided=2, whole=1), Way.HOST), (OF_KERAS, dict(divided=2e-3, whole=3e-3, first=1e-3), Way.DEVICE),
    (OF_KERAS, dict(divided=2e-3, whole=1e-4, first=1e-3), Way.HOST),
    (OF_KERAS, dict(divided=2 * LONGEST, whole=1e-9, first=3 * LONGEST), Way.SEVERAL),
    (THREE, dict(divided=2e-3, whole=3e-3, first=1e-3), Way.DEVICE),
    (THREE, dict(divided=1e-3, whole=3e-3, first=2e-3), Way.SEVERAL),
    (THREE, dict(divided=2e-3, whole=1e-3, first=2e-3), Way.HOST)])
def test_the_fastest_way_goes_on(ways, seconds, way, calls):
    chooser = chooser_of(ways)
    calls(chooser, 3 * CALLS, **seconds)
    assert chooser.state is Treatment.SETTLED and chooser.way is way
    assert len(set(calls(chooser, 9, **seconds))) == 1


def test_ways_are_timed_in_their_order_and_given_up_when_they_are_slower(calls):
    found = calls(chooser_of(THREE), 3 * CALLS, divided=1e-3, whole=2e-3, first=3e-3)
    assert found[:-1] == ['whole'] * CALLS + ['first'] * WARM_UP + ['divided'] * (2 * CALLS - WARM_UP - 1)


def test_no_way_is_asked_for_before_a_call_needs_it(calls):
    asked = []

    def ways():
        yield Way.HOST
        asked.append('contexts')  # which opens the devices
        yield Way.DEVICE
    chooser = Chooser(ways, Communicator())
    assert set(calls(chooser, 2 * CALLS, divided=1, whole=SHORTEST / 2)) == {'whole'} and not asked


def test_few_calls_do_where_they_take_very_long(calls):
    found = calls(chooser_of(OF_KERAS), 3 * CALLS, divided=5, whole=1, first=4)
    assert found == ['divided'] * (WARM_UP + 1) + ['first'] * (3 * CALLS - WARM_UP - 1)


def test_a_call_that_does_not_count_is_computed_all_the_same():
    chooser = chooser_of(TWO)
    assert [chooser.run(lambda way: (way, False)) for _ in range(3 * CALLS)] == [Way.HOST] * 3 * CALLS
    assert chooser.state is Treatment.TIMES and not chooser.seconds


def test_the_choice_is_made_anew_when_calls_have_grown(calls):
    chooser = chooser_of(TWO)
    calls(chooser, CALLS, divided=1, whole=1e-4)
    chooser.rest()
    assert calls(chooser, 9 * CALLS, divided=1, whole=GROWN * 1e-4) == ['whole'] * 9 * CALLS
    assert chooser.state is Treatment.RESTS
    assert 'divided' in calls(chooser, 40 * CALLS, divided=1, whole=2) and chooser.state is Treatment.SETTLED
    assert chooser.reason() == 'divided, 1e+03 ms (host 2e+03 ms)'


def test_calls_that_are_not_seen_count_until_the_next_one_is_timed(calls):
    chooser = chooser_of(TWO)
    calls(chooser, CALLS, divided=1, whole=1e-4)
    chooser.rest()
    chooser.skip_quiet_calls()
    assert chooser.skip_quiet_calls() == 0 and 'divided' in calls(chooser, 2 * CALLS, divided=1, whole=2)


def test_another_way_is_taken_where_one_cannot_compute_calls(calls):
    ways = list(THREE)
    chooser = Chooser(lambda: iter(ways), Communicator())
    calls(chooser, 3 * CALLS, divided=1e-3, whole=3e-3, first=2e-3)
    ways.remove(Way.SEVERAL)
    chooser.leave(Way.SEVERAL)
    assert chooser.way is Way.DEVICE and chooser.reason('it failed') == 'whole, 2 ms (host 3 ms; it failed)'


class TwoRanks(Communicator):
    """Two ranks; the other one takes twice as long as this one."""

    def __init__(self):
        super().__init__()
        self.size, self.shared = 2, []

    def handshake(self, activity, integers=()):
        self.shared.append(len(integers))
        return np.array([integers, 2 * np.array(integers)])


def test_the_slowest_rank_counts(calls):
    ranks = TwoRanks()
    chooser = chooser_of((Way.SEVERAL, Way.HOST), ranks)
    calls(chooser, CALLS, divided=LONGEST * .9, whole=1)
    assert chooser.state is Treatment.SETTLED and chooser.seconds[Way.SEVERAL] == pytest.approx(LONGEST * 1.8)
    assert ranks.shared == [CALLS]
