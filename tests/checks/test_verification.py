"""The self-check of a function: its report, the faults that it finds, and that it leaves nothing behind."""
import theano_mgpu as mgpu
from theano_mgpu.checks import verification
from theano_mgpu.exchange import orders

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.parameters import SLOW_ON_GPU
from support.small_models import data, dense_model, momentum
from theano.sandbox.rng_mrg import MRG_RandomStreams


@pytest.fixture
def step(contexts, kind):
    contexts(kind, 2)
    model = dense_model()
    with theano.configparser.change_flags(**{'mgpu.collectives': 'host'}):  # see `half_of_the_second`
        made = mgpu.training_function(model.inputs, model.loss, model.params, momentum, outputs=[model.probabilities],
                                      mode=theano.Mode('cvm', 'fast_compile'))
    made.model = model
    return made


@pytest.fixture
def half_of_the_second(monkeypatch):
    """Make the sum over replicas faulty: the second replica's part counts by half."""
    original = orders.all_reduce_each

    def halved(lists, outs):
        original([[part * weight for part in parts] for parts, weight in zip(lists, (1, 0.5))], outs)
    monkeypatch.setattr(orders, 'all_reduce_each', halved)


@pytest.fixture
def flag():
    """Turn on the flag mgpu.verify; the tests have it on where it costs little, see conftest.py."""
    with theano.configparser.change_flags(**{'mgpu.verify': 'True'}):
        yield


@SLOW_ON_GPU  # the fixture self_check verifies the functions of tests on GPUs
def test_a_step_is_verified_and_changes_nothing(step):
    step(*data(5, 7))
    before = [variable.value() for variable in step.variables()]
    report = step.verify(*data(9, 7))
    assert report.passed and report.contexts == step.contexts, str(report)
    kinds = [row.kind for row in report.rows]
    assert kinds == ['output'] * 2 + ['new value'] * 2 * len(step.params)
    for variable, value in zip(step.variables(), before):
        np.testing.assert_array_equal(variable.value(), value)
    assert 'same answer' in str(report) and str(step.params[0]) in str(report)


@pytest.mark.slow_with('gpu')
def test_a_difference_is_shown(step, half_of_the_second):
    report = step.verify(*data(9, 7))
    assert not report.passed
    assert '<-- differs' in str(report) and 'NOT the same answer' in str(report)


@pytest.mark.slow_with('gpu')
def test_the_flag_makes_an_error_of_a_difference(flag, step, half_of_the_second):
    before = [param.get_value() for param in step.params]
    step(*data(1, 7))  # not divided: nothing to compare
    changed = [param.get_value() for param in step.params]
    with pytest.raises(mgpu.GraphError, match='does not give the answer of one device, nothing was changed') as error:
        step(*data(9, 7))
    assert 'new value' in str(error.value)
    for param, value, first in zip(step.params, changed, before):
        np.testing.assert_array_equal(param.get_value(), value)
        assert (value != first).any()


@pytest.mark.slow_with('gpu')
def test_the_flag_compares_the_first_divided_batch_alone(flag, step, monkeypatch):
    made, original = [], verification.verified
    monkeypatch.setattr(verification, 'verified', lambda *args: made.append(original(*args)) or made[-1])
    for n in (1, 9, 8):
        step(*data(n, 7))
    assert [report.passed for report in made] == [True]


def test_random_streams_are_compared_too(contexts):
    contexts('cpu', 2)
    x = T.matrix('x')
    drawn = x * MRG_RandomStreams(3).uniform(x.shape) + T.shared_randomstreams.RandomStreams(5).normal(x.shape)
    f = mgpu.function([x], drawn, mode=PYTHON)
    first = f.verify(np.ones((5, 4), 'float32'))
    assert first.passed and len(first.rows) == 3 and first.rows[2].size == 627
    assert str(f.verify(np.ones((5, 4), 'float32'))) == str(first)


def test_what_rounding_alone_changes_is_not_compared(contexts):
    """Adam and others make a step of full size from a gradient that is zero but for rounding."""
    contexts('cpu', 2)
    x = T.matrix('x')
    w = theano.shared(np.zeros(4, 'float32'), name='w')
    rounding = (x - x.mean(axis=0)).sum(axis=0)
    step = mgpu.training_function([x], (x * w).sum(), [w], lambda _: {w: T.sgn(rounding)}, mode=PYTHON)
    report = step.verify(data(33, 4)[0])
    assert report.passed and report.arbitrary == ['w'], str(report)
    assert 'last digit' in str(report)


def test_values_that_are_not_finite(contexts):
    contexts('cpu', 2)
    x = T.matrix('x')
    assert mgpu.function([x], [T.log(x), T.log(x).sum()], mode=PYTHON).verify(-np.eye(5, dtype='float32')).passed
