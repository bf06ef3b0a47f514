"""`mgpu.Checkpoint`: a loop over Theano functions that was killed goes on to the bit."""
import builtins
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading

import theano_mgpu as mgpu
from theano_mgpu.runtime.state.recorded_calls import RecordedCalls
from theano_mgpu.utils.values import sampled_checksum

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.checkpoint_files import begin_again, earlier_file, rewrite
from support.forks import in_a_fork
from support.launch import launch
from support.processes import python
from support.search_path import PROGRAMS

SCRIPT = str(PROGRAMS / 'killed_loop.py')
FLAGS = 'floatX=float64,cxx=,optimizer=fast_compile,mgpu.shares=equal'


def started(folder, calls, kind, expected):
    done = python(SCRIPT, folder, calls, kind, flags=FLAGS, expected=expected, PYTHONHASHSEED=str(calls))
    assert 'MgpuWarning' not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('kind, kills', [
    ('plain', [4]), ('enable', [7]), ('parallel', [5]), ('training', [8]),
    ('enable', [1, 2, 4, 3, 5, 4, 3, 4, 5, 4])])
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


@pytest.mark.slow_but_with('plain-SIGTERM')
@pytest.mark.parametrize('kind, number', [
    ('plain', signal.SIGTERM), ('training', signal.SIGUSR1), ('enable', signal.SIGTERM)])
def test_a_signal_writes_a_checkpoint_after_the_call_that_runs(kind, number, tmp_path):
    """Up to `every` calls were lost when a scheduler ended the process."""
    printed = ''
    for calls in 4, 3:
        done = python(SCRIPT, tmp_path / 'ended', calls, kind, int(number), flags=FLAGS, expected=-number)
        assert ': the process ends by %s\n' % signal.Signals(number).name in done.stderr
        printed += done.stderr
    assert 'the process ends, with a checkpoint, once the call' in printed  # unless the call ended before
    found = python(SCRIPT, tmp_path / 'ended', 0, kind, int(number), flags=FLAGS)
    assert 'computed 27\n' in found.stderr  # of 36: the call after each signal ends, too
    assert found.stdout == started(tmp_path / 'whole', 0, kind, 0)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('kind', ['training', 'enable'])
def test_all_ranks_end_after_the_same_call_when_one_gets_a_signal(kind, tmp_path):
    def launched(folder, calls, expected=0):
        return launch(2, tmp_path / folder, calls, kind, int(signal.SIGTERM), job=SCRIPT, flags=FLAGS,
                      expected=expected)
    launched('ended', 5, 128 + signal.SIGTERM)
    found = launched('ended', 0)
    assert found.stdout == launched('whole', 0).stdout and 'computed 30\n' in found.stderr


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_launch_waits_for_the_checkpoint_and_does_not_start_again(number, tmp_path):
    """mpirun killed the ranks two seconds after SIGTERM; after SIGUSR1 the job was started again."""
    script = tmp_path / 'script.py'
    script.write_text(SLOW)
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', '--restarts', '2', str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=str(tmp_path),
                          env=dict(os.environ, THEANO_FLAGS=FLAGS + ',contexts=a->cpu;b->cpu')) as process:
        assert '3\n' in iter(process.stdout.readline, '')
        process.send_signal(number)
        rest, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + number and 'restart 1' not in messages and '0\n' not in rest, messages
    with np.load(str(tmp_path / 'run.npz')) as file:
        assert file['extra/calls'] in (4, 5, 6)


SLOW = '''
import time
import theano_mgpu as mgpu
import theano, theano.tensor as T
x, w = T.vector('x'), theano.shared(0., 'w')
step = mgpu.training_function([x], (x * w).sum(), [w], lambda gradients: {w: w + gradients[0]})
for number in range(step.checkpoint('run.npz', every=1000), 100):
    step([1, 2])
    if number > 2:
        time.sleep(4)  # longer than mpirun would wait
    if mgpu.rank() == 0:
        print(number, flush=True)
'''


