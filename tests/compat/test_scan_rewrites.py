"""Loops keep what their gradients need."""
import functools

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.scan_module.scan_op import Scan
from theano.tensor import blas
from theano.tensor.elemwise import Elemwise

UNITS = 5
FAST = theano.Mode('py', 'fast_run')
scan = functools.partial(theano.scan, mode=FAST)


def lstm(row, h, c, w, u):
    gates = T.dot(row, w) + T.dot(h, u)
    i, f, o = (T.nnet.sigmoid(gates[:, k * UNITS:(k + 1) * UNITS]) for k in range(3))
    c = f * c + i * T.tanh(gates[:, 3 * UNITS:])
    return o * T.tanh(c), c


def gru(row, h, c, w, u):
    x = T.dot(row, w)
    z, r = (T.nnet.sigmoid(x[:, k * UNITS:(k + 1) * UNITS] + T.dot(h, u[:, k * UNITS:(k + 1) * UNITS]))
            for k in range(2))
    return z * h + (1 - z) * T.tanh(x[:, 2 * UNITS:3 * UNITS] + T.dot(r * h, u[:, 2 * UNITS:3 * UNITS])), c


def of_relu(row, h, c, w, u):
    """A step whose cheap ops read products."""
    gates = T.dot(row, w) + T.dot(h, u)
    return T.nnet.relu(gates[:, :UNITS]) * .5, c + T.sqr(gates[:, UNITS:2 * UNITS])


def two_back(row, before, h, w, u):
    gates = T.tanh(T.dot(row, w) + T.dot(h, u) * T.sum(before))
    return h + gates[:, :UNITS]


def problem(step, truncate_gradient=-1, taps=(-1,), go_backwards=False):
    """Return inputs, a sum of the states of a loop with its gradients, and values of the inputs."""
    x, w, u, first = T.dtensor3(), T.dmatrix(), T.dmatrix(), T.dtensor3()
    start = [dict(initial=first[:2], taps=list(taps))] if len(taps) > 1 else [first[0], first[1]]
    states, _ = scan(step, x, start, [w, u], truncate_gradient=truncate_gradient, go_backwards=go_backwards)
    h = states if len(taps) > 1 else states[0]
    cost = T.sqr(h[-1]).sum() + h[2].sum() + (0 if len(taps) > 1 else states[1][-2].sum())
    random = np.random.RandomState(0)
    values = [random.randn(*shape) * .5 for shape in ((7, 3, 4), (4, 4 * UNITS), (UNITS, 4 * UNITS), (2, 3, UNITS))]
    return [x, w, u, first], [cost, *T.grad(cost, [x, w, u, first])], values


def loops_of(function):
    """Return the loops of a function, the gradient last."""
    return [node for node in function.maker.fgraph.toposort() if isinstance(node.op, Scan)]


def ops_of_a_step(loop):
    return [node.op for node in loop.op.fn.maker.fgraph.toposort()]


def products(ops):
    return [op for op in ops if isinstance(op, (blas.Dot22, blas.Gemm, T.Dot))]


@pytest.mark.slow
@pytest.mark.parametrize('step, n_kept', [(lstm, 5), (gru, 3)])
def test_a_gradient_computes_no_step_again(step, n_kept):
    inputs, outputs, _ = problem(step)
    forward, gradient = loops_of(theano.function(inputs, outputs, mode=FAST))
    assert forward.op.n_nit_sot >= n_kept
    ops = ops_of_a_step(gradient)
    assert not [op for op in ops if isinstance(op, Elemwise) and 'sigmoid' in str(op) or 'anh' in str(op)]
    assert not [each for each in gradient.op.outer_seqs(gradient) if isinstance(each.owner.op, Elemwise)]
    plain_forward, plain = loops_of(theano.function(inputs, outputs, mode=FAST.excluding('scan_keep_values')))
    assert len(products(ops)) < len(products(ops_of_a_step(plain)))
    assert plain_forward.op.n_nit_sot < n_kept


