"""How variables depend on samples: the claims of each rule, the claims against numbers, and Keras's models."""
import theano_mgpu  # noqa: F401
from theano_mgpu.dependence import CONSTANT, COUNT, COUPLED, MEAN, MIXED, ROWS, SIZES, SUM
from theano_mgpu.samples import analyse

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import shared
from conftest import needs_compiler
from keras import backend as K
from keras import layers as L
from keras import losses, metrics
from keras.models import Model, Sequential
from theano import sparse
from theano.gradient import disconnected_grad, zero_grad
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet import bn, conv2d
from theano.tensor.nnet.abstract_conv import AbstractConv2d_gradInputs
from theano.tensor.nnet.neighbours import images2neibs
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

RNG = np.random.RandomState(0)
N, CUT = 7, 3
PLAIN = theano.Mode('py', None)
x, s, v = T.fmatrix('x'), T.ftensor3('s'), T.fvector('v')
labels, words, images, phase = T.ivector('labels'), T.imatrix('words'), T.ftensor4('images'), T.bscalar('phase')
DATA = {x: RNG.rand(N, 4).astype('float32') + 0.1, s: RNG.rand(N, 3, 4).astype('float32'),
        v: RNG.rand(N).astype('float32'), labels: RNG.randint(0, 3, N).astype('int32'),
        words: RNG.randint(0, 3, (N, 3)).astype('int32'), images: RNG.rand(N, 2, 4, 4).astype('float32')}
w, table, kernel = shared(RNG.rand(4, 3), 'w'), shared(RNG.rand(9, 4), 'table'), shared(RNG.rand(2, 2, 3, 3), 'kernel')
n = x.shape[0]
time_major = s.dimshuffle(1, 0, 2)


def row(values):
    return values.dimshuffle('x', 0)


def loop(step, start, **options):
    return theano.scan(step, outputs_info=start, **options)[0]


def one_hot(indices):
    return T.extra_ops.to_one_hot(indices, 4, dtype='float32')