@pytest.mark.slow
def test_signals_end_what_has_no_call_and_are_left_to_handlers(tmp_path):
    """A worker of a pool, which inherits the handler, did not end; neither did a process after its loop."""
    done = python('-c', IDLES, tmp_path, flags=FLAGS, expected=-signal.SIGTERM)
    assert done.stdout.split() == ['own', 'fork', str(-signal.SIGTERM), 'idle'], done.stdout + done.stderr


IDLES = '''
import os, signal, sys, time
import theano_mgpu as mgpu
import theano
from theano_mgpu.comm import notice
signal.signal(signal.SIGUSR1, lambda *given: print('own', flush=True))
count = theano.shared(0., 'count')
step = theano.function([], count, updates={count: count + 1})
checkpoint = mgpu.Checkpoint(sys.argv[1], [step], every=1000)
step()
os.kill(os.getpid(), signal.SIGUSR1)
child = os.fork()
if not child:
    time.sleep(60)
time.sleep(.1)
os.kill(child, signal.SIGTERM)
print('fork', -os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
notice.IDLE = .5
os.kill(os.getpid(), signal.SIGTERM)
print('idle', flush=True)
time.sleep(60)
'''


@pytest.fixture
def counting():
    """Return a function that makes a function which counts, and its count."""
    def make(start=0.):
        count, x = theano.shared(start, 'count'), T.dscalar('x')
        return theano.function([x], count * x, updates={count: count + x}, mode='FAST_COMPILE'), count
    return make


def test_finished_calls_return_their_results_and_compute_nothing(counting, tmp_path, capfd):
    step, count = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=2)
    assert [float(step(i)) for i in (1, 2, 3, 4, 5)] == [0, 2, 9, 24, 50]
    step, count = counting()
    begin_again()
    made = mgpu.Checkpoint(str(tmp_path), [step], every=2)
    assert 'checkpoint.npz: continues after the calls that it has; remove it' in capfd.readouterr().err
    assert made.replaying and [float(step(i)) for i in (1, 2, 3)] == [0, 2, 9] and made.replaying
    with pytest.warns(mgpu.MgpuWarning, match='count is read while finished calls are replayed'):
        assert count.get_value() == 0
    assert step(4) == 24 and not made.replaying and count.get_value() == 10 and made.completed == 4
    assert step(5) == 50


def test_a_file_of_an_earlier_version(counting, tmp_path):
    step, count = counting()
    made = mgpu.Checkpoint(os.path.dirname(earlier_file('checkpoint.npz', tmp_path)), [step], every=2)
    assert [float(step(i)) for i in (1, 2)] == [0, 2] and made.replaying
    with pytest.raises(ValueError, match='Bad input argument'):
        step('three')
    assert step(4) == 12 and made.replaying and step(5) == 35 and not made.replaying
    assert step(6) == 72 and count.get_value() == 18


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
    with pytest.raises(ValueError, match='called its function with other arguments here.* in one order'):
        step(5)


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
        columns, = made._replay.record._columns
        assert columns[0].to_arrays()[0].size == made.completed and len(columns) == 1
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


def test_the_file_of_a_second_loop_of_another_run_is_not_continued_from(counting, tmp_path):
    """The second loop returned the results of the run before, whose first file was removed to begin anew."""
    step, count = counting()

    def loops(first):
        begin_again()
        count.set_value(first)
        for _ in range(2):
            mgpu.Checkpoint(str(tmp_path), [step], every=2)
            step(1), step(1)
        return count.get_value()
    assert loops(0.) == 4
    (tmp_path / 'checkpoint.npz').unlink()
    with pytest.warns(mgpu.MgpuWarning, match='checkpoint-2.npz is not of the run that .*checkpoint.npz is of: the tr'):
        assert loops(10.) == 14
    assert loops(0.) == 14


def test_a_loop_before_that_has_no_checkpoint_yet_is_no_other_run(counting, tmp_path):
    step, count = counting()
    for _ in range(2):
        begin_again()
        count.set_value(0.)
        mgpu.Checkpoint(str(tmp_path), [step], every=9)
        step(1)
        made = mgpu.Checkpoint(str(tmp_path), [step], every=1)
        was_replaying = made.replaying
        step(1)
    assert was_replaying and not (tmp_path / 'checkpoint.npz').exists()


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


