"""Bugs that were found and fixed, each under its symptom: ops of a script that give other results at each call."""
import contextlib
import itertools
import json
import os

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faulty_executor import faulty
from support.launch import INTERPRETED, launch
from support.parameters import slow_but
from support.rank_op_jobs import FOLDS, PLACES, NextBatch, X, made, outcomes
from theano.configparser import change_flags

pytestmark = pytest.mark.verified


def calls(make, *arguments, **options):
    """Return the outputs of three calls, the weights after them, and the number of draws."""
    NextBatch.draws = 0
    f, w = made(make, *arguments, **options)
    return np.concatenate([np.ravel(each) for _ in range(3) for each in f(X)] + [w.get_value(), [NextBatch.draws]])


EVERYWHERE = list(itertools.product([*PLACES, 'an output', 'a given', 'an update', 'a default update'], [False, True]))
QUICK = [('without inputs', False), ('without inputs', True), ('of a constant', True), ('of weights', False),
         ('of a sum', False), ('in a loop', False), ('in a loop over samples', False), ('in an op of a graph', False),
         ('an output', False), ('an update', True)]


@pytest.mark.slow_with("('in a loop over samples', False)", "('in a loop', False)", "('in an op of a graph', False)")
@pytest.mark.parametrize('where', slow_but(QUICK, EVERYWHERE), ids=str)
def test_an_op_that_draws_is_called_once_a_call(cpu2, where):
    """Each replica drew other values, and the loss was another one."""
    expected = calls(theano.function, *where)
    with pytest.warns(mgpu.MgpuWarning, match='each replica would call NextBatch.*mgpu_pure'):
        found = calls(mgpu.function, *where)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('options', [{'micro_batches': 2}, {'update_on': 'host'}, {'update_on': 'sharded'},
                                     {'executor': 'threads'}], ids=str)
def test_an_op_that_draws_is_called_once_with_any_options(cpu2, options):
    expected = calls(theano.function, 'without inputs')
    with pytest.warns(mgpu.MgpuWarning, match='each replica would call NextBatch'):
        np.testing.assert_array_equal(calls(mgpu.function, 'without inputs', **options), expected)


@pytest.mark.parametrize('flag', [('mgpu.verify', True), ('mgpu.check', 1), ('mgpu.logical_shards', 4)])
def test_an_op_that_draws_is_called_once_with_any_flag(cpu2, flag):
    expected = calls(theano.function, 'without inputs')
    with change_flags(**dict([flag])), pytest.warns(mgpu.MgpuWarning, match='each replica would call NextBatch'):
        np.testing.assert_array_equal(calls(mgpu.function, 'without inputs'), expected)


def by_index(make):
    """Return what a script prints whose batch begins at an index that is drawn, and its draws."""
    NextBatch.draws = 0
    data, i = theano.shared(np.arange(60.).reshape(20, 3), 'data'), T.lscalar('i')
    first = i + T.cast(9 * NextBatch()()[0], 'int64')
    f = make([i], T.exp(data[first:first + 6].sum(axis=0) / 100), mode=FOLDS)
    return [f(n).tolist() for n in range(3)], NextBatch.draws


def test_the_index_of_a_batch_is_drawn_once(cpu2):
    """The length of the batch was found by drawing, too."""
    expected = by_index(theano.function)
    report = mgpu.enable(always=True, tell=lambda text: None)
    try:
        assert by_index(theano.function) == expected
        np.testing.assert_array_equal(calls(theano.function, 'without inputs')[-1], 3)
    finally:
        mgpu.disable()
    assert [bool(usage.samples) for usage in report.usages] == [False, False]
    assert 'each replica would call NextBatch' in str(report)


@pytest.mark.parametrize('module, name, is_divided', [
    ('pymc3.math', 'LogDet', True), ('lasagne.theano_extensions', 'Op', True), ('blocks.bricks', 'Op', True),
    ('keras.layers', 'Op', True), ('pymc3.theanof', 'GeneratorOp', False), ('pymc3_of_mine', 'LogDet', False)])