# name -> (variable, kind, axis)
CLAIMS = {
    # Leaves, and elementwise ops.
    'weights': (T.dot(w.T, w), CONSTANT),
    'set to a mean': (T.set_subtensor(w[0], x.mean()), MEAN), 'phase': (phase * 2, CONSTANT), 'input': (x, ROWS, 0),
    # Rows to which a mean was added, as far as only their sum counts.
    'sum of centred': ((x - x.mean(axis=0)).sum(), SUM), 'mean of a mean and rows': ((x.mean() + 2 * v).mean(), MEAN),
    'weighted': (((v - x.mean()) * T.ones_like(v) / 3 + 1).sum(), SUM),
    'columns of centred': ((x - x.mean()).sum(axis=1).mean(), MEAN),
    'affine': (2 * x + 1, ROWS, 0), 'broadcast': (x * row(w[:, 0]), ROWS, 0),
    'two inputs': (x * v.dimshuffle(0, 'x'), ROWS, 0), 'switch': (T.switch(x > 0.5, x, -x), ROWS, 0),
    'relu': (T.nnet.relu(x - 0.5), ROWS, 0), 'eq': (T.eq(labels, 1), ROWS, 0),
    'cast': (labels.astype('float32'), ROWS, 0), 'by phase': (T.switch(phase, x, x * 2), ROWS, 0),
    'identities': (zero_grad(disconnected_grad(x)), ROWS, 0), 'fill': (T.fill(x, 3), ROWS, 0),
    'fill with rows': (T.fill(x, v.dimshuffle(0, 'x')), ROWS, 0), 'specified': (T.specify_shape(x, (n, 4)), ROWS, 0),
    'unbroadcast': (T.unbroadcast(x, 1), ROWS, 0), 'checked': (T.opt.assert_(x, T.eq(x.ndim, 2)), ROWS, 0),
    # Axes.
    'transposed': (x.T, ROWS, 1), 'new axis': (x.dimshuffle(1, 'x', 0), ROWS, 2),
    'time-major': (time_major, ROWS, 1), 'flatten': (s.flatten(2), ROWS, 0), 'flatten all': (s.flatten(), ROWS, 0),
    'merged': (s.reshape((-1, 4)), ROWS, 0), 'split again': (s.reshape((-1, 4)).reshape((-1, 3, 4)), ROWS, 0),
    'n first': (s.reshape((n, 12)), ROWS, 0),
    'time-major and back': (T.tanh(time_major.reshape((-1, 4))).reshape((3, -1, 4)), ROWS, 1),
    'n times': (s.reshape((n * s.shape[1], 4)), ROWS, 0), 'tiled': (T.tile(x, (1, 2)), ROWS, 0),
    'repeated': (T.repeat(x, 2, axis=1), ROWS, 0), 'each repeated': (T.repeat(x, 2, axis=0), ROWS, 0),
    'joined': (T.concatenate([x, table[0] + 0 * x], axis=1), ROWS, 0),
    'split': (T.split(x, [1, 3], 2, axis=1)[1], ROWS, 0), 'stacked': (T.stack([x, 2 * x], axis=0), ROWS, 1),
    # Indices.
    'column': (x[:, 1], ROWS, 0), 'last step': (s[:, -1], ROWS, 0), 'backwards': (s[:, ::-1], ROWS, 0),
    'step of time-major': (time_major[0], ROWS, 0), 'some columns': (x[:, np.array([0, 2])], ROWS, 0),
    'embedding': (table[words], ROWS, 0), 'take': (table[labels], ROWS, 0), 'take two': (w[labels, labels], ROWS, 0),
    'picked': (x[T.arange(n), labels], ROWS, 0), 'one-hot': (one_hot(labels), ROWS, 0),
    'one-hot of words': (one_hot(words.flatten()).reshape((n, 3, 4)), ROWS, 0),
    'set columns': (T.set_subtensor(T.zeros_like(x)[:, 1:3], x[:, :2]), ROWS, 0),
    'inc': (T.inc_subtensor(x[:, 0], v), ROWS, 0),
    # Reductions and orders along other axes.
    'sum of features': (x.sum(axis=1), ROWS, 0), 'mean of features': (s.mean(axis=1), ROWS, 0),
    'sum of steps': (time_major.sum(axis=0), ROWS, 0), 'max of features': (x.max(axis=-1), ROWS, 0),
    'argmax': (T.argmax(x, axis=1), ROWS, 0), 'any': (T.any(x > 0.5, axis=1), ROWS, 0),
    'prod': (x.prod(axis=1), ROWS, 0), 'softmax': (T.nnet.softmax(x), ROWS, 0),
    'logsoftmax': (T.nnet.logsoftmax(x), ROWS, 0), 'sort': (T.sort(x, axis=1), ROWS, 0),
    'argsort': (T.argsort(x, axis=1), ROWS, 0), 'diff': (T.extra_ops.diff(x, axis=1), ROWS, 0),
    'cumsum': (T.cumsum(x, axis=1), ROWS, 0), 'topk': (T.sort(x, axis=1)[:, -2:], ROWS, 0),
    'no axes': (x.sum(axis=()), ROWS, 0), 'centred by sample': (x - x.mean(axis=1, keepdims=True), ROWS, 0),
    # Products.
    'dot': (T.dot(x, w), ROWS, 0), 'dot from the left': (T.dot(w.T, x.T), ROWS, 1),
    'tensordot': (T.tensordot(s, w, 1), ROWS, 0),
    'tensordot over time': (T.tensordot(s, w[:3], axes=[[1], [0]]), ROWS, 0),
    'batched dot': (T.batched_dot(s, s.dimshuffle(0, 2, 1)), ROWS, 0),
    'a kernel for each step': (T.batched_dot(time_major, T.tile(w.dimshuffle('x', 0, 1), (3, 1, 1))), ROWS, 1),
    'sparse dot': (sparse.structured_dot(sparse.csr_from_dense(x), w), ROWS, 0),
    'crossproduct': (T.dot(x.T, x), SUM),
    # Losses.
    'cross-entropy': (T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w)), labels), ROWS, 0),
    'dense cross-entropy': (T.nnet.categorical_crossentropy(T.nnet.softmax(x), one_hot(labels)), ROWS, 0),
    'mean loss': (T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w)), labels).mean(), MEAN),
    'accuracy': (T.eq(T.argmax(x, axis=1), labels).mean(), MEAN), 'with l2': (x.mean() + (w ** 2).sum(), MEAN),
    # Statistics.
    'sum': (x.sum(), SUM), 'sum over samples': (x.sum(axis=0), SUM),
    'sum of time-major': (time_major.sum(axis=1), SUM), 'sums': (2 * x.sum() - v.sum() / 3, SUM),
    'scaled': (T.dot(x.sum(axis=0), w), SUM), 'plus zero': (x.sum() + 0, SUM), 'mean': (x.mean(), MEAN),
    'mean over samples': (x.mean(axis=0), MEAN), 'mean of means': (x.mean(axis=1).mean(), MEAN),
    'mean and constants': (1 - 2 * x.mean() / 3, MEAN), 'sum / n': (v.sum() / n, MEAN),
    'n * mean': (n * x.mean(), SUM), 'sum / size': (x.sum() / T.ones_like(x).sum(), MEAN),
    'n / size': (n / v.size, CONSTANT), 'mean of a part': (x[:, 0].mean(), MEAN), 'size': (x.size, COUNT),
    'sum of ones': (T.ones_like(x).sum(), COUNT), 'n': (n, COUNT), 'prod of shape': (T.prod(x.shape), COUNT),
    'float n': (T.cast(n, 'float32') * 2, COUNT), 'sum of weights': (T.alloc(table[0], n, 4).sum(axis=0), COUNT),
    'fill and sum': (T.fill(v, x.mean()).sum(), SUM), 'fill and mean': (T.fill(v, x.mean()).mean(), MEAN),
    'joined statistics': (T.concatenate([x.mean(axis=0), v.mean().dimshuffle('x')]), MEAN),
    'sum and mean': (x.sum() + x.mean(), MIXED), 'sum and constant': (x.sum() + 1, MIXED), 'n - 1': (n - 1, MIXED),
    'either': (ifelse(phase, x.mean(), x.sum()), MIXED),
    'either by switch': (T.switch(phase, x.mean(), x.sum()), MIXED),
    # Shapes.
    'shape': (x.shape, SIZES), 'other axes': (T.prod(s.shape[1:]), CONSTANT),
    'stacked sizes': (T.stack([n, x.shape[1]]), SIZES),
    'joined sizes': (T.concatenate([s.shape[:1], [2], x.shape[1:]]), SIZES), 'doubled': (x.shape * 2, SIZES),
    'zeros': (T.zeros((n, 3)), ROWS, 0), 'alloc': (T.alloc(w[0], 2, n, 3), ROWS, 1),
    'alloc of rows': (T.alloc(x[:, :1], n, 5), ROWS, 0),
    # Control flow.
    'one of two': (ifelse(phase, x, 2 * x), ROWS, 0),
    'mean or constant': (ifelse(phase, x.mean(), T.constant(np.float32(1))), MEAN),
    'recurrence': (loop(lambda a, h: T.tanh(h + a), T.zeros_like(s[:, 0]), sequences=time_major), ROWS, 1),
    'its last state': (loop(lambda a, h: T.tanh(h + a), T.zeros_like(s[:, 0]), sequences=time_major)[-1], ROWS, 0),
    'two states': (loop(lambda a, g, h: [h, T.tanh(g * a)], [s[:, 0], s[:, 1]], sequences=time_major)[0], ROWS, 1),
    'outputs': (theano.map(lambda a: a.mean(axis=0), time_major)[0], MEAN),
    'power': (loop(lambda h: T.dot(h, T.dot(w, w.T)), x, n_steps=2), ROWS, 1),
    # Normalisation by given numbers.
    'inference': (bn.batch_normalization_test(x, *[row(table[i]) for i in range(4)], axes=(0,)), ROWS, 0),
}
NEED_A_COMPILER = {
    'conv': (conv2d(images, kernel, border_mode='half'), ROWS, 0),
    'conv transposed': (AbstractConv2d_gradInputs()(kernel, images, T.stack([6, 6])), ROWS, 0),
    'pool': (pool_2d(images, (2, 2), ignore_border=True), ROWS, 0),
    'pool of steps': (pool_2d(s, (1, 2), ignore_border=True), ROWS, 0),
    'neighbours': (images2neibs(images, (2, 2)), ROWS, 0),
}