def test_a_fork_neither_writes_the_checkpoint_of_its_parent_nor_replays_it(counting, tmp_path):
    """The parent went on from the state of the fork."""
    step, count = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(1)

    def train_on():
        with pytest.warns(mgpu.MgpuWarning, match='checkpoint.npz is the file of process .* a fork: no state') as said:
            assert [float(step(5)) for _ in range(2)] == [5, 30]
        assert len(said) == 1
        with pytest.raises(mgpu.MgpuError, match='checkpoint.npz belongs to the process .* a fork'):
            mgpu.Checkpoint(str(tmp_path), [step])
        mgpu.Checkpoint(str(tmp_path / 'own'), [step], every=1)
        step(1)
    in_a_fork(train_on)
    assert (tmp_path / 'own' / 'checkpoint.npz').exists()
    step, count = counting()
    begin_again()
    made = mgpu.Checkpoint(str(tmp_path), [step], every=1)
    in_a_fork(lambda: step(7))
    assert made.replaying and step(1) == 0 and count.get_value() == 1


def test_calls_in_another_order_get_no_results_of_other_calls(counting, tmp_path):
    """A thread that was faster than before got the result of a call of the other thread."""
    step, _ = counting(1.)
    found = []

    def call(value):
        def act():
            try:
                found.append(float(step(value)))
            except ValueError as error:
                assert 'with other arguments here' in str(error)
                found.append('refused')
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    for value in (2, 3, 5):
        call(value)
    step, count = counting(1.)
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    for value in (2, 5, 3, 7, 5):  # one that is refused leaves the next one as it was
        call(value)
    assert found == [2, 9, 30, 2, 'refused', 9, 'refused', 30] and count.get_value() == 11


def test_a_call_waits_for_that_of_another_thread(counting, tmp_path):
    """A checkpoint had the new values of a call that was under way, and not the call."""
    step, count = counting()

    class CallsMeanwhile(theano.Op):
        __props__ = ()
        itypes = otypes = [T.dscalar]

        def perform(self, node, inputs, outputs):
            outputs[0][0] = np.array(inputs[0])
            threads.append(threading.Thread(target=step, args=[1]))
            threads[-1].start()
            threads[-1].join(.2)
            counts.append(float(count.get_value()))
    x, threads, counts = T.dscalar('x'), [], []
    other = theano.function([x], CallsMeanwhile()(x), mode='FAST_COMPILE')
    mgpu.Checkpoint(str(tmp_path), [step, other], every=1)
    other(2)
    threads[0].join()
    assert counts == [0] and count.get_value() == 1


def read_again(calls):
    return calls.of_file('run.npz', calls.to_arrays())


def test_a_result_that_cannot_be_recorded_shifts_no_others():
    """One output of a failed call was recorded, so that later calls had the results of the ones before."""
    calls = RecordedCalls(1)
    with pytest.raises(TypeError, match='results that are arrays of numbers'):
        calls.add(0, 1, [np.ones(1), np.array([None])])
    calls.add(0, 1, [np.zeros(1), np.zeros(1)])
    assert read_again(calls).next('run.npz', RecordedCalls(1), 0, 1)[0] == 0


class OfTheScript(LookupError):
    """A class that a file cannot name."""

    def __init__(self, one, other):
        super().__init__('%s and %s' % (one, other))


GROUP = getattr(builtins, 'ExceptionGroup', None)  # since Python 3.11


def raised():
    groups = [GROUP('g', [ValueError('a'), GROUP('h', [KeyError(1)])])] if GROUP else []
    with pytest.raises(OSError) as of_system:
        open('/nonexistent')
    return [ValueError('a'), KeyError('three'), UnicodeDecodeError('utf8', b'ab', 0, 1, 'bad'), of_system.value,
            mgpu.ReplicaError('lost', 1), StopIteration(3), ImportError('no', name='x'), SyntaxError('bad'), *groups]


def replayed(error):
    calls = RecordedCalls(1)
    calls.add_failure(0, 1, error)
    return read_again(calls).next('run.npz', RecordedCalls(1), 0, 1)


