"""Functions that stayed on one device, each under its symptom, since one op reads samples from other places."""
import theano_mgpu as mgpu
from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from theano.configparser import change_flags
from theano.tensor import slinalg

pytestmark = pytest.mark.verified
BATCHES = 9, 6, 3, 12


@theano.compile.ops.as_op([T.dmatrix], [T.dvector])
def closest(z):
    """Return the distance of each row from the nearest other row, and 0 where there is none."""
    return np.array([min([abs(a - b).sum() for j, b in enumerate(z) if j != i], default=0.) for i, a in enumerate(z)])


closest.mgpu_pure = True


def numbers(*shape):
    return np.random.RandomState(sum(shape)).randn(*shape).astype(theano.config.floatX)


def negatives(z, t, labels):
    """Return a loss of scores of targets and of negatives that are drawn for the whole batch, as in GRU4Rec."""
    table = theano.shared(numbers(20, 3))
    picked = T.concatenate([labels, theano.shared(np.array([3, 11, 5], 'int32'))])
    return -T.log(T.diag(T.nnet.softmax(T.dot(z, table[picked].T)))).mean()


def constrained(z, t, labels):
    """Return a loss of samples that are looked up beside their targets and negatives, as in GRU4Rec."""
    table, n = theano.shared(numbers(20, 3)), labels.shape[0]
    rows = table[T.concatenate([labels, labels[::-1], theano.shared(np.array([3, 11, 5], 'int32'))])]
    rows = rows * T.sqr(z).mean()
    return -T.log(T.diag(T.nnet.softmax(T.dot(T.tanh(rows[:n] * z), rows[n:].T)))).mean()


def cox(z, t, labels):
    """Return the partial likelihood of Cox for samples in order of time, as in DeepSurv."""
    risk = z[:, :1]
    return -T.sum((risk.T - T.log(T.extra_ops.cumsum(T.exp(risk)))) * t) / T.sum(abs(t))


def cox_backwards(z, t, labels):
    order = T.argsort(t)
    risk = z[order, 0][::-1]
    return T.log(T.extra_ops.cumsum(T.exp(risk))[::-1]).sum() + T.dot(T.cumsum(T.sqr(z[::-1]), axis=0).sum(axis=1), t)


def weights(z, t, labels):
    """Return a loss of samples by the number of those that are like them, as in DeepSequence."""
    near, _ = theano.map(lambda row, others: 1 / T.sum(T.exp(T.dot(others, row))), z, non_sequences=[z])
    return (near * T.sqr(z).sum(axis=1)).mean()


