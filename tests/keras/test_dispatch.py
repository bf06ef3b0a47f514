"""Batches that `enable()` leaves to plain Keras: all of them on contexts of the CPU, and short ones elsewhere."""
import functools
import json
import os

import theano_mgpu as mgpu
from theano_mgpu.auto import choice as module
from theano_mgpu.auto import divided_model
from theano_mgpu.auto.choice import COUNTED, LONGEST, WARM_UP, LengthChooser, Way
from theano_mgpu.auto.model_function import ModelFunction
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.errors import GraphError
from theano_mgpu.keras import disable, enable
from theano_mgpu.runtime import forked_parts

import numpy as np
import pytest
from keras import layers as L
from keras.models import Sequential
from keras.optimizers import SGD
from support import keras_rank_jobs as rank_jobs
from support.dispatch_clock import Clock
from support.keras_equivalence import QUICK, assert_equal, built, values
from support.keras_zoo import head, noise, one_hot
from support.launch import INTERPRETED, arrays, launch
from theano.configparser import change_flags

CALLS = WARM_UP + COUNTED
X, Y = noise(43, 6).astype('float32'), one_hot(43).astype('float32')


@pytest.fixture(autouse=True)
def disabled_after():
    yield
    disable()


@pytest.fixture
def choosing(monkeypatch):
    """Return a function that makes a Clock, and a LengthChooser."""
    def make(ways=(Way.SEVERAL, Way.HOST), patience=float, **seconds):
        clock = Clock(**seconds)
        monkeypatch.setattr(module, 'time', clock)
        return clock, LengthChooser(lambda: iter(ways), Communicator(), patience)
    return make


# --- The choice ----------------------------------------------------------------------------------

def test_short_batches_that_plain_keras_computes_faster_are_left_to_it(choosing):
    clock, chooser = choosing(divided=1e-3, whole=1e-4)
    assert clock.run(chooser, 32, 2 * CALLS + 3) == ['divided'] * CALLS + ['whole'] * (CALLS + 3)
    assert chooser.whole_below == 64
    assert clock.run(chooser, 5, 2) == clock.run(chooser, 63, 2) == ['whole'] * 2
    assert clock.run(chooser, 64, 2) == ['divided'] * 2  # that length is not known yet


def test_short_batches_that_the_contexts_compute_faster_are_divided(choosing):
    clock, chooser = choosing(divided=1e-3, whole=1.1e-3)
    assert clock.run(chooser, 32, CALLS + WARM_UP + 9) == ['divided'] * CALLS + ['whole'] * WARM_UP + ['divided'] * 9
    assert clock.run(chooser, 500, 2) == ['divided'] * 2 and not chooser.whole_below
    assert clock.run(chooser, 31, CALLS + 1)[-1] == 'whole'  # a shorter batch may be another matter


def test_plain_keras_is_not_compiled_for_batches_that_take_long(choosing):
    clock, chooser = choosing(divided=1.5 * LONGEST, whole=1e-6)
    assert set(clock.run(chooser, 32, 3 * CALLS)) == {'divided'}


def test_one_device_is_timed_for_batches_of_any_length(choosing):
    """One card was compared with several for batches of more than 10 ms only: others went to the host, or to all."""
    clock, chooser = choosing((Way.SEVERAL, Way.DEVICE, Way.HOST), divided=2 * LONGEST, first=1.5 * LONGEST, whole=1e-6)
    assert clock.run(chooser, 32, 2 * CALLS + 3) == ['divided'] * CALLS + ['first'] * (CALLS + 3)
    assert chooser.whole_below == 64 and clock.run(chooser, 5, 1) == ['first']  # the short last batch of an epoch
    assert clock.run(chooser, 64, CALLS) == ['divided'] * CALLS
    chooser.divide(20)
    assert clock.run(chooser, 16, 2) == ['divided'] * 2 and clock.run(chooser, 15, 1) == ['first']
    clock, chooser = choosing((Way.SEVERAL, Way.DEVICE, Way.HOST), divided=2e-3, first=1e-3, whole=3e-3)
    assert clock.run(chooser, 32, 3 * CALLS)[-CALLS:] == ['whole'] * WARM_UP + ['first'] * COUNTED