def test_errors_come_back_with_their_classes_and_texts():
    """A KeyError had other quotes; a UnicodeDecodeError, or a group, was a TypeError of its constructor."""
    for error in raised():
        found = replayed(error)
        assert isinstance(found, type(error)) and type(found).__name__ == type(error).__name__
        assert str(found) == str(error)
    if GROUP:
        assert [[type(each).__mro__[1] for each in group.exceptions] for group in (found, found.exceptions[1])] == [
            [ValueError, GROUP], [KeyError]]
    found = replayed(OfTheScript(1, 2))
    assert isinstance(found, LookupError) and str(found) == 'OfTheScript: 1 and 2'


@pytest.mark.parametrize('name', ['exec', 'eval', 'print', 'input', 'open', 'type', 'warn', 'os'])
def test_a_file_runs_no_code(name, counting, tmp_path):
    """The class of an error in a file was any name among Python's builtins: exec ran the text."""
    step, _ = counting()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(1)
    path = str(tmp_path / 'checkpoint.npz')
    rewrite(path, {'extra/calls': np.array([-1]),
                   'extra/errors': np.array(json.dumps([[0, name, '__import__("os")']]))})
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    with pytest.raises(RuntimeError, match=name + ': __import__'):
        step(1)


@pytest.mark.parametrize('first, end, error', [(1, 2, None), (2, 1, 'first'), (1, 3, 'last')])
def test_a_file_without_a_key_for_each_call_is_continued(first, end, error, counting, tmp_path):
    """A version reads the files of every earlier one, which had a checksum of the first call, and one of all."""
    step, _ = counting()
    made = mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(1)
    checksums = [sampled_checksum([0, [np.asarray(1)], {}])]
    step(5), step(2)
    path = str(tmp_path / 'checkpoint.npz')
    rewrite(path, {'extra/checksums': np.array([*checksums, made._replay.record.key])}, without=['extra/keys'])
    step, count = counting()
    begin_again()
    made = mgpu.Checkpoint(str(tmp_path), [step], every=1)
    for value, name in ((first, 'first'), (5, ''), (end, 'last')):
        if name == error:
            with pytest.raises(ValueError, match='with other arguments'):
                step(value)
            return
        step(value)
    assert not made.replaying and count.get_value() == 8


def regression(rate=.1, power=2, samples=6, shared_rate=1., taps=(-1, -3)):
    """Return the outputs and updates of a training over a data set, with a scan."""
    w, b, data = theano.shared(np.zeros(3), 'w'), theano.shared(0.), theano.shared(np.ones((samples, 3)), 'data')
    loss = abs(T.dot(data, w) + b - 1).__pow__(power).mean()
    summed, _ = theano.scan(lambda value, *before: value + sum(before), data[:, 0],
                            [{'initial': T.zeros(3, 'float64'), 'taps': list(taps)}])
    gradients = T.grad(loss, [w, b])
    factor = theano.shared(shared_rate, 'factor')
    return [loss, summed[-1]], [(each, each - rate * factor * gradient) for each, gradient in zip([w, b], gradients)]


CHANGES = [({'rate': .2}, r'update 0 of w was ops (.*) with constants .* and is ops \1 with constants'),
           ({'power': 3}, 'output 0 of function 0 was ops'), ({'taps': (-2, -3)}, 'output 1 of function 0 was ops'),
           ({'samples': 9}, r'data was shape \(6, 3\) and is shape \(9, 3\)'),
           ({'shared_rate': .5}, 'factor was 1.0 and is 0.5'), ({}, None)]


@pytest.mark.slow_with('change0*')
@pytest.mark.parametrize('change, text', CHANGES)
def test_a_script_that_has_changed_is_said(change, text, tmp_path, recwarn):
    """The training went on, with another rate, loss or data set, without a word."""
    def made(**change):
        outputs, updates = regression(**change)
        function = theano.function([], outputs, updates=updates, mode='FAST_COMPILE')
        mgpu.Checkpoint(str(tmp_path), [function], every=1)
        return function
    made()()
    begin_again()
    made(**change)
    said = [str(each.message) for each in recwarn if 'another script' in str(each.message)]
    assert len(said) == (text is not None)
    assert not said or re.search('checkpoint.npz was written .* by another script: .*' + text, said[0]), said
