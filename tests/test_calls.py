"""Every argument of `theano.function`, of `In` and `Out`, of a call and of a copy: divided as in plain Theano."""
import inspect
import re

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
from support.call_cases import CASES, WHOLE, X, affine, scripts
from theano.compile.function_module import Function
from theano.compile.pfunc import pfunc

OWN = {'plain_call', 'unwatched_call', 'mgpu_divided'}  # what this package adds to `Function`


@pytest.fixture
def enabled():
    """A function that calls `mgpu.enable` for every function; its list `messages` collects what `tell` gets."""
    def enable(**options):
        return mgpu.enable(always=True, tell=enable.messages.append, **options)
    enable.messages = []
    yield enable
    mgpu.disable()


def assert_equal(one, other, tolerance=1e-9):
    """Compare figures: arrays, numbers, texts, or lists, tuples and dicts of these."""
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each in zip(one, other):
            assert_equal(*each)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, (np.ndarray, np.generic, float)):
        assert np.shape(one) == np.shape(other) and np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=1e-12)
    else:
        assert one == other


def arguments():
    """The arguments of each callable, and the attributes of a function."""
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


@pytest.mark.parametrize('script', scripts())
def test_a_call_is_that_of_plain_theano(script, cpu2, enabled):
    expected = list(script())
    report = enabled()
    for found, figure in zip(script(), expected):
        assert_equal(found, figure)
    assert bool(report.usages and any(usage.samples for usage in report.usages)) == (script not in WHOLE)


def test_a_copy_is_divided(cpu2, enabled):
    report = enabled()
    f, _ = affine(name='f')
    g = f.copy(name='g')
    g(X), g(X)
    assert [(usage.name, usage.calls) for usage in report.usages] == [('f', 0), ('g', 2)]


@pytest.mark.parametrize('subset, error', [([2], IndexError), ([0, 5], IndexError), ([-1], IndexError),
                                           ([1.0], RuntimeError)])
def test_numbers_of_outputs_that_there_are_not(subset, error, cpu2, enabled):
    """Plain Theano writes to memory that is not its own."""
    enabled()
    f, w = affine()
    f(X)
    before = w.get_value()
    with pytest.raises(error):
        f(X, 3, output_subset=subset)
    np.testing.assert_array_equal(w.get_value(), before)
    assert f['factor'] == 0.5
