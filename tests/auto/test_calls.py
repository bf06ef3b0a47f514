"""Every argument of `theano.function`, `In`, `Out`, a call and a copy: divided functions do as in plain Theano."""
import copy
import functools
import inspect
import pickle
import re

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import call_cases, rank_cases, type_cases
from support.call_cases import ALONE, CASES, MODE, WHOLE, X, affine, scripts, shared
from support.figures import assert_equal
from support.launch import launch
from theano.compile.function_module import Function
from theano.compile.pfunc import pfunc

OWN = {'plain_call', 'unwatched_call', 'mgpu_divided'}  # attributes that this package adds to `Function`


@pytest.fixture
def enabled():
    """Return a function that calls `mgpu.enable` for every function; its list `messages` collects the notes."""
    def enable(**options):
        return mgpu.enable(always=True, tell=enable.messages.append, **options)
    enable.messages = []
    yield enable
    mgpu.disable()


def arguments():
    """Yield the arguments of each callable, and the attributes of a function."""
    for callable_ in (theano.function, pfunc, theano.In, theano.Out, Function.__call__, Function.copy):
        found = list(inspect.signature(callable_).parameters)
        if callable_ is Function.__call__:
            found += re.findall(r"kwargs\.pop\('(\w+)'", inspect.getsource(inspect.unwrap(callable_)))
        yield from ((callable_, name) for name in found if name != 'self')
    f, _ = affine()
    for name in list(vars(Function)) + list(vars(f)):
        if not name.startswith('_') and name not in OWN:
            yield Function, name


@pytest.mark.parametrize('owner, name', arguments(), ids=lambda each: getattr(each, '__name__', each))
def test_each_argument_has_a_case(owner, name):
    assert (owner, name) in CASES, 'write a script for %s of %s in support/call_cases.py' % (name, owner)


@pytest.mark.slow_with('sparse_arguments', 'outputs', 'sparse_shared', 'givens', 'swapped', 'modes', 'copies',
                       'pickled', 'dtypes', 'sparse_outputs')
@pytest.mark.parametrize('script', scripts())
def test_a_call_is_that_of_plain_theano(script, cpu2, enabled):
    expected = list(script())
    report = enabled()
    for found, figure in zip(script(), expected):
        assert_equal(found, figure)
    assert not [message for message in enabled.messages if 'continues on one device' in message]
    assert bool(report.usages and any(usage.samples for usage in report.usages)) == (script not in WHOLE)


@pytest.mark.parametrize('copied', [lambda f: pickle.loads(pickle.dumps(f)), copy.deepcopy], ids=['pickle', 'deepcopy'])
def test_a_function_that_is_read_from_a_pickle_is_divided(copied, cpu2, enabled):
    """It ran on the host: a chain of PyMC3 in a process of its own had no device."""
    report, w, x = enabled(), theano.shared(np.arange(3.), 'w'), T.dmatrix('x')
    rate = T.dscalar('rate')
    f = theano.function([x, theano.In(rate, value=2.)], x.dot(w) * rate, updates={w: w + x.sum(0)}, mode=MODE)
    g = copied(f)
    values = np.arange(15.).reshape(5, 3)
    for _ in range(2):
        np.testing.assert_allclose(g(values), f(values), 1e-12)
    assert [len(usage.contexts) for usage in report.usages] == [2, 2] and report.usages[1].samples == 10
    assert g.get_shared()[0] is not w  # it has a variable of its own, of the same value
    np.testing.assert_allclose(g.get_shared()[0].get_value(), w.get_value(), 1e-12)


def test_an_input_may_be_computed_elsewhere(cpu2, enabled):
    """The note said that the graph needs a variable that is not among the inputs: dl4mt's functions of one word."""
    x, w = T.dmatrix('x'), theano.shared(np.arange(9.).reshape(3, 3), 'w')
    hidden, values = T.tanh(x), np.arange(15.).reshape(5, 3)
    outputs, updates = [T.dot(hidden, w), hidden.sum(axis=0)], [(w, w + T.dot(hidden.T, hidden))]

    def compute():
        w.set_value(np.arange(9.).reshape(3, 3))
        return [*theano.function([hidden], outputs, updates=updates, mode=MODE)(values), w.get_value()]
    expected, report = compute(), enabled()
    for found, figure in zip(compute(), expected):
        np.testing.assert_allclose(found, figure, 1e-12)
    assert [len(usage.contexts) for usage in report.usages] == [2] and not enabled.messages