def test_no_program_is_compiled_before_plain_calls_have_taken_as_long(choosing):
    """A script of a second waited for a program of five seconds, which it hardly used."""
    left = [.1]
    clock, chooser = choosing((Way.HOST, Way.SEVERAL), lambda: left[0], divided=1e-3, whole=2e-3)
    assert clock.run(chooser, 32, 49) == ['whole'] * 49
    assert clock.run(chooser, 32, 2 + CALLS) == ['whole'] + ['divided'] * (1 + CALLS)
    left[0] = 0  # it is compiled: other lengths need not wait
    assert clock.run(chooser, 500, CALLS + 1) == ['divided'] * (CALLS + 1)
    assert clock.run(chooser, 16, CALLS + 1) == ['whole'] * CALLS + ['divided']
    clock, chooser = choosing((Way.HOST, Way.SEVERAL), lambda: 1e9, divided=1e-4, whole=1e-4)
    clock.run(chooser, 32, CALLS)
    assert chooser.settled(32) is Way.HOST  # too short to divide


# --- Models --------------------------------------------------------------------------------------

def dense():
    return Sequential([L.Dense(5, input_shape=(6,), activation='tanh'), head()])


def normalised():
    return Sequential([L.Dense(5, input_shape=(6,), use_bias=False), L.BatchNormalization(), head()])


def compiled(build=normalised, optimizer='adam', **options):
    model = built(build)
    model.compile(optimizer, 'categorical_crossentropy', metrics=['accuracy'], **dict({'mode': QUICK}, **options))
    return model


def used(model, epochs=2):
    """Return the history of a training, results of other methods, and everything that it leaves behind."""
    np.random.seed(3)
    history = model.fit(X, Y, batch_size=10, epochs=epochs, verbose=0, validation_data=(X[:9], Y[:9])).history
    found = dict(history, evaluated=model.evaluate(X, Y, verbose=0), predicted=model.predict(X),
                 trained=model.train_on_batch(X[:7], Y[:7]))
    return sorted(found.items()) + values(model.weights) + values(model.optimizer.weights)


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for (name, one), (_, other) in zip(found, expected):
        np.testing.assert_array_equal(one, other, name)


@pytest.fixture
def no_forks(monkeypatch):
    """Let models know that no process can be forked for contexts of the CPU, as after a GPU was opened."""
    monkeypatch.setattr(divided_model, 'may_fork', lambda: False)


@pytest.mark.slow
def test_without_processes_a_model_on_contexts_of_the_cpu_is_plain_keras_and_says_so_once(contexts, no_forks):
    expected = used(compiled())
    there, told = contexts('cpu', 2), []
    report = enable(tell=told.append)
    models = [compiled(), compiled()]
    for model in models:
        assert_same_bits(used(model), expected)
    assert len(told) == 1 and 'theano-mgpu launch' in told[0] and 'always=True' in told[0] and report.notes == told
    assert [usage.contexts for usage in report.usages] == [there[:1]] * 6
    samples = {usage.name: usage.samples for usage in report.usages}
    assert samples == {'%s %s' % (model.name, kind): n for model in models
                       for kind, n in [('train', 93), ('test', 61), ('predict', 43)]}
    assert 'on 1 context (%s->cpu)' % there[0].name in str(report)
    assert str(report).count('contexts on the CPU gain nothing in one process, and none can be forked') == 6