def triplets(z, t, labels):
    parts = z.reshape((z.shape[0] // 3, 3, 3))
    return T.maximum(0, 1 + T.sqr(parts[:, 0] - parts[:, 1]).sum(axis=1) - T.sqr(parts[:, 0] - parts[:, 2])
                     .sum(axis=1)).mean()


def counted(z, t, labels):
    """Return a loss by the share of each class in the batch."""
    counts = T.extra_ops.bincount(labels, minlength=20)
    return (T.sqr(z).sum(axis=1) / counts[labels]).sum() + T.extra_ops.Unique()(labels).sum()


LOSSES = {
    'joined indices': negatives, 'looked up together': constrained, 'sums along the samples': cox,
    'sums from the last sample on': cox_backwards,
    'a loop of which each turn reads all': weights, 'reshaped to triplets': triplets, 'counted classes': counted,
    'joined rows': lambda z, t, labels: T.nnet.softmax(T.dot(z, T.concatenate([z, numbers(4, 3)]).T))[:, 1].sum(),
    'sorted': lambda z, t, labels: T.dot(T.sort(z, axis=0)[:, 1], t),
    'differences': lambda z, t, labels: T.sqr(T.extra_ops.diff(z[:, 0])).sum(),
    'every third': lambda z, t, labels: T.sqr(z[::3] - z[1::3]).sum(), 'rolled': lambda z, t, labels: T.sum(
        z * T.roll(z, 1, axis=0)),
    'neighbours': lambda z, t, labels: T.sqr(T.dot(z - z[labels % z.shape[0]], numbers(3, 2))).sum(),
    'shuffled': lambda z, t, labels: T.sum(z * T.sqr(z[T.argsort(t)])),
    'chosen': lambda z, t, labels: T.sqr(z[(labels > 4).nonzero()]).sum(),
    'split': lambda z, t, labels: T.prod(T.split(z, [2, z.shape[0] - 2], 2)[0]),
    'an op of the script': lambda z, t, labels: T.sum(closest(theano.gradient.disconnected_grad(z)) * z.sum(axis=1)),
    'repeated': lambda z, t, labels: T.dot(T.repeat(t, labels % 3).sum(), z.sum()),
    'another diagonal': lambda z, t, labels: T.sum(T.diag(T.dot(z, z.T), 1)),
}


def trained(loss, divided, kind='cpu', **options):
    """Return the losses, gradients and weights of steps on ragged batches, and our step."""
    x, t, labels = T.matrix('x'), T.vector('t'), T.ivector('labels')
    w, gradient = theano.shared(numbers(4, 3), 'w'), theano.shared(numbers(4, 3), 'gradient')
    cost = loss(T.tanh(T.dot(x, w)), t, labels)

    def updates(gradients):
        return {w: w - np.asarray(.1, w.dtype) * gradients[0], gradient: gradients[0]}
    mode = PYTHON if kind == 'cpu' else theano.Mode('cvm', 'fast_compile')
    if divided:
        step = mgpu.training_function([x, t, labels], cost, [w], updates, mode=mode, **options)
    else:
        step = theano.function([x, t, labels], cost, updates=list(updates([T.grad(cost, w)]).items()), mode=PYTHON,
                               on_unused_input='ignore')
    found = []
    for n in BATCHES:
        batch = np.random.RandomState(n)
        found.append(np.array(step(numbers(n, 4), numbers(n), batch.randint(0, 9, n).astype('int32'))))
        found += [w.get_value(), gradient.get_value()]
    return found, step if divided else None


def assert_close(ours, theirs, tolerance):
    for number, (one, other) in enumerate(zip(ours, theirs)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg='value %d' % number)


@pytest.mark.slow_with('3-sums along the samples', '3-a loop*', '3-sums from the last sample on',
                       '3-looked up together', '3-reshaped to triplets', '2-a loop*', '3-rolled', '2-split',
                       '3-another diagonal', '2-looked up together', '2-sums along the samples',
                       '2-sums from the last sample on', '3-shuffled')
@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('n', [2, 3])
def test_an_op_that_reads_the_whole_batch_keeps_the_network_before_it_divided(contexts, interpreted, n, name):
    contexts('cpu', n)
    with change_flags(floatX='float64'):
        found, step = trained(LOSSES[name], True)
        expected, _ = trained(LOSSES[name], False)
    assert len(step.contexts) == n
    assert (', but each replica needs all samples: ' in str(step.plan)) == (LOSSES[name] is not weights)
    assert_close(found, expected, 1e-11)


@pytest.mark.cuda(opencl='slow')
@pytest.mark.parametrize('name', ['joined indices', 'sums along the samples', 'reshaped to triplets',
                                  'a loop of which each turn reads all'])
def test_an_op_that_reads_the_whole_batch_keeps_devices_divided(gpu2, name):
    found, step = trained(LOSSES[name], True, 'gpu')
    assert len(step.contexts) == 2
    assert_close(found, trained(LOSSES[name], False)[0], 2e-4)


def test_the_first_rows_of_a_number_that_is_given_are_gathered(cpu2):
    """GRU4Rec evaluates by ``S[:M]`` that a batch may fill in part only."""
    x, m = T.dmatrix('x'), T.lscalar('m')
    scores = T.dot(x, numbers(4, 5).astype('float64'))
    f, plain = [make([x, m], [scores[:m], scores[m].sum(), scores.sum(axis=1)], mode=PYTHON)
                for make in (mgpu.function, theano.function)]
    assert len(f.contexts) == 2
    for n in BATCHES:
        rows = np.random.RandomState(n).randn(n, 4)
        assert_close(f(rows, n - 1), plain(rows, n - 1), 1e-12)


@pytest.mark.slow_with('2')
@pytest.mark.parametrize('n', [2, 3])
def test_samples_that_are_joined_to_others_and_taken_from_them_again_are_divided(contexts, n):
    """GRU4Rec looks up samples, targets and negatives at once, and takes as many as an argument says."""
    contexts('cpu', n)
    x, y, m = T.ivector('x'), T.ivector('y'), T.lscalar('m')
    found = []
    for make in (mgpu.function, theano.function):
        table, w = theano.shared(numbers(20, 3), 'table'), theano.shared(numbers(3, 3), 'w')
        places = T.concatenate([x, y, np.array([3, 11, 5], 'int32')])
        picked = table[places]
        scores = T.nnet.softmax(T.dot(T.tanh(T.dot(picked[:m], w)), picked[m:].T))
        loss = -T.log(T.diag(scores)).sum()
        gradient, of_w = T.grad(loss, [picked, w])
        f = make([x, y, m], [loss, scores], updates=[(table, T.inc_subtensor(picked, -np.float32(.1) * gradient)),
                                                     (w, w - np.float32(.1) * of_w)], mode=PYTHON)
        for each in BATCHES:
            rng = np.random.RandomState(each)
            found.append([*f(*rng.randint(0, 20, (2, each)).astype('int32'), each), table.get_value(), w.get_value()])
        assert make is theano.function or len(f.contexts) == n
    for ours, theirs in zip(found[:len(BATCHES)], found[len(BATCHES):]):
        assert_close(ours, theirs, 2e-5)


def test_fewer_samples_than_were_joined_to_others_are_taken_on_one_device(cpu2):
    report = mgpu.enable(always=True)
    try:
        x, m = T.ivector('x'), T.lscalar('m')
        f = theano.function([x, m], T.dot(T.eye(20)[T.concatenate([x, [3, 5]])][:m], numbers(20, 3)), mode=PYTHON)
        for m in (7, 5, 7):
            np.testing.assert_array_equal(f(np.arange(7, dtype='int32'), m), numbers(20, 3)[:m])
        assert report.usages[-1].calls == 2
    finally:
        mgpu.disable()


@pytest.mark.parametrize('build', [
    lambda x: T.sort(x, axis=0), lambda x: T.tanh(T.concatenate([x, x[:1]])).sum(),
    lambda x: T.dot(T.slinalg.cholesky(T.dot(x, x.T)), x)], ids=['sort', 'join', 'cholesky'])
def test_what_each_replica_would_compute_whole_runs_on_one_device(build):
    """No work is divided, or it is the work of each replica: a matrix of all pairs of samples."""
    x = T.dmatrix('x')
    with pytest.raises(CannotCut):
        partition([x], [build(x)])


QUOTIENTS = {'a product': lambda y: T.prod(y.shape) // y.shape[-1], 'the size': lambda y: y.size // y.shape[1],
             'lengths': lambda y: y.shape[0] * y.shape[1] // y.shape[-1],
             'a product of all but one': lambda y: T.prod(y.shape[:-1])}


@pytest.mark.slow_with('3-a product of all but one')
@pytest.mark.parametrize('name', QUOTIENTS)
@pytest.mark.parametrize('n', [2, 3])
def test_the_number_of_samples_may_be_a_quotient(contexts, n, name):
    """No classifier of theanets was divided: it reshapes its output to ``prod(shape) // shape[-1]`` rows."""
    contexts('cpu', n)

    def loss(z, t, labels):
        y = T.nnet.softmax(z)
        rows = QUOTIENTS[name](y)
        return -T.log(y.reshape((rows, y.shape[-1]))[T.arange(rows), labels.reshape((rows,)) % 3]).mean()
    with change_flags(floatX='float64'):
        found, step = trained(loss, True)
        assert len(step.contexts) == n
        assert_close(found, trained(loss, False)[0], 1e-12)


@pytest.mark.cuda
def test_the_number_of_samples_may_be_a_quotient_on_devices(gpu2):
    def loss(z, t, labels):
        rows = T.prod(z.shape) // z.shape[-1]
        return T.sqr(z.reshape((rows, z.shape[-1]))[T.arange(rows), labels % 3]).mean()
    found, step = trained(loss, True, 'gpu')
    assert len(step.contexts) == 2
    assert_close(found, trained(loss, False)[0], 2e-4)


def test_a_quotient_that_is_not_the_number_of_samples_is_checked():
    x = T.dtensor3('x')
    rows = T.prod(x.shape) // x.shape[1]  # not what a sample has: 2 * 5 elements, in rows of 3
    with pytest.raises(CannotCut, match='which axis has the samples|merges or splits'):
        partition([x], [x.reshape((T.prod(x.shape) // (x.shape[0] + 1), x.shape[1]))])
    program = partition([x], [x.reshape((rows, x.shape[1]))])
    assert [output.has_rows for output in program.outputs] == [True]


def test_a_function_that_was_never_called_says_so():
    """It said "no call of it has succeeded", as if calls had failed."""
    report = mgpu.enable(always=True)
    try:
        x = T.dmatrix('x')
        f = theano.function([x], x.sum(), mode=PYTHON)
        assert report.usages[-1].why == 'it was never called'
        with pytest.raises(ValueError):
            f('no matrix')
        assert report.usages[-1].why == 'no call of it has succeeded'
        assert f(np.ones((4, 3))) == 12 and report.usages[-1].why == 'divided'
    finally:
        mgpu.disable()


def test_the_reason_why_a_loop_is_not_divided_comes_first():
    """The loop was printed with all its inputs, the reason after a thousand characters."""
    x, w = T.fmatrix('input of all'), [theano.shared(numbers(4, 4), 'weights %d' % i) for i in range(20)]
    with change_flags(**{'traceback.limit': 8}):
        h, _ = theano.scan(lambda a, h, *w: T.tanh(a + sum(T.dot(h, each) for each in w)), x, T.zeros((4,)),
                           non_sequences=w)
    with pytest.raises(CannotCut, match='^it loops over samples, and each turn needs .*: for{cpu,scan_fn}.*weights 0') \
            as caught:
        partition([x], [h])
    node, _, line = str(caught.value).partition(' (')
    assert len(node) < 250 and 'test_samples_that_meet.py, line' in line


def test_columns_of_an_equation_do_not_meet():
    """The reason was that Solve takes its matrix as a whole, and all samples meet there."""
    x, matrix = T.dmatrix('x'), T.dmatrix('matrix')
    with pytest.raises(CannotCut) as error:
        partition([x], [slinalg.Eigvalsh()(matrix, x).sum()])
    assert 'it is not known how Eigvalsh depends on single samples' in str(error.value)
    with pytest.raises(CannotCut, match='Cholesky takes its matrix as a whole, and all samples meet there'):
        partition([x], [slinalg.cholesky(T.dot(x, x.T)).sum()])