def depends(claim):
    return claim[1], claim[2] if len(claim) > 2 else None


def is_true(dependence, parts, whole):
    """Whether the parts' values make up the whole batch's value in the way that was claimed."""
    shares = [CUT / N, 1 - CUT / N]
    made = {CONSTANT: lambda: parts[0], MEAN: lambda: sum(part * share for part, share in zip(parts, shares)),
            SUM: lambda: sum(parts), COUNT: lambda: parts[1] * N / (N - CUT),
            ROWS: lambda: np.concatenate(parts, dependence.axis)}
    if dependence.kind == SIZES:
        return all(is_true(d, [part[i] for part in parts], whole[i]) for i, d in enumerate(dependence.elements))
    if dependence.kind == MIXED:
        return True
    value = made[dependence.kind]()
    return np.shape(value) == np.shape(whole) and np.allclose(value, whole, rtol=1e-4, atol=1e-5)


def check_with_numbers(variable, dependence, mode=PLAIN):
    function = theano.function(list(DATA) + [phase], variable, mode=mode, on_unused_input='ignore')
    whole, first, rest = [function(*[value[part] for value in DATA.values()], 1)
                          for part in (slice(None), slice(CUT), slice(CUT, None))]
    assert is_true(dependence, [first, rest], whole)


@pytest.mark.parametrize('name', CLAIMS)
def test_claim(name):
    """The claim is the expected one, without a coupling, and it is true."""
    variable = CLAIMS[name][0]
    analysis = analyse([variable], list(DATA))
    found = analysis.of(variable)
    assert not analysis.couplings
    assert (found.kind, found.axis) == depends(CLAIMS[name])
    check_with_numbers(variable, found)


@pytest.mark.parametrize('name', NEED_A_COMPILER)
def test_claim_of_compiled_op(name):
    variable = NEED_A_COMPILER[name][0]
    analysis = analyse([variable], list(DATA))
    assert not analysis.couplings
    assert (analysis.of(variable).kind, analysis.of(variable).axis) == depends(NEED_A_COMPILER[name])


@needs_compiler
@pytest.mark.parametrize('name', NEED_A_COMPILER)
def test_claim_of_compiled_op_with_numbers(name):
    mode = theano.Mode('cvm', 'fast_compile').excluding('gpuarray_opt')
    variable = NEED_A_COMPILER[name][0]
    check_with_numbers(variable, analyse([variable], list(DATA)).of(variable), mode)


STREAMS, OLD_STREAMS = MRG_RandomStreams(1), RandomStreams(1)


