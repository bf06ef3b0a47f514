"""`mgpu.Checkpoint`: a loop over Theano functions that was killed goes on to the bit."""
import os
import random

import theano_mgpu as mgpu
from theano_mgpu.auto import checkpoint

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import killed_loop
from support.launch import launch
from support.processes import python

SCRIPT = os.path.abspath(killed_loop.__file__)
FLAGS = 'floatX=float64,cxx=,optimizer=fast_compile,mgpu.shares=equal'


def started(folder, calls, kind, expected):
    done = python(SCRIPT, folder, calls, kind, flags=FLAGS, expected=expected)
    assert 'MgpuWarning' not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize('kind, kills', [
    ('plain', [4]), ('enable', [7]), pytest.param('parallel', [5], marks=pytest.mark.slow),
    pytest.param('training', [8], marks=pytest.mark.slow),
    pytest.param('enable', [1, 2, 4, 3, 5, 4, 3, 4, 5, 4], marks=pytest.mark.slow)])
def test_a_killed_loop_goes_on_to_the_bit(kind, kills, tmp_path):
    for calls in kills:
        started(tmp_path / 'killed', calls, kind, 3)
    found, expected = started(tmp_path / 'killed', 0, kind, 0), started(tmp_path / 'whole', 0, kind, 0)
    assert found == expected and expected.split()[1] == '36'


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('kind', ['enable', 'training'])
def test_two_processes_go_on_to_the_bit(kind, tmp_path):
    def launched(folder, calls, expected):
        return launch(2, tmp_path / folder, calls, kind, job=SCRIPT, flags=FLAGS, expected=expected).stdout
    launched('killed', 5, 3)
    assert launched('killed', 0, 0) == launched('whole', 0, 0)


def begin_again():
    """Forget the Checkpoints of this process, as after a crash."""
    checkpoint._made.clear()


@pytest.fixture(autouse=True)
def own_process():
    begin_again()


@pytest.fixture
def counting():
    """Return a function that makes a function which counts, and its count."""
    def make(start=0.):
        count, x = theano.shared(start, 'count'), T.dscalar('x')
        return theano.function([x], count * x, updates={count: count + x}, mode='FAST_COMPILE'), count
    return make


def test_finished_calls_return_their_results_and_compute_nothing(counting, tmp_path):
    step, count = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=2)
    assert [float(step(i)) for i in (1, 2, 3, 4, 5)] == [0, 2, 9, 24, 50]
    step, count = counting()
    begin_again()
    made = mgpu.Checkpoint(str(tmp_path), [step], every=2)
    assert made.replaying and [float(step(i)) for i in (1, 2, 3)] == [0, 2, 9] and made.replaying
    with pytest.warns(mgpu.MgpuWarning, match='count is read while finished calls are replayed'):
        assert count.get_value() == 0
    assert step(4) == 24 and not made.replaying and count.get_value() == 10 and made.completed == 4
    assert step(5) == 50


def test_resume_false_begins_anew(counting, tmp_path):
    step, _ = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(1)
    step, count = counting()
    begin_again()
    assert not mgpu.Checkpoint(str(tmp_path), [step], every=1, resume=False).replaying
    step(3)
    step, count = counting()
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    assert step(3) == 0 and count.get_value() == 3


def test_another_loop_is_refused(counting, tmp_path):
    step, _ = counting()
    other = theano.function([], [], mode='FAST_COMPILE')
    mgpu.Checkpoint(str(tmp_path), [step, other], every=1)
    other(), step(1), step(2)
    begin_again()
    with pytest.raises(ValueError, match='holds the variables count'):
        mgpu.Checkpoint(str(tmp_path), [other], every=1)
    begin_again()
    with pytest.raises(ValueError, match='has the calls of 2 functions, but there are 1'):
        mgpu.Checkpoint(str(tmp_path), [step], every=1)
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step, other], every=1)
    with pytest.raises(ValueError, match='called another function here'):
        step(1)
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step, other], every=1)
    other(), step(1)
    with pytest.warns(mgpu.MgpuWarning, match='calls with other arguments'):
        step(5)


def test_other_arguments_of_the_first_call_are_refused(counting, tmp_path):
    step, _ = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(1)
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    with pytest.raises(ValueError, match='with other arguments'):
        step(2)


