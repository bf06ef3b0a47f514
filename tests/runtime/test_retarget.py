"""One optimised graph for all contexts of a device type: bitwise the same as a compilation for each context."""
import logging
from collections import Counter

import theano_mgpu as mgpu
from theano_mgpu.graph import graph
from theano_mgpu.runtime import compiler
from theano_mgpu.runtime.replicas.replicated import copy_on
from theano_mgpu.runtime.retarget import CannotRetarget, link

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.sending import Sender
from support.small_models import conv_model, data, dense_model, momentum
from theano.compile.nanguardmode import NanGuardMode
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams


def on_each(contexts, inputs, outputs, like, mode=None):
    """Compile a function for each context; the later ones like the first one, or in full."""
    compiled = []
    for context in contexts:
        shared = graph.shared_variables(outputs)
        replicas = {v: copy_on(context, v, v.get_value()) for v in shared}
        compiled.append(compiler.compile_for(context, inputs, outputs, {}, replicas, mode,
                                             like=compiled if like else ()))
    return compiled


def is_retargeted(function):
    return function.mgpu_optimised is not None and function.mgpu_optimised.context != function.mgpu_context


def results(function, arguments):
    return [np.asarray(result) for result in function(*Sender(function).send(arguments))]


def check_bitwise(contexts, inputs, outputs, arguments, mode=None):
    full, moved = on_each(contexts, inputs, outputs, False, mode)[1], on_each(contexts, inputs, outputs, True, mode)[1]
    assert is_retargeted(moved) and not is_retargeted(full)
    assert Counter(str(node.op) for node in moved.maker.fgraph.toposort()) == \
        Counter(str(node.op) for node in full.maker.fgraph.toposort())
    for _ in range(2):
        for one, other in zip(results(full, arguments), results(moved, arguments)):
            np.testing.assert_array_equal(one, other)
    assert not mgpu.audit(moved).wrong


@pytest.mark.needs_compiler
@pytest.mark.parametrize('make,shape', [
    pytest.param(dense_model, (7,), marks=pytest.mark.cuda),
    pytest.param(conv_model, (2, 8, 8), marks=pytest.mark.cuda(opencl='slow'))])
def test_gradients_are_bitwise_those_of_compiling_for_the_context(contexts, kind, make, shape):
    model = make()
    outputs = [model.loss, model.accuracy] + theano.grad(model.loss, model.params)
    check_bitwise(contexts(kind, 2, of_one_type=True), model.inputs, outputs, data(5, *shape))


@pytest.mark.cuda
@pytest.mark.needs_compiler
def test_random_draws_are_bitwise_the_same(contexts, kind):
    x = T.fmatrix('x')
    masks = [MRG_RandomStreams(3).binomial((4, 5), p=0.5, dtype='float32'), RandomStreams(4).uniform((4, 5))]
    check_bitwise(contexts(kind, 2, of_one_type=True), [x], [x * mask.astype('float32') for mask in masks],
                  [np.ones((4, 5), 'float32')])


@pytest.mark.cuda(opencl='slow')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('kind', [pytest.param('cpu', marks=pytest.mark.slow), 'gpu'])
def test_indexing_constants_and_loops_are_bitwise_the_same(contexts, kind):
    x, rows, table = T.fmatrix('x'), T.ivector('rows'), theano.shared(np.eye(5, dtype='float32'), name='table')
    constant = T.constant(np.arange(5, dtype='float32'))
    total, _ = theano.scan(lambda row, before: T.tanh(before + row), x, T.zeros((5,), 'float32'))
    outputs = [table[rows] + constant, T.set_subtensor(x[1:2], 3), total[-1], T.concatenate([x, x * 2]).sum(axis=0),
               T.alloc(constant, 3, 5) + x[:3], x.max(axis=1), T.nnet.softmax(x)]
    check_bitwise(contexts(kind, 2, of_one_type=True), [x, rows], outputs,
                  [np.random.RandomState(0).rand(4, 5).astype('float32'), np.array([0, 3, 3], 'int32')])


def test_each_function_reads_its_own_replica(cpu2):
    w = theano.shared(np.ones(3), name='w')
    f, g = on_each(cpu2, [], [w * 2], like=True, mode='FAST_COMPILE')
    g.maker.inputs[0].value.value = np.full(3, 5.)
    assert (f()[0][0], g()[0][0]) == (2, 10) and f()[0] is not g()[0]


@pytest.mark.slow_with('cpu')
def test_an_in_place_op_waits_for_the_readers(contexts, kind):
    """The order in which ops run is kept: an op that reads an array runs before one that overwrites it."""
    x = T.fmatrix('x')
    y = x * 2
    outputs = [y.sum(axis=0), T.inc_subtensor(y[0], 1), y[0] - 1]
    check_bitwise(contexts(kind, 2, of_one_type=True), [x], outputs, [np.ones((2, 3), 'float32')])


@pytest.mark.slow
@pytest.mark.opencl
def test_contexts_of_another_kind_are_compiled_for(contexts):
    model, (gpu,) = dense_model(), contexts('gpu', 1)
    cpu, = contexts('cpu', 1)
    mgpu.init('%s->%s;%s->cpu' % (gpu.name, gpu.device, cpu.name))
    compiled = on_each([gpu, cpu], model.inputs, [model.loss], like=True)
    assert not is_retargeted(compiled[1])


def test_a_training_function_optimises_once(contexts):
    model = dense_model()
    contexts('cpu', 3)
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, mode='FAST_COMPILE',
                                  update_on='device')
    assert [is_retargeted(f) for f in step.functions] == [False, True, True] * 2


class Bound(theano.gof.Op):
    """An op that names a context."""

    __props__ = ('context_name',)

    def __init__(self, context_name):
        self.context_name = context_name

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = inputs[0] + 1


def test_what_cannot_be_moved_is_compiled_and_told(cpu2, caplog):
    x = T.dvector('x')
    with caplog.at_level(logging.WARNING):
        f, g = on_each(cpu2, [x], [Bound('elsewhere')(x)], like=True, mode='FAST_COMPILE')
    assert not is_retargeted(g) and g(np.zeros(1))[0] == 1
    assert 'compiled once more for context host1: context elsewhere is named in a graph of context host0' in caplog.text
    with pytest.raises(CannotRetarget):
        link(f.mgpu_optimised, cpu2[1], {})


def test_a_mode_that_checks_is_compiled_for_each_context(cpu2):
    mode = NanGuardMode(nan_is_error=True, inf_is_error=True, big_is_error=False)
    x = T.dvector('x')
    f, g = on_each(cpu2, [x], [x + 1], like=True, mode=mode)
    with pytest.raises(AssertionError):
        g(np.full(1, np.nan))