@pytest.mark.parametrize('draw', [
    STREAMS.uniform(x.shape), STREAMS.normal(x.shape), STREAMS.normal((n, 4)) + x, STREAMS.binomial(x.shape, p=0.5),
    STREAMS.uniform((n, 1)), OLD_STREAMS.normal((n, 4)), OLD_STREAMS.uniform(x.shape)])
def test_random_numbers(draw):
    """They have rows as far as their size has; their streams' states have not."""
    state = [v.owner.outputs[0] for v in theano.gof.graph.ancestors([draw])
             if v.owner and len(v.owner.outputs) == 2 and v is v.owner.outputs[1]]
    analysis = analyse([draw] + state, list(DATA))
    assert not analysis.couplings and state
    assert (analysis.of(draw).kind, analysis.of(draw).axis) == (ROWS, 0)
    assert {analysis.of(new).kind for new in state} == {CONSTANT}


def test_filled_rows():
    """Rows that are all the same are told from others."""
    claims = {True: [T.ones_like(x), T.zeros((n, 3)), T.alloc(w[0], n, 3) * 2, T.fill(x, w[0, 0])],
              False: [x, x * 0, T.ones_like(x) * x, T.cumsum(T.ones_like(x), axis=1) + x]}
    for filled, variables in claims.items():
        assert [analyse([v], list(DATA)).of(v).filled == CONSTANT for v in variables] == [filled] * len(variables)


def test_unknown_variable_is_constant():
    assert analyse([x], [x]).of(w).kind == CONSTANT