def test_an_op_of_a_library_on_theano_is_a_function_but_for_generators(cpu2, module, name, is_divided):
    """Models of PyMC3 ran whole on one device, since it defines the determinant and the like as ops of its own."""
    op = type(name, (NextBatch,), {'__module__': module})()
    x = T.dmatrix('x')
    with contextlib.nullcontext() if is_divided else pytest.warns(mgpu.MgpuWarning, match='would call ' + name):
        assert mgpu.function([x], x.sum() + op(), mode=FOLDS).n_replicas == 1 + is_divided


def test_an_op_that_says_that_it_is_a_function_is_divided(cpu2, recwarn, monkeypatch):
    monkeypatch.setattr(NextBatch, 'mgpu_pure', True, raising=False)
    f, _ = made(mgpu.function, 'of weights')
    f(X)
    assert f.n_replicas == 2 and f.plan.program.is_divided
    assert not [str(each) for each in recwarn if issubclass(each.category, mgpu.MgpuWarning)]


def placed(make, block, **options):
    """Return the losses of three calls of a model on two devices, and the draws."""
    NextBatch.draws = 0
    x = T.dmatrix('x')
    with block(0):
        w, drawn = theano.shared(np.ones((3, 3)), 'w'), NextBatch()()
        h = T.tanh(T.dot(x + drawn, w))
    with block(1):
        v = theano.shared(np.ones(3), 'v')
        loss = T.sqr(T.dot(h * drawn, v) - 1).mean()
    updates = [(p, p - .1 * gradient) for p, gradient in zip((w, v), T.grad(loss, [w, v]))]
    f = make([x], loss, updates=updates, mode=FOLDS, **options)
    return [float(f(X)) for _ in range(3)] + [NextBatch.draws]


@pytest.mark.slow_with("{'verify': True}", '{}')
@pytest.mark.parametrize('options', [{}, {'recompute': True}, {'verify': True}], ids=str)
def test_an_op_that_draws_is_called_once_on_one_device_of_a_placed_graph(cpu2, options):
    """Each piece of the graph drew values of its own, and so did the forward pass that was computed again."""
    expected = placed(theano.function, lambda number: contextlib.nullcontext())
    with change_flags(**{'mgpu.verify': options.pop('verify', False)}):
        found = placed(mgpu.function, lambda number: mgpu.device(cpu2[number].name), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.opencl
def test_a_step_that_draws_is_not_computed_again_for_lack_of_memory(gpu2):
    """The values of the first attempt were lost."""
    from pygpu.gpuarray import GpuArrayException
    NextBatch.draws = 0
    x = T.fmatrix('x')
    with mgpu.device(gpu2[0].name):
        h = x + T.cast(NextBatch()(), 'float32')
    with mgpu.device(gpu2[1].name):
        f = mgpu.function([x], T.tanh(h))
    f(X.astype('float32'))
    executor = faulty(f)
    executor.inject(GpuArrayException('out of memory', 5), run=3)
    with pytest.raises(mgpu.ReplicaError, match='out of memory') as caught:
        f(X.astype('float32'))
    assert executor.struck and NextBatch.draws == 2
    assert 'not computed again: that would call NextBatch twice' in str(caught.value) + str(
        getattr(caught.value, '__notes__', ''))


@pytest.mark.mpi
def test_all_ranks_have_what_an_op_gives_on_rank_0(cpu2, tmp_path):
    """Each rank drew values of its own, and trained other weights, without a word."""
    from support import rank_op_jobs
    plain = dict(outcomes(theano.function), keras=rank_op_jobs.of_keras(),
                 placed=rank_op_jobs.placed(contextlib.nullcontext, theano.function))
    launch(2, tmp_path / 'drawn', job=os.path.abspath(rank_op_jobs.__file__), flags=INTERPRETED,
           options=['--gpus-per-process', '2'])
    of_ranks = [json.loads((tmp_path / ('drawn.%d' % rank)).read_text()) for rank in range(2)]
    for way, outcomes_of_way in of_ranks[0].pop('ways').items():
        others = of_ranks[1]['ways'][way]
        for name, (figures, draws) in outcomes_of_way.items():
            assert others[name] == [figures, draws] and draws == plain[name][1], (way, name)
            np.testing.assert_allclose(figures, plain[name][0], 1e-6, err_msg=way + name)
    del of_ranks[1]['ways']
    assert of_ranks[0].pop('random') == of_ranks[1].pop('random')
    assert of_ranks == rank_op_jobs.FOUND