@pytest.mark.slow
@pytest.mark.parametrize('keywords', [
    dict(step=lstm), dict(step=gru), dict(step=of_relu), dict(step=lstm, truncate_gradient=4),
    dict(step=lstm, go_backwards=True), dict(step=two_back, taps=(-2, -1))], ids=lambda each: '-'.join(map(str, each)))
def test_results_stay_the_same(keywords):
    inputs, outputs, values = problem(**keywords)
    ours = theano.function(inputs, outputs, mode=FAST)
    plain = theano.function(inputs, outputs, mode=FAST.excluding('scan_keep_values'))
    assert loops_of(ours)[0].op.n_nit_sot > loops_of(plain)[0].op.n_nit_sot
    for found, expected in zip(ours(*values), plain(*values)):
        np.testing.assert_allclose(found, expected, 1e-12, 1e-12)


@pytest.mark.slow
def test_a_flag_of_theano_leaves_loops_as_they_are():
    inputs, outputs, _ = problem(lstm)
    forward, _ = loops_of(theano.function(inputs, outputs, mode=FAST.excluding('more_mem')))
    assert forward.op.n_nit_sot == 0


@pytest.mark.slow
def test_each_of_two_loops_keeps_values():
    (x, w, u, first), _, _ = problem(lstm)
    states, start = x, [first[0], first[1]]
    for layer in range(2):
        (states, _), _ = scan(lstm, states, start, [w[:UNITS], u], name='layer %d' % layer)
    f = theano.function([x, w, u, first], T.grad(states[-1].sum(), [w, u]), mode=FAST)
    assert [loop.op.n_nit_sot for loop in loops_of(f)[:2]] == [5, 5]


@pytest.mark.slow
def test_a_value_with_more_axes_than_the_states_is_computed_again():
    """Values of an attention, say, might not fit into memory for all steps."""
    x, notes, w = T.dtensor3(), T.dtensor3(), T.dmatrix()

    def step(row, h):
        scores = T.tanh(notes + T.dot(row, w))
        return h * (notes * scores).sum(axis=0)
    states, _ = scan(step, x, [notes[0]])
    forward, _ = loops_of(theano.function([x, notes, w], T.grad(states[-1].sum(), [notes, w]), mode=FAST))
    assert 1 < len(forward.outputs) and all(x.ndim <= 3 for x in forward.outputs)  # the sum is kept


@pytest.mark.slow
def test_a_loop_that_ends_by_a_condition_stays_as_it_is():
    x, w = T.dtensor3(), T.dmatrix()

    def step(row, h):
        h = T.tanh(T.dot(row, w) + h)
        return h, theano.scan_module.until(h.sum() > 1)
    states, _ = scan(step, x, [x[0]])
    inputs, outputs = [x, w], [states, T.grad(states.sum(), w)]
    ours = theano.function(inputs, outputs, mode=FAST)
    plain = theano.function(inputs, outputs, mode=FAST.excluding('scan_keep_values'))
    random = np.random.RandomState(0)
    values = random.randn(6, 3, 2) * .1, random.randn(2, 2)
    for found, expected in zip(ours(*values), plain(*values)):
        np.testing.assert_array_equal(found, expected)


def test_draws_of_a_step_are_not_those_of_another_loop():
    random = T.shared_randomstreams.RandomStreams(1)
    x, w = T.dtensor3(), T.dmatrix()

    def step(row, h):
        return T.tanh(T.dot(row, w) + h) * random.uniform(h.shape)
    states, updates = scan(step, x, [x[0]])
    f = theano.function([x, w], states.sum(), updates=updates, mode=FAST)
    values = np.ones((4, 3, 2)), np.ones((2, 2))
    assert f(*values) != f(*values)


@pytest.mark.needs_compiler
@pytest.mark.slow  # it compiles many small ops
def test_results_in_c_are_those_in_python():
    inputs, outputs, values = problem(lstm)
    for found, expected in zip(theano.function(inputs, outputs, mode=theano.Mode('cvm', 'fast_run'))(*values),
                               theano.function(inputs, outputs, mode=FAST)(*values)):
        np.testing.assert_allclose(found, expected, 1e-10, 1e-12)