# name -> (variable, its kind as each replica computes it)
COUPLED_ONCE = {
    # Rows against statistics: reported where they meet, and rows from there on.
    'centred': (x - x.mean(axis=0), ROWS), 'scaled by a sum': (x * v.sum(), ROWS),
    'square of centred': (T.sqr(x - x.mean(axis=0)).sum(), SUM), 'clipped at the mean': (T.clip(x, 0, x.mean()), ROWS),
    'scaled by n': (x * n, ROWS), 'variance': (x.var(axis=0), MEAN), 'scaled by half of n': (x * (n // 2), ROWS),
    'filled with the mean': (T.fill(x, x.mean()), ROWS),
    'filled, and softmax': (T.nnet.softmax(T.fill(x, x.mean(axis=0))).sum(), SUM),
    'added places': (x + T.arange(n).dimshuffle(0, 'x'), ROWS),
    'dot with the mean': (T.dot(x, x.mean(axis=0)), ROWS),
    'normalised by the mean': (bn.batch_normalization_test(
        x, *[row(a) for a in (w[:, 0], w[:, 1], x.mean(axis=0), w[:, 2])], axes=(0,)), ROWS),
    # Samples against samples.
    'differences': (v.dimshuffle(0, 'x') - v.dimshuffle('x', 0), ROWS),
    'fill across': (T.fill(row(v), v.dimshuffle(0, 'x')), ROWS), 'gram': (T.dot(x, x.T), ROWS),
    'copies': (T.alloc(v, n, n), ROWS), 'softmax across': (T.nnet.softmax(x.T), ROWS),
    'sorted': (T.sort(x, axis=0), ROWS), 'accumulated': (T.cumsum(x, axis=0), ROWS),
    'appended': (T.concatenate([x, x], axis=0), ROWS), 'reshaped across': (x.T.reshape((n, 4)), ROWS),
    'two orders': (time_major.reshape((-1, 4)) * s.reshape((-1, 4)), ROWS),
    'pooled across': (pool_2d(x, (2, 2), ignore_border=True), ROWS),
    # Samples by their place.
    'first': (x[0], ROWS), 'reversed': (x[::-1], ROWS), 'all but one': (x[1:], ROWS), 'shuffled': (x[labels], ROWS),
    'weights by place': (table[:n], COUPLED), 'places': (T.arange(n), COUPLED),
    'set one': (T.set_subtensor(x[0], 0), ROWS),
    # Functions of statistics.
    'max': (x.max(axis=0), COUPLED), 'argmax': (T.argmax(x, axis=0), COUPLED), 'all': (T.all(x > 0), COUPLED),
    'prod': (x.prod(axis=0), COUPLED), 'max, and further': (T.exp(x.max(axis=0)).sum() + 1, COUPLED),
    'centred by max': (x - x.max(axis=0), ROWS), 'root': (T.sqrt(x.mean()), COUPLED),
    'square': (x.sum() * x.sum(), COUPLED), 'weighted mean': ((v * x[:, 0]).sum() / v.sum(), COUPLED),
    'ratio of means': (x.mean() / v.mean(), COUPLED), 'compared': (T.gt(x.sum(), 1), COUPLED),
    'inverse of n': (1. / n, COUPLED), 'unbiased': (x.sum() / (n - 1), COUPLED),
    'square of n': (x.sum() / T.sqr(T.cast(n, 'float32')), COUPLED), 'root of n': (T.sqrt(n), COUPLED),
    'softmax of mean': (T.nnet.softmax(x.mean(axis=0).dimshuffle('x', 0)), COUPLED),
    # Loops.
    'centred in a loop': (loop(lambda h: h - h.mean(axis=0), x, n_steps=2), ROWS),
    'power of a mean': (loop(lambda h: h * h, x.mean(), n_steps=2), COUPLED),
    # Ops that nobody wrote a rule for.
    'inverse': (T.nlinalg.matrix_inverse(x), ROWS), 'determinant': (T.nlinalg.det(T.dot(x.T, x)), COUPLED),
}
COUPLED_MORE = {
    'sums in a loop': loop(lambda a, h: h + a.sum(), T.ones((), 'float32'), sequences=time_major),
    'every other': x[T.arange(0, n, 2), 0],
    'a mean that moves on': loop(lambda g, h: [h, g * g], [T.ones((), 'float32'), x.mean()], n_steps=3)[0],
    'n steps': loop(lambda h: h * 2, T.ones((), 'float32'), n_steps=n),
    'a loop over samples': loop(lambda a, h: h + a, T.zeros_like(w[:, 0]), sequences=x),
    'until': theano.scan(lambda h: (h * 2, theano.scan_module.until(T.gt(h.sum(), 30))), outputs_info=x, n_steps=6)[0],
    'a loop that fills': loop(lambda h: T.fill(h, 0) + h.mean(axis=0), x, n_steps=2),
    'selected': x[T.gt(v, 0.5).nonzero()], 'from the second on': x[T.arange(1, n), labels[1:]],
    'by a test': ifelse(T.gt(x.mean(), 0.6), x, -x),
    'by an index of two sizes': table[labels, T.constant([[0], [1]])] * x.sum(), 'slopes': v[1:] - v[:-1],
    'moments': x.std(axis=0),
}


@pytest.mark.parametrize('name', COUPLED_ONCE)
def test_coupling(name):
    variable, kind = COUPLED_ONCE[name]
    analysis = analyse([variable], list(DATA))
    assert len(analysis.couplings) == 1
    assert analysis.of(variable).kind == kind
    assert analysis.couplings[0].reason


@pytest.mark.parametrize('name', COUPLED_MORE)
def test_couplings(name):
    assert analyse([COUPLED_MORE[name]], list(DATA)).couplings


def test_coupling_names_its_node_and_reason():
    variable = T.exp(x - x.mean(axis=0)).sum()
    (node, reason), = analyse([variable], [x]).couplings
    assert node.outputs[0] is variable.owner.inputs[0].owner.inputs[0] and reason == 'mixes samples'
    (_, reason), = analyse([T.nlinalg.matrix_inverse(x)], [x]).couplings
    assert 'MatrixInverse' in reason and 'not known' in reason


def test_batch_normalisation():
    given = [shared(RNG.rand(4), name) for name in ('gamma', 'beta', 'mean', 'variance')]
    outputs = bn.batch_normalization_train(x, given[0], given[1], axes=(0,), running_mean=given[2],
                                           running_var=given[3])
    analysis = analyse(outputs, [x])
    assert [analysis.of(v).kind for v in outputs] == [ROWS, MEAN, COUPLED, MEAN, COUPLED]
    assert [c.reason for c in analysis.couplings] == ['normalises each sub-batch by its own statistics']
    by_sample = bn.batch_normalization_train(s.dimshuffle(1, 2, 0), row(given[0]).dimshuffle(0, 1, 'x'), axes=(0,),
                                             beta=row(given[1]).dimshuffle(0, 1, 'x'))[0]
    assert not analyse([by_sample], [s]).couplings


# --- Keras ---------------------------------------------------------------------------------------

def layers(shape, *makers):
    """A model of layers that are made by these functions."""
    return Sequential([L.InputLayer(shape)] + [make() for make in makers])


def classifier():
    return layers((5,), lambda: L.Dense(4, activation='softmax'))


def function(body, *shape):
    shape = shape or (5,)
    return lambda: layers(shape, lambda: L.Lambda(body, output_shape=lambda given: given))


def analysed(model, outputs=(), updates=True):
    """A compiled model's samples; the weights that nobody gave are the same for each."""
    states = [new for _, new in model.updates] if updates else []
    states += [new for metric in model._get_training_eval_metrics() for _, new in metric.updates]
    feeds = model._feed_inputs + model._feed_targets + model._feed_sample_weights
    analysis = analyse([model.total_loss] + list(outputs) + states, feeds, uniform=model._feed_sample_weights)
    return analysis, {analysis.of(new).kind for new in states}


def compiled(model, loss='mse', **options):
    model.compile('sgd', loss, **options)
    return model


def is_exact(model, kind=MEAN):
    analysis, states = analysed(model, model.outputs)
    assert [(str(c.node.op), c.reason) for c in analysis.couplings] == []
    assert {(analysis.of(v).kind, analysis.of(v).axis) for v in model.outputs} == {(ROWS, 0)}
    assert analysis.of(model.total_loss).kind == kind
    return states



def name_of(thing):
    """The same in each process, so that tests can be distributed."""
    return thing if isinstance(thing, str) else getattr(thing, '__name__', type(thing).__name__)


LOSSES = ['categorical_crossentropy', 'sparse_categorical_crossentropy', 'binary_crossentropy', 'mse', 'mae', 'mape',
          'msle', 'categorical_hinge', 'kullback_leibler_divergence', 'poisson', 'cosine_proximity', 'logcosh',
          losses.Huber(), losses.CategoricalCrossentropy(label_smoothing=0.1),
          losses.CategoricalCrossentropy(from_logits=True),
          losses.SparseCategoricalCrossentropy(from_logits=True), losses.BinaryCrossentropy(from_logits=True),
          lambda t, p: K.mean(K.square(t - p)), lambda t, p: 1 - K.sum(t * p, -1) / (K.sum(t, -1) + K.sum(p, -1))]


@pytest.mark.parametrize('loss', LOSSES, ids=name_of)
def test_keras_loss(loss):
    is_exact(compiled(classifier(), loss))


@pytest.mark.parametrize('loss', ['hinge', 'squared_hinge'])
def test_keras_hinge_looks_at_all_labels(loss):
    """Keras finds out whether labels are 0 and 1 or -1 and 1 by looking at those of the whole batch."""
    analysis, _ = analysed(compiled(classifier(), loss))
    assert [c.reason for c in analysis.couplings] == ['takes the and over samples']


@pytest.mark.parametrize('loss', [losses.MeanSquaredError, losses.Huber])
def test_keras_loss_that_is_a_sum(loss):
    is_exact(compiled(classifier(), loss(reduction='sum')), SUM)


VOLUME, PICTURE, SERIES = (4, 4, 4, 2), (6, 6, 2), (6, 3)
LAYERS = {
    'conv1d': (SERIES, lambda: L.Conv1D(2, 2)), 'conv1d same': (SERIES, lambda: L.Conv1D(2, 2, padding='same')),
    'conv1d causal': (SERIES, lambda: L.Conv1D(2, 2, padding='causal')), 'conv2d': (PICTURE, lambda: L.Conv2D(2, 3)),
    'conv2d same': (PICTURE, lambda: L.Conv2D(2, 3, strides=2, padding='same')),
    'conv3d': (VOLUME, lambda: L.Conv3D(2, 2)),
    'conv2d transposed': (PICTURE, lambda: L.Conv2DTranspose(2, 3, strides=2, padding='same')),
    'conv2d transposed valid': (PICTURE, lambda: L.Conv2DTranspose(2, 3)),
    'conv3d transposed': (VOLUME, lambda: L.Conv3DTranspose(2, 2)),
    'separable': (PICTURE, lambda: L.SeparableConv2D(2, 3, depth_multiplier=2)),
    'separable1d': (SERIES, lambda: L.SeparableConv1D(2, 3)), 'depthwise': (PICTURE, lambda: L.DepthwiseConv2D(3)),
    'upsampling': (PICTURE, L.UpSampling2D), 'upsampling1d': (SERIES, L.UpSampling1D),
    'bilinear': (PICTURE, lambda: L.UpSampling2D(interpolation='bilinear')),
    'upsampling3d': (VOLUME, L.UpSampling3D), 'padding1d': (SERIES, L.ZeroPadding1D),
    'padding2d': (PICTURE, L.ZeroPadding2D), 'padding3d': (VOLUME, L.ZeroPadding3D),
    'cropping1d': (SERIES, lambda: L.Cropping1D(1)), 'cropping2d': (PICTURE, lambda: L.Cropping2D(1)),
    'cropping3d': (VOLUME, lambda: L.Cropping3D(1)), 'max1d': (SERIES, L.MaxPooling1D),
    'max2d': (PICTURE, L.MaxPooling2D), 'max2d same': (PICTURE, lambda: L.MaxPooling2D(3, 2, padding='same')),
    'max3d': (VOLUME, L.MaxPooling3D), 'average1d': (SERIES, L.AveragePooling1D),
    'average2d': (PICTURE, L.AveragePooling2D), 'global max1d': (SERIES, L.GlobalMaxPooling1D),
    'global average1d': (SERIES, L.GlobalAveragePooling1D), 'global max2d': (PICTURE, L.GlobalMaxPooling2D),
    'global average2d': (PICTURE, L.GlobalAveragePooling2D), 'flatten': (PICTURE, L.Flatten),
    'reshape': (SERIES, lambda: L.Reshape((9, 2))), 'reshape rest': (SERIES, lambda: L.Reshape((-1, 2))),
    'permute': (SERIES, lambda: L.Permute((2, 1))), 'repeat': ((6,), lambda: L.RepeatVector(3)),
    'dropout': ((6,), lambda: L.Dropout(0.5)),
    'dropout of columns': (SERIES, lambda: L.Dropout(0.5, noise_shape=(None, 1, 3))),
    'gaussian noise': ((6,), lambda: L.GaussianNoise(0.5)),
    'gaussian dropout': ((6,), lambda: L.GaussianDropout(0.5)), 'alpha dropout': ((6,), lambda: L.AlphaDropout(0.5)),
    'spatial dropout': (SERIES, lambda: L.SpatialDropout1D(0.5)),
    'spatial dropout 2d': (PICTURE, lambda: L.SpatialDropout2D(0.5)), 'leaky': ((6,), L.LeakyReLU),
    'prelu': ((6,), L.PReLU), 'elu': ((6,), L.ELU), 'thresholded': ((6,), L.ThresholdedReLU),
    'softmax': (SERIES, L.Softmax), 'softmax over time': (SERIES, lambda: L.Softmax(axis=1)),
    'dense in 3d': (SERIES, lambda: L.Dense(2, activation='softmax')),
    'local1d': (SERIES, lambda: L.LocallyConnected1D(2, 2)),
    'local2d': (PICTURE, lambda: L.LocallyConnected2D(2, 2)), 'lstm': (SERIES, lambda: L.LSTM(2)),
    'lstm of any length': ((None, 3), lambda: L.LSTM(2, return_sequences=True)),
    'lstm with dropout': (SERIES, lambda: L.LSTM(2, dropout=0.2, recurrent_dropout=0.2, implementation=1)),
    'gru': (SERIES, lambda: L.GRU(2, reset_after=True, go_backwards=True)),
    'rnn': (SERIES, lambda: L.SimpleRNN(2, return_sequences=True)),
    'rnn unrolled': (SERIES, lambda: L.SimpleRNN(2, unroll=True)),
    'cells': (SERIES, lambda: L.RNN([L.LSTMCell(2), L.GRUCell(2)])),
    'bidirectional': (SERIES, lambda: L.Bidirectional(L.LSTM(2))),
    'convlstm': ((3,) + PICTURE, lambda: L.ConvLSTM2D(2, 3)),
    'bidirectional sum': (SERIES, lambda: L.Bidirectional(L.GRU(2, return_sequences=True), merge_mode='sum')),
    'time distributed': (SERIES, lambda: L.TimeDistributed(L.Dense(2))),
    'any time distributed': ((None, 3), lambda: L.TimeDistributed(L.Dense(2))),
    'time distributed conv': ((5,) + SERIES, lambda: L.TimeDistributed(L.Conv1D(2, 2))),
}


@pytest.mark.parametrize('name', LAYERS)
def test_keras_layer(name):
    is_exact(compiled(layers(*LAYERS[name])))


def masked(*makers):
    return lambda: Sequential([L.Embedding(7, 4, mask_zero=True, input_length=5)] + [make() for make in makers])


def merging(layer, shape=(4,), n=2):
    def build():
        inputs = [L.Input(shape) for _ in range(n)]
        return Model(inputs, layer()(inputs))
    return build


def nested():
    inner, a, b = classifier(), L.Input((5,)), L.Input((5,))
    return Model([a, b], [inner(a), L.add([inner(a), L.Dense(4)(inner(b))])])


def with_added_loss():
    a = L.Input((5,))
    hidden = L.Dense(4)(a)
    model = Model(a, hidden)
    model.add_loss(K.mean(K.square(hidden)))
    return model


def variational():
    a = L.Input((5,))
    mean, spread = L.Dense(2)(a), L.Dense(2)(a)
    drawn = L.Lambda(lambda p: p[0] + K.exp(p[1]) * K.random_normal(K.shape(p[0])),
                     output_shape=lambda given: given[0])([mean, spread])
    model = Model(a, L.Dense(5)(drawn))
    model.add_loss(K.mean(-0.5 * K.sum(1 + spread - K.square(mean) - K.exp(spread), axis=-1)))
    return model


MODELS = {
    'masked lstm': masked(lambda: L.LSTM(2)),
    'masked rnn': masked(lambda: L.SimpleRNN(2, return_sequences=True, unroll=True)),
    'masked sequences': masked(lambda: L.Bidirectional(L.GRU(2, return_sequences=True)),
                               lambda: L.TimeDistributed(L.Dense(2))),
    'masking': lambda: layers((5, 3), L.Masking, lambda: L.GRU(2)),
    'masked mean': lambda: layers((5, 3), L.Masking, L.GlobalAveragePooling1D),
    'embedding': lambda: Sequential([L.Embedding(7, 4), L.LSTM(2)]), 'dot': merging(lambda: L.Dot(1)),
    'dots': merging(lambda: L.Dot(2), (3, 4)), 'cosine': merging(lambda: L.Dot(1, normalize=True)),
    'add': merging(L.Add, n=3), 'subtract': merging(L.Subtract), 'multiply': merging(L.Multiply),
    'average': merging(L.Average), 'maximum': merging(L.Maximum), 'concatenate': merging(L.Concatenate),
    'in time': merging(lambda: L.Concatenate(1), (3, 4)), 'nested and shared': nested, 'added loss': with_added_loss,
    'variational': variational,
    'layer norm': function(lambda h: (h - K.mean(h, -1, keepdims=True)) / K.sqrt(K.var(h, -1, keepdims=True) + 1e-3)),
    'l2 norm': function(lambda h: K.l2_normalize(h, -1)), 'tile': function(lambda h: K.tile(h, [1, 1])),
    'reverse': function(lambda h: K.reverse(h, 1), 5, 3),
    'one-hot': function(lambda h: K.one_hot(K.argmax(h, -1), 4)),
    'attention': function(lambda h: K.batch_dot(K.softmax(K.batch_dot(h, h, axes=[2, 2])), h), 5, 3),
    'training phase': function(lambda h: K.in_train_phase(h * 2, h)),
    'switch': function(lambda h: K.switch(K.greater(h, 0), h, -h)),
    'ones': function(lambda h: h * K.ones_like(h) + K.zeros((5,))),
    'random weights': function(lambda h: h * K.random_uniform((K.shape(h)[0], 1))),
}


@pytest.mark.parametrize('name', MODELS)
def test_keras_model(name):
    is_exact(compiled(MODELS[name]()))


@pytest.mark.parametrize('build', [function(lambda h: h, 5, 3), masked(lambda: L.GRU(2, return_sequences=True)),
                                   lambda: layers(SERIES, lambda: L.LSTM(2, return_sequences=True))],
                         ids=['plain', 'masked', 'lstm'])
def test_keras_weights_of_time_steps(build):
    is_exact(compiled(build(), sample_weight_mode='temporal', metrics=['mae'], weighted_metrics=['mse']))


METRICS = ['accuracy', 'mse', 'top_k_categorical_accuracy', metrics.Precision, metrics.Recall, metrics.TruePositives,
           metrics.AUC, metrics.CosineSimilarity, metrics.KLDivergence, metrics.CategoricalCrossentropy,
           metrics.RootMeanSquaredError, lambda: metrics.TopKCategoricalAccuracy(k=2),
           lambda: metrics.AUC(num_thresholds=5, curve='PR'), lambda: metrics.FalsePositives(thresholds=[0.1, 0.5]),
           lambda: metrics.SensitivityAtSpecificity(0.5, num_thresholds=4)]


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('metric', METRICS, ids=name_of)
def test_keras_metric(metric, weighted):
    """The new value of a metric's state is the old one and a sum."""
    chosen = {'weighted_metrics' if weighted else 'metrics': [metric if isinstance(metric, str) else metric()]}
    assert is_exact(compiled(classifier(), 'categorical_crossentropy', **chosen)) <= {MIXED, SUM}


def test_keras_sparse_accuracy():
    options = dict(metrics=['accuracy', metrics.SparseTopKCategoricalAccuracy(k=2)])
    assert is_exact(compiled(classifier(), 'sparse_categorical_crossentropy', **options)) == {MIXED}


def test_keras_activity_regulariser_is_a_sum():
    is_exact(compiled(layers((5,), lambda: L.Dense(4, activity_regularizer='l2'))), MIXED)
    is_exact(compiled(layers((5,), lambda: L.Dense(4, kernel_regularizer='l2'))), MEAN)


REPORTED = {
    'centred': function(lambda h: h - K.mean(h, axis=0)), 'max': function(lambda h: h - K.max(h, axis=0)),
    'by the norm': function(lambda h: K.l2_normalize(h, 0)), 'softmax': function(lambda h: K.softmax(h, axis=0)),
    'places': function(lambda h: h * K.expand_dims(K.arange(K.shape(h)[0], dtype='float32'))),
    'n': function(lambda h: h * K.cast(K.shape(h)[0], 'float32')),
}


@pytest.mark.parametrize('name', REPORTED)
def test_keras_model_that_mixes_samples(name):
    model = compiled(REPORTED[name]())
    analysis, _ = analysed(model, model.outputs)
    assert 1 <= len(analysis.couplings) <= 2
    assert analysis.of(model.outputs[0]).kind == ROWS and analysis.of(model.total_loss).kind == MEAN


def moments(t, p):
    return K.square(K.mean(p, axis=0) - K.mean(t, axis=0))


def dice(t, p):
    return 1 - (2 * K.sum(t * p) + 1) / (K.sum(t) + K.sum(p) + 1)


@pytest.mark.parametrize('loss', [moments, dice])
def test_keras_loss_that_mixes_samples(loss):
    analysis, _ = analysed(compiled(classifier(), loss))
    assert len(analysis.couplings) == 1


@pytest.mark.parametrize('options', [{}, dict(scale=False, center=False), dict(axis=1)])
def test_keras_batch_normalisation(options):
    """Each layer is reported once; the running mean is a mean."""
    model = compiled(layers((4, 4, 3), lambda: L.BatchNormalization(**options), L.BatchNormalization))
    analysis, _ = analysed(model, updates=False)
    assert [c.reason for c in analysis.couplings] == ['normalises each sub-batch by its own statistics'] * 2
    assert analysis.of(model.total_loss).kind == MEAN
    analysis = analyse([new for _, new in model.updates], model._feed_inputs)
    assert [analysis.of(new).kind for _, new in model.updates] == [MEAN, COUPLED] * 2