@pytest.mark.parametrize('divided', [1e-3, 3e-3])
def test_on_contexts_of_the_cpu_plain_keras_is_timed_first(contexts, monkeypatch, divided):
    """Models on contexts of the CPU ran whole, on one core; and the summary named all contexts of one on the host."""
    expected = batches(compiled(dense, SGD(0.1, momentum=0.9)))
    there = contexts('cpu', 2)
    monkeypatch.setattr(divided_model, 'may_fork', lambda: True)
    monkeypatch.setattr(forked_parts, 'SHORTEST', np.inf)  # no process is tried, however slow this machine is
    monkeypatch.setattr(forked_parts, 'MOST', forked_parts.COUNTED)  # nor timed longer, while it gets faster
    clock = Clock(divided, whole=2e-3)
    clock.install(monkeypatch.setattr)
    report, is_faster = enable(strict=True), divided < 2e-3
    assert_equal(batches(compiled(dense, SGD(0.1, momentum=0.9))), expected, 1e-5)
    assert clock.calls[:CALLS] == ['whole'] * CALLS and 'divided' in clock.calls[CALLS:]
    assert report.usages[0].why == ('divided, 1 ms (host 2 ms)' if is_faster else 'host, 2 ms (divided 3 ms)')
    assert report.usages[0].contexts == (there if is_faster else there[:1])


def test_strict_refuses_contexts_of_the_cpu_without_processes(contexts, no_forks):
    contexts('cpu', 2)
    enable(strict=True)
    with pytest.raises(GraphError, match='always=True'):
        compiled().fit(X, Y, verbose=0)


@pytest.mark.slow_with("{'mgpu.micro_batches': 2}")
@pytest.mark.parametrize('flags', [{'mgpu.micro_batches': 2}, {'mgpu.executor': 'serial'}], ids=str)
def test_what_was_asked_for_by_a_flag_is_done(flags, contexts):
    contexts('cpu', 2)
    with change_flags(**flags):
        report = enable()
        compiled().fit(X, Y, verbose=0)
    assert len(report.usages[0].contexts) == 2 and not report.notes


def test_a_placed_model_runs_where_it_is_placed(contexts):
    first, second = contexts('cpu', 2)
    report = enable()
    model = Sequential()
    with mgpu.device(first.name):
        model.add(L.Dense(5, input_shape=(6,)))
    with mgpu.device(second.name):
        model.add(head())
    model.compile('sgd', 'mse', mode=QUICK)
    model.fit(X, Y, verbose=0)
    assert {context.name for context in report.usages[0].contexts} >= {first.name, second.name}


@pytest.mark.opencl
@pytest.mark.slow
@pytest.mark.parametrize('fails', [False, True])
def test_the_first_device_computes_long_batches_where_it_is_faster_alone(contexts, monkeypatch, fails):
    """One device was faster than two, and a note said no more than that."""
    expected = batches(compiled(dense, SGD(0.1, momentum=0.9), mode=None))
    first, second = contexts('gpu', 2)
    clock = Clock(divided=2 * LONGEST, whole=1, first=1.5 * LONGEST)
    clock.install(monkeypatch.setattr)
    if fails:
        def fail(function, step, inputs):
            if len(step.contexts) == 1:
                error = MemoryError('no room for the whole batch')
                error.out_of_memory = True
                raise error
            return by(function, step, inputs)
        by = ModelFunction._by
        monkeypatch.setattr(ModelFunction, '_by', fail)
    with change_flags(**{'mgpu.shares': 'equal'}):
        report = enable(strict=True)
        model = compiled(dense, SGD(0.1, momentum=0.9), mode=None)
        assert_equal(batches(model), expected, 1e-5)
    usage, = report.usages
    assert usage.contexts == ([first, second] if fails else [first]) and not report.notes
    assert usage.why == ('divided' if fails else 'whole, 15 ms (divided 20 ms)')
    assert clock.calls[:CALLS + 1] == ['divided'] * CALLS + ['first']
    assert len(clock.calls) == CALLS + 1 if fails else clock.calls[-1] == 'first'
    assert len(model.train_function.function.contexts) == 2


def batches(model):
    """Train on some batches, short enough to be measured; return everything that this leaves behind."""
    losses = [model.train_on_batch(X[i:i + 10], Y[i:i + 10]) for i in range(2 * CALLS + 4)]
    return [('losses', losses)] + values(model.weights) + values(model.optimizer.weights)