def test_a_copy_is_divided(cpu2, enabled):
    report = enabled()
    f, _ = affine(name='f')
    g = f.copy(name='g')
    g(X), g(X)
    assert [(usage.name, usage.calls) for usage in report.usages] == [('f', 0), ('g', 2)]


@pytest.mark.parametrize('subset, error', [([2], IndexError), ([0, 5], IndexError), ([-1], IndexError),
                                           ([1.0], RuntimeError)])
def test_numbers_of_outputs_that_there_are_not(subset, error, cpu2, enabled):
    """Plain Theano writes to memory that is not its own, given such numbers."""
    enabled()
    f, w = affine()
    f(X)
    before = w.get_value()
    with pytest.raises(error):
        f(X, 3, output_subset=subset)
    np.testing.assert_array_equal(w.get_value(), before)
    assert f['factor'] == 0.5


ORDER = [script.__name__ for script in scripts()]
# One script for each way in which ranks exchange values, or compare them.
QUICK = [call_cases.some_outputs, call_cases.borrowed_memory, call_cases.values_of_inputs, call_cases.states_of_inputs,
         call_cases.shared_inputs, type_cases.sparse_arguments, type_cases.sparse_outputs, type_cases.sparse_shared,
         type_cases.generic, type_cases.lists]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('chosen', [QUICK, None], ids=['some', 'all'])
def test_a_call_on_ranks_is_that_of_plain_theano(chosen):
    """Each rank received a different sparse batch, as the pointers of the batches were compared."""
    names = [script.__name__ for script in chosen or scripts() if script not in ALONE]
    done = launch(2, *names, flags='contexts=a->cpu;b->cpu', job=rank_cases.__file__)
    assert done.stdout.splitlines() == [name + ': as in plain Theano' for name in sorted(names, key=ORDER.index)]


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_a_function_of_the_package_has_defaults_that_can_be_assigned(contexts, kind):
    """An assigned default counts for one call, as with `theano.function`."""
    contexts(kind, 2)
    x, s, v, w = T.fmatrix('x'), T.fscalar('s'), T.fvector('v'), theano.shared(np.ones(3, 'float32'))
    inputs = [x, theano.In(s, value=0.5), theano.In(v, value=[1, 2, 3], name='shift', allow_downcast=True)]
    outputs = {'rows': T.dot(x, w) * s, 'total': (x + v).sum()}
    found, batch = [], X.astype('float32')
    for make in (theano.function, functools.partial(mgpu.function, broadcast=[v])):
        w.set_value(np.ones(3, 'float32'))
        f = make(inputs, outputs, updates=[(w, w + x.sum(axis=0))], allow_input_downcast=True)
        figures = [f(batch), f['s'], f[1], f[v], 's' in f, 'v' in f, v in f]
        f['s'], f['shift'] = 3, [0, 0, 1]
        figures += [f['s'], f[v], f(batch), f['s'], f[v], f(batch, s=2)]
        f[s] = 7
        figures += [f(batch, output_subset=['rows']), f(batch, output_subset=['total', 'rows'])]
        for call, *arguments in ((f.__getitem__, 'none'), (f.__setitem__, 'none', 1)):
            figures.append(call_cases.outcome(call, *arguments)[0])
        figures.append(call_cases.outcome(f, batch, output_subset=['none'])[0])
        found.append(figures)
    assert_equal(*found)


def test_a_training_function_has_a_rate_that_can_be_assigned(cpu2):
    x, rate, w = T.dmatrix('x'), T.dscalar('rate'), shared(np.zeros(3))
    step = mgpu.training_function([x, theano.In(rate, value=0.1)], ((T.dot(x, w) - 1) ** 2).mean(), [w],
                                  lambda gradients: {w: w - rate * gradients[0]}, mode=MODE)
    for assigned, given in ((None, 0.1), (0.7, 0.7), (None, 0.1)):
        before = w.get_value()
        if assigned:
            step['rate'] = assigned
        step(X)
        gradient = 2 * ((X.dot(before) - 1)[:, None] * X).mean(axis=0)
        np.testing.assert_allclose(w.get_value(), before - given * gradient)
    assert step['rate'] == 0.1