def test_bad_arguments(counting, tmp_path):
    step, _ = counting()
    with pytest.raises(ValueError, match='every=0: give the number of calls'):
        mgpu.Checkpoint(str(tmp_path), [step], every=0)
    with pytest.raises(TypeError, match='is no function of theano.function'):
        mgpu.Checkpoint(str(tmp_path), [print])
    (tmp_path / 'checkpoint.npz').write_bytes(b'no checkpoint')
    with pytest.raises(ValueError, match='is damaged, or no training state'):
        mgpu.Checkpoint(str(tmp_path), [step])


def test_results_of_any_form_come_back(tmp_path):
    x = T.dmatrix('x')
    calls = [theano.function([x], outputs, mode='FAST_COMPILE', on_unused_input='ignore') for outputs in (
        x.sum(axis=1), [x, x.sum()], {'a': x[0], 'b': x.shape}, None)]
    counted = theano.shared(0)
    step = theano.function([], updates={counted: counted + 1}, mode='FAST_COMPILE')

    def results():
        made = mgpu.Checkpoint(str(tmp_path), [*calls, step], every=1)
        found = [call(np.arange(3. * n).reshape((n, 3))) for n in (2, 1, 4) for call in calls]
        step()
        return found, made
    expected, _ = results()
    counted.set_value(0)
    begin_again()
    found, made = results()
    assert counted.get_value() == 1 and made.completed == 1
    for one, other in zip(found, expected):
        assert type(one) is type(other)
        for a, b in zip(*([list(each.values()) if isinstance(each, dict) else each if isinstance(each, list)
                           else [each] for each in (one, other)])):
            np.testing.assert_array_equal(a, b)
            assert a is None or (a.dtype, a.shape) == (b.dtype, b.shape)


def test_a_call_that_failed_fails_again(cpu2, tmp_path):
    """The calls after one that had failed returned the results of the next ones."""
    x, w = T.dmatrix('x'), theano.shared(np.ones(2), 'w')
    loss = T.log(T.dot(x, w)).mean()
    step = mgpu.training_function([x], loss, [w], lambda gradients: {w: w - .1 * gradients[0]}, check_finite=True,
                                  mode='FAST_COMPILE')
    batches = [np.ones((2, 2)) * n for n in (1, 2, -1, 3, 4)]

    def trained(end):
        made, seen = mgpu.Checkpoint(str(tmp_path), [step], every=1), []
        for batch in batches[:end]:
            try:
                seen.append(float(step(batch)))
            except mgpu.NonFiniteError as error:
                seen.append(str(error)[:23])
        assert made._calls._columns[0][0].to_arrays()[0].size == made.completed and len(made._calls._columns[0]) == 1
        return seen + w.get_value().tolist()
    expected = trained(5)
    w.set_value(np.ones(2))
    begin_again()
    assert trained(5) == expected and 'the loss is not finite' in expected[2]


def test_a_second_loop_of_a_script_has_its_own_file(counting, tmp_path):
    """The second loop returned the results of the first one, and computed nothing."""
    step, count = counting()

    def loops():
        found = []
        for _ in range(2):
            mgpu.Checkpoint(str(tmp_path), [step], every=2)
            found += [float(step(i)) for i in (1, 2)]
        return found + [float(count.get_value())]
    expected = [0, 2, 3, 8, 6]
    assert loops() == expected and sorted(each.name for each in tmp_path.glob('*.npz')) == [
        'checkpoint-2.npz', 'checkpoint.npz']
    count.set_value(0)
    begin_again()
    assert loops() == expected


def test_an_input_with_an_update_is_refused(tmp_path):
    x, total = T.dscalar('x'), T.dscalar('total')
    f = theano.function([x, theano.In(total, value=0., update=total + x)], total, mode='FAST_COMPILE')
    with pytest.raises(ValueError, match='the input total of a function has an update'):
        mgpu.Checkpoint(str(tmp_path), [f])


def test_a_function_that_was_left_out_is_named_by_a_warning(counting, cpu2, tmp_path):
    step, count = counting()
    y = T.dvector('y')
    unlisted = mgpu.function([y], y * count, mode='FAST_COMPILE')

    def loop():
        return [float(step(i)) + unlisted(np.ones(2)).sum() for i in (1, 2)]
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    loop()
    begin_again()
    count.set_value(0)
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    with pytest.warns(mgpu.MgpuWarning, match='count is read while finished calls are replayed'):
        loop()


def test_the_second_of_two_gaussian_numbers_comes_back(counting, tmp_path):
    step, _ = counting()

    def loop():
        random.seed(5)
        mgpu.Checkpoint(str(tmp_path), [step], every=1)
        first = random.gauss(0, 1)
        step(1)
        return first, random.gauss(0, 1)
    expected = loop()
    begin_again()
    assert loop() == expected