@pytest.mark.opencl
@pytest.mark.parametrize('whole, use', [
    pytest.param(1e-4, batches, id='plain Keras is faster', marks=pytest.mark.slow),
    pytest.param(1e-2, batches, id='the contexts are faster', marks=pytest.mark.slow),
    pytest.param(1e-4, functools.partial(used, epochs=5), id='fit', marks=pytest.mark.slow)])
def test_devices_and_plain_keras_train_one_model(contexts, monkeypatch, whole, use):
    """Steps over the contexts, of plain Keras, and over the contexts again continue with the same state."""
    expected = use(compiled(dense, SGD(0.1, momentum=0.9), mode=None))
    contexts('gpu', 2)
    clock = Clock(divided=1e-3, whole=whole, first=2e-3)
    clock.install(monkeypatch.setattr)
    report = enable(tell=lambda text: None)
    with change_flags(**{'mgpu.shares': 'equal'}):  # shares by speed take steps of no fixed number, by real seconds
        assert_equal(use(compiled(dense, SGD(0.1, momentum=0.9), mode=None)), expected, 1e-5)
    assert {'divided', 'first', 'whole'} == set(clock.calls) and not report.notes
    why = report.usages[0].why
    assert why.startswith('host, 0.1 ms' if whole < 1e-3 else 'divided, 1 ms') and 'one device 2 ms' in why


# --- Processes -----------------------------------------------------------------------------------

@pytest.mark.mpi
def test_processes_of_one_host_compute_short_batches_whole(tmp_path):
    path = str(tmp_path / 'ranks')
    done = launch(2, 'short_batches', path, job=os.path.abspath(rank_jobs.__file__),
                  flags=INTERPRETED + ',mgpu.shares=equal')
    model, history = rank_jobs.fitted_by_short_batches()
    others, state = [], rank_jobs.state(model)
    for _ in range(2 * CALLS):
        model.predict_on_batch(rank_jobs.X[:8])  # draws numbers, too
    for _ in range(37):
        loss = model.train_on_batch(rank_jobs.X[:8], rank_jobs.Y[:8])
    longer = [model.train_on_batch(rank_jobs.X[:20], rank_jobs.Y[:20])[0] for _ in range(CALLS + 1)]
    # Four epochs of six batches of 8 samples and one of 5, then predictions.
    expected = ['divided'] * 9 + ['whole'] * 4 + ['divided'] + ['whole'] * 14 + ['divided'] * CALLS + ['whole'] * CALLS
    for rank in range(2):
        with open('%s.%d.json' % (path, rank)) as file:
            found = json.load(file)
        np.testing.assert_allclose(found['history']['loss'], history['loss'], rtol=1e-5)
        for ours, theirs in zip(arrays('%s.%d.npz' % (path, rank)), state):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert found['calls'] == expected
        assert found['report'].count('host, 0.1 ms (divided 1 ms)') == 2, found['report']
        assert found['failure'].startswith('MemoryError: no memory left')
        np.testing.assert_allclose(found['loss'], loss, rtol=1e-4)
        losses, calls = found['unequal']  # the longer batch is rank 0's, whose length is new: both ranks time it
        np.testing.assert_allclose(losses, longer, rtol=1e-4)
        assert calls == ['divided'] * CALLS + ['whole']
        others.append([found['loss'], found['after']])
    assert others[0] == others[1] and 'was given other data on rank 0' in done.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_functions_that_are_made_later_are_those_of_plain_keras_all_the_same(tmp_path):
    """The functions had another model's moments or new ones, or the graph of a model that had changed meanwhile."""
    path = str(tmp_path / 'ranks')
    launch(2, 'by_turns', path, job=os.path.abspath(rank_jobs.__file__), flags=INTERPRETED + ',mgpu.shares=equal')
    expected = rank_jobs.trained_by_turns()
    for rank in range(2):
        for ours, theirs in zip(arrays('%s.%d.npz' % (path, rank)), expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
