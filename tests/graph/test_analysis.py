"""Expressions of every family of ops, and their gradients, give the same on shards as on the whole batch."""
from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.analysis.rules.base import OTHER_LENGTHS
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.parameters import slow_but
from support.stages import compiled, split
from theano import sparse
from theano.configparser import change_flags
from theano.gof.graph import io_toposort
from theano.gradient import disconnected_grad, zero_grad
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor import inplace, io
from theano.tensor.nnet import bn, conv, conv2d
from theano.tensor.nnet.abstract_conv import AbstractConv2d_gradInputs
from theano.tensor.nnet.neighbours import images2neibs
from theano.tensor.opt import Assert
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

RNG = np.random.RandomState(0)
N, SHARDS = 7, [(4, 2, 1), (1, 6), (7,)]
PLAIN, COMPILED = theano.Mode('py', None), theano.Mode('cvm', 'fast_compile').excluding('gpuarray_opt')
x, s, v, images = T.dmatrix('x'), T.dtensor3('s'), T.dvector('v'), T.dtensor4('images')
labels, words = T.ivector('labels'), T.imatrix('words')
DATA = {x: RNG.rand(N, 4) + 0.1, s: RNG.rand(N, 3, 4), v: RNG.rand(N), labels: RNG.randint(0, 3, N).astype('int32'),
        words: RNG.randint(0, 3, (N, 3)).astype('int32'), images: RNG.rand(N, 2, 4, 4)}
WEIGHTS = w, table, kernel = [theano.shared(RNG.rand(*shape)) for shape in [(4, 3), (9, 4), (2, 2, 3, 3)]]
phase = theano.shared(np.int8(1), 'phase')
n = x.shape[0]
time_major = s.dimshuffle(1, 0, 2)
TWICE = T.concatenate([x, T.tanh(x)])
FLAT, TIMES = x.flatten(), T.tanh(time_major.reshape((-1, 4)))
PIXEL = T.unravel_index(T.argmax(s.flatten(2), axis=1), (3, 4))
PAIRS, COVARIANCE = T.dot(x, x.T), T.dot(x.T, x) + np.eye(4)
SPARSE, OTHERS = sparse.csr_from_dense(x), sparse.csr_from_dense(table[:n])
solve, lower, upper = T.slinalg.solve, T.slinalg.solve_lower_triangular, T.slinalg.solve_upper_triangular


with change_flags(floatX='float64'):
    a, b, c = T.dmatrix(), T.dmatrix(), T.dvector()
    SHIFTED = theano.OpFromGraph([a], [a + table[0, 1]])
    NORMED = theano.OpFromGraph([a, b], [SHIFTED(T.dot(a, b) / a.sum(axis=1, keepdims=True))])
    REVERSED = theano.OpFromGraph([a], [a * 2],
                                  grad_overrides=lambda inputs, gradients: [-3 * gradients[0] * inputs[0]])
    CENTRED = theano.OpFromGraph([a], [a - a.mean(axis=0)], inline=True)
    IN_TWO = theano.OpFromGraph([a, c], [a * c.dimshuffle(0, 'x'), a + 1])


@theano.compile.ops.as_op([T.dvector], [T.dvector])
def noisy(values):
    return values + np.random.rand(len(values))


def row(values):
    return values.dimshuffle('x', 0)


def loop(step, start, **options):
    return theano.scan(step, outputs_info=start, **options)[0]


@theano.compile.ops.as_op([T.dvector], [T.dvector])
def doubled_and_sorted(values):
    return np.sort(2 * values)


doubled_and_sorted.mgpu_pure = True


def one_hot(indices):
    return T.extra_ops.to_one_hot(indices, 4, dtype='float64')


@change_flags(floatX='float64')
def of_single_samples():
    """Return {name: expression} of constants, and of expressions whose rows belong to single samples."""
    return {
        # Leaves, and elementwise ops.
        'weights': T.dot(w.T, w), 'phase': phase * 2, 'input': x, 'affine': 2 * x + 1,
        'broadcast': x * row(w[:, 0]), 'two inputs': x * v.dimshuffle(0, 'x'), 'switch': T.switch(x > 0.5, x, -x),
        'relu': T.nnet.relu(x - 0.5), 'eq': T.eq(labels, 1), 'cast': labels.astype('float32'),
        'by phase': T.switch(phase, x, x * 2), 'identities': zero_grad(disconnected_grad(x)), 'fill': T.fill(x, 3),
        'fill with rows': T.fill(x, v.dimshuffle(0, 'x')), 'specified': T.specify_shape(x, (n, 4)),
        'specified by a number': T.specify_shape(x, (N, 4)), 'unbroadcast': T.unbroadcast(x, 1),
        'checked': T.opt.assert_(x, T.eq(x.ndim, 2)), 'checked by rows': T.opt.assert_(x, T.all(v > -1)),
        # Axes.
        'transposed': x.T, 'contiguous': T.extra_ops.cpu_contiguous(x.T), 'new axis': x.dimshuffle(1, 'x', 0),
        'time-major': time_major, 'flatten': s.flatten(2),
        'flatten all': s.flatten(), 'merged': s.reshape((-1, 4)),
        'split again': s.reshape((-1, 4)).reshape((-1, 3, 4)), 'n first': s.reshape((n, 12)),
        'time-major and back': T.tanh(time_major.reshape((-1, 4))).reshape((3, -1, 4)),
        'n times': s.reshape((n * s.shape[1], 4)), 'tiled': T.tile(x, (1, 2)), 'repeated': T.repeat(x, 2, axis=1),
        'each repeated': T.repeat(x, 2, axis=0), 'repeated by an op': T.extra_ops.RepeatOp(axis=1)(x, 2),
        'joined': T.concatenate([x, table[0] + 0 * x], axis=1),
        'split': T.split(x, [1, 3], 2, axis=1)[1], 'stacked': T.stack([x, 2 * x], axis=0),
        # Indices.
        'column': x[:, 1], 'last step': s[:, -1], 'backwards': s[:, ::-1], 'step of time-major': time_major[0],
        'some columns': x[:, np.array([0, 2])], 'embedding': table[words], 'take': table[labels],
        'take two': w[labels, labels], 'picked': x[T.arange(n), labels], 'one-hot': one_hot(labels),
        'one-hot of words': one_hot(words.flatten()).reshape((n, 3, 4)),
        'flat places': FLAT[T.arange(n) * 4 + labels],
        'flat places of words': FLAT[words + 4 * T.arange(n).dimshuffle(0, 'x')],
        'flat places by size': FLAT[T.arange(labels.shape[0]) * x.shape[1] + labels],
        'steps of places': FLAT[T.arange(0, 4 * n, 4) + 2],
        'places in steps': FLAT[T.arange(0, x.size, x.shape[1]) + labels],
        'flat places of steps': s.flatten()[(T.arange(n) * 12).dimshuffle(0, 'x') + words * 4],
        'flat places of time-major': TIMES.flatten()[T.arange(3 * n) * 4 + words.T.flatten()].reshape((3, n)).T,
        'picked of time-major': TIMES[T.arange(TIMES.shape[0]), words.T.flatten()].reshape((3, -1)).T,
        'set at flat places': T.set_subtensor(FLAT[T.arange(n) * 4 + labels], v).reshape((n, 4)),
        'added at flat places': T.inc_subtensor(FLAT[T.arange(n) * 4 + labels], 1).reshape((n, 4)),
        'added to zeros at flat places': T.inc_subtensor(T.zeros_like(FLAT)[T.arange(n) * 4 + labels], v) * 2,
        'coordinates': T.stack(T.unravel_index(words.T, (2, 2))), 'largest pixel': s[T.arange(n), PIXEL[0], PIXEL[1]],
        'joined coordinates': T.concatenate([labels, T.unravel_index(labels, (2, 2))[1]])[n:],
        'raveled': T.ravel_multi_index((words, labels.dimshuffle(0, 'x'), 1), (3, 3, 2), order='F'),
        'raveled with constants': T.ravel_multi_index((T.zeros((n, 3), 'int64'), words), (1, 2), mode='wrap'),
        'raveled, time-major': T.ravel_multi_index((words.T.flatten(), 2 - words.T.flatten()), (3, 3)),
        'raveled by n': T.ravel_multi_index((T.arange(n), labels), T.stack([n, 3])),
        'set columns': T.set_subtensor(T.zeros_like(x)[:, 1:3], x[:, :2]), 'inc': T.inc_subtensor(x[:, 0], v),
        'set columns by an array': T.set_subtensor(T.zeros((n, 4))[:, np.array([0, 2])], x[:, :2]),
        'up to n': x[:n], 'set up to n': T.set_subtensor(T.zeros_like(x)[:v.shape[0], :2], x[:, 1:3]),
        'set constants up to n': T.set_subtensor(T.zeros((n, 4))[:n], x),
        # Diagonals.
        'diagonals': T.diagonal(s[:, :, :3], 0, 1, 2), 'diagonals, offset': T.diagonal(s, 1, 1, 2),
        # Reductions and orders along other axes.
        'sum of features': x.sum(axis=1), 'mean of features': s.mean(axis=1), 'sum of steps': time_major.sum(axis=0),
        'max of features': x.max(axis=-1), 'argmax of features': T.argmax(x, axis=1),
        'any of features': T.any(x > 0.5, axis=1), 'prod of features': x.prod(axis=1), 'softmax': T.nnet.softmax(x),
        'logsoftmax': T.nnet.logsoftmax(x), 'sort': T.sort(x, axis=1), 'argsort': T.argsort(x, axis=1),
        'diff': T.extra_ops.diff(x, axis=1), 'cumsum': T.cumsum(x, axis=1), 'topk': T.sort(x, axis=1)[:, -2:],
        'no axes': x.sum(axis=()), 'centred by sample': x - x.mean(axis=1, keepdims=True),
        # Products.
        'dot': T.dot(x, w), 'dot from the left': T.dot(w.T, x.T), 'tensordot': T.tensordot(s, w, 1),
        'tensordot over time': T.tensordot(s, w[:3], axes=[[1], [0]]),
        'batched dot': T.batched_dot(s, s.dimshuffle(0, 2, 1)),
        'a kernel for each step': T.batched_dot(time_major, T.tile(w.dimshuffle('x', 0, 1), (3, 1, 1))),
        'columns of a system': solve(w[:3] + T.eye(3), T.dot(x, w).T), 'kron': T.slinalg.kron(x, w),
        'columns, lower': lower(w[:3] + T.eye(3), s[:, 0, 1:].T), 'columns, upper': upper(w[:3], TIMES.T[1:]).T,
        # Sparse matrices.
        'sparse dot': sparse.structured_dot(SPARSE, w), 'sparse and transposed': sparse.dense_from_sparse(SPARSE.T),
        'sparse, sum of features': sparse.sp_sum(SPARSE, axis=1), 'sparse, by column': sparse.sp_sum(SPARSE.T, axis=0),
        'sparse beside others': sparse.sp_sum(sparse.hstack([SPARSE, OTHERS, -SPARSE]), axis=1),
        'sparse above others': sparse.dot(T.concatenate([w, w]).T, sparse.vstack([OTHERS.T, SPARSE.T])),
        'sparse, times dense': sparse.sp_sum(SPARSE * x * np.float64(2), axis=1) * v,
        'sparse and more': sparse.add(SPARSE - OTHERS, table[:n]) * v[:, None],
        # Losses.
        'cross-entropy': T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w)), labels),
        'dense cross-entropy': T.nnet.categorical_crossentropy(T.nnet.softmax(x), one_hot(labels)),
        # Shapes.
        'lengths by an op': x * T.opt.Shape_i(0)(x) - T.opt.Shape_i(1)(x),
        'zeros': T.zeros((n, 3)), 'alloc': T.alloc(w[0], 2, n, 3), 'alloc of rows': T.alloc(x[:, :1], n, 5),
        'ones': T.ones_like(x), 'filled': T.alloc(w[0], n, 3) * 2, 'other axes': T.prod(s.shape[1:]),
        # Two batches one after the other.
        'half of joined': TWICE[:n], 'other half': TWICE[n:], 'last of joined': TWICE[-n:], 'of three': T.concatenate(
            [x, 2 * x, x + 1])[n:2 * n, 1:],
        'joined along axis 1': T.concatenate([x.T, T.tanh(x.T)], axis=1)[1:, x.shape[0]:],
        'joined with numbers': T.concatenate([x, T.ones((n, 4))])[n:] * x, 'joined with some of others': T.concatenate(
            [T.tanh(T.dot(table[:n], T.ones((4, 4)))), x])[:n] + x,
        'one of a split': T.split(TWICE, [n, n], 2, axis=0)[1], 'joined products': T.tanh(T.dot(TWICE, w))[n:] + 1,
        'set half of joined': T.set_subtensor(TWICE[n:], x)[n:] * 2,
        'filled half': T.inc_subtensor(TWICE[:n, 1], 2)[:n],
        'joined and split by reshape': T.tanh(TWICE).reshape((2, n, 4))[1], 'time step': TIMES[n:2 * n],
        # Ops made of graphs.
        'op': NORMED(x, w), 'op with a gradient': REVERSED(x), 'op with two outputs': sum(IN_TWO(x, v)),
        'op of joined': T.concatenate([x, REVERSED(x)])[n:] * x,
        'op in a loop': loop(lambda a, h: NORMED(h + a, T.eye(4)), T.zeros_like(s[:, 0]), sequences=time_major),
        # Control flow.
        'one of two': ifelse(phase, x, 2 * x),
        'recurrence': loop(lambda a, h: T.tanh(h + a), T.zeros_like(s[:, 0]), sequences=time_major),
        'its last state': loop(lambda a, h: T.tanh(h + a), T.zeros_like(s[:, 0]), sequences=time_major)[-1],
        'two states': loop(lambda a, g, h: [h, T.tanh(g * a)], [s[:, 0], s[:, 1]], sequences=time_major)[0],
        'power': loop(lambda h: T.dot(h, T.dot(w, w.T)), x, n_steps=2),
        # Normalisation.
        'inference': bn.batch_normalization_test(x, *[row(table[i]) for i in range(4)], axes=(0,)),
        'normalised by sample': bn.batch_normalization_train(
            s.dimshuffle(1, 2, 0), table[0].dimshuffle('x', 0, 'x'), table[1].dimshuffle('x', 0, 'x'), axes=(0,))[0],
    }


@change_flags(floatX='float64')
def statistics():
    """Return {name: expression} of statistics of several samples, and of expressions that depend on these."""
    crossentropy = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w)), labels)
    return {
        'set to a mean': T.set_subtensor(w[0], x.mean()), 'sum of centred': (x - x.mean(axis=0)).sum(),
        'mean of a mean and rows': (x.mean() + 2 * v).mean(),
        'weighted': ((v - x.mean()) * T.ones_like(v) / 3 + 1).sum(),
        'columns of centred': (x - x.mean()).sum(axis=1).mean(), 'crossproduct': T.dot(x.T, x),
        'mean loss': crossentropy.mean(), 'accuracy': T.eq(T.argmax(x, axis=1), labels).mean(),
        'with l2': x.mean() + (w ** 2).sum(), 'sum': x.sum(), 'sum over samples': x.sum(axis=0),
        'sum of time-major': time_major.sum(axis=1), 'sums': 2 * x.sum() - v.sum() / 3,
        'scaled': T.dot(x.sum(axis=0), w), 'plus zero': x.sum() + 0, 'mean': x.mean(),
        'mean over samples': x.mean(axis=0), 'mean of means': x.mean(axis=1).mean(),
        'mean and constants': 1 - 2 * x.mean() / 3, 'sum / n': v.sum() / n, 'n * mean': n * x.mean(),
        'sum / size': x.sum() / T.ones_like(x).sum(), 'n / size': n / v.size, 'mean of a part': x[:, 0].mean(),
        'sum of weights': T.alloc(table[0], n, 4).sum(axis=0), 'fill and sum': T.fill(v, x.mean()).sum(),
        'fill and mean': T.fill(v, x.mean()).mean(),
        'joined statistics': T.concatenate([x.mean(axis=0), v.mean().dimshuffle('x')]),
        'sum and mean': x.sum() + x.mean(), 'sum and constant': x.sum() + 1, 'either': ifelse(phase, x.mean(), x.sum()),
        'either by switch': T.switch(phase, x.mean(), x.sum()),
        'mean or constant': ifelse(phase, x.mean(), T.constant(np.float64(1))),
        'outputs': theano.map(lambda a: a.mean(axis=0), time_major)[0],
        'max': x.max(axis=0), 'all': T.all(x > 0), 'prod': x.prod(axis=0),
        'max, and further': T.exp(x.max(axis=0)).sum() + 1, 'root': T.sqrt(x.mean()), 'square': x.sum() * x.sum(),
        'weighted mean': (v * x[:, 0]).sum() / v.sum(), 'ratio of means': x.mean() / v.mean(),
        'compared': T.gt(x.sum(), 1), 'unbiased': x.sum() / (n - 1), 'moments': x.std(axis=0),
        'square of n': x.sum() / T.sqr(T.cast(n, 'float64')), 'variance': x.var(axis=0),
        'sparse, sum': sparse.sp_sum(SPARSE), 'sparse, sum over samples': sparse.sp_sum(SPARSE, axis=0),
        'softmax of mean': T.nnet.softmax(x.mean(axis=0).dimshuffle('x', 0)),
        'power of a mean': loop(lambda h: h * h, x.mean(), n_steps=2),
        'joined mean': TWICE.mean(),
        'joined weighted': (TWICE * T.concatenate([T.ones((n, 1)), T.zeros((n, 1))])).sum(axis=0),
        'difference of halves': T.log(TWICE[:n] + 1).mean() - T.sqr(TWICE[n:]).mean(),
        'moments of halves': T.sqr(T.dot(TWICE, w)[:n].mean(axis=0) - T.dot(TWICE, w)[n:].mean(axis=0)).sum(),
        'cross-entropy of time-major': T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(TIMES, w)),
                                                                      words.T.flatten()).mean(),
        'trace': T.nlinalg.trace(T.dot(x.T, x)), 'diagonal': T.diag(T.dot(x.T, x) / n),
        'alloc diag': T.diag(x.mean(axis=0)),
        'eigenvalues': T.nlinalg.eigh(COVARIANCE)[0], 'singular values': T.nlinalg.svd(COVARIANCE)[1],
        'qr': T.nlinalg.qr(COVARIANCE, 'r'), 'cholesky': T.slinalg.cholesky(COVARIANCE),
        'solve': T.slinalg.solve(COVARIANCE, table[:4]), 'expm': T.slinalg.expm(COVARIANCE / 9),
        'kron': T.slinalg.kron(COVARIANCE, w), 'pinv': T.nlinalg.pinv(COVARIANCE),
        'searched sums': T.extra_ops.searchsorted(T.sort(x.sum(axis=0)), w[:, 0]),
        'spectrum of sums': T.fft.rfft(T.dot(x.T, x)), 'unique sums': T.extra_ops.Unique()(T.floor(x.sum(axis=0) * 2)),
        'chosen sums': T.choose([0, 1, 0, 1], [x.sum(axis=0), x.mean(axis=0)]),
        'of an op of a user': doubled_and_sorted(x.sum(axis=0)),
        'bins of sums': T.extra_ops.bincount(T.cast(x.sum(axis=0), 'int64')),
        'loop of a sum': loop(lambda h: T.nlinalg.matrix_inverse(h), COVARIANCE, n_steps=3),
        'determinant': T.nlinalg.det(T.dot(x.T, x) + T.eye(4)),
        'a mean that moves on': loop(lambda g, h: [h, g * g], [T.constant(np.float64(1)), x.mean()], n_steps=3)[0],
        'sums in a loop': loop(lambda a, h: h + a.sum(), T.constant(np.float64(1)), sequences=time_major),
        'sums in two orders': (2 * T.dot(x, w).sum() - (x ** 2).mean() / 3),
        'stack of sum and mean': T.stack([x.sum(), x.mean()]).sum(),
        'sum and sum by n': x.sum() + x.sum() / T.cast(n, 'float64'),
        'sum or mean': T.switch(T.gt(w.sum(), 0), x.sum(), x.mean()), 'sum by n and back': x.sum() * n / n,
        'running mean': 0.5 * table[0] + 0.5 * x.mean(axis=0), 'count': table[0] + x.sum(axis=0),
        'ratio of sums': x.sum(axis=0) / (x ** 2).sum(), 'root of a mean and n': T.sqrt(x.mean(axis=0) ** 2 + n),
        'running variance': table[0] * n / (n - 1.5), 'largest ever': T.maximum(table[0], x.max(axis=0)),
        'running rows': table[:N] + x,
        'set into zeros': T.set_subtensor(T.zeros((9, 6))[:n, 1:5], x), 'added to zeros up to': T.inc_subtensor(
            T.zeros((9, 4))[:-2, 1], v), 'rows of weights': (table[:n] * x).sum(axis=1).mean(),
        'added at labels': T.inc_subtensor(table[labels], x), 'counted labels': T.inc_subtensor(table[labels, 1], 1),
        'moved at words': T.inc_subtensor(table[words], -0.1 * s), 'subtracted': T.inc_subtensor(w[:, labels], x.T[1]),
        'added at labels and words': T.inc_subtensor(table[labels.dimshuffle(0, 'x'), words], s[:, :, 0]),
        'a mean added at labels': T.inc_subtensor(table[labels], x.mean(axis=0)),
        'whole numbers at labels': T.inc_subtensor(
            T.constant(np.arange(5, dtype='int8'))[labels], labels.astype('int8')),
        'set at labels': T.set_subtensor(table[labels], x), 'moved ahead of others': T.set_subtensor(
            table[words.flatten()], 2 * table[words.flatten()] + s.reshape((-1, 4))),
        'set at words of time-major': T.set_subtensor(table[words.T.flatten()], TIMES),
        'a number set at labels': T.set_subtensor(table[labels], 3), 'root of sums at labels': x / T.sqrt(
            T.inc_subtensor(table[labels], x ** 2)[labels]),
    }


@change_flags(floatX='float64')
def numbers_of_samples():
    """Return {name: expression} of expressions that follow from the number of samples."""
    return {
        'n': n, 'size': x.size, 'sum of ones': T.ones_like(x).sum(), 'prod of shape': T.prod(x.shape),
        'float n': T.cast(n, 'float64') * 2, 'n - 1': n - 1, 'shape': x.shape, 'inverse of n': 1. / n,
        'root of n': T.sqrt(n), 'stacked sizes': T.stack([n, x.shape[1]]), 'doubled': x.shape * 2,
        'joined sizes': T.concatenate([s.shape[:1], [2], x.shape[1:]]), 'places': T.arange(n),
        'weights by place': table[:n], 'n steps': loop(lambda h: h * 2, T.constant(np.float64(1)), n_steps=n),
    }


@change_flags(floatX='float64')
def met():
    """Return {name: expression} of expressions in which samples meet each other, or a statistic of all of them."""
    return {
        'centred': x - x.mean(axis=0), 'scaled by a sum': x * v.sum(),
        'square of centred': T.sqr(x - x.mean(axis=0)).sum(), 'clipped at the mean': T.clip(x, 0, x.mean()),
        'scaled by n': x * n, 'scaled by half of n': x * (n // 2), 'filled with the mean': T.fill(x, x.mean()),
        'filled, and softmax': T.nnet.softmax(T.fill(x, x.mean(axis=0))).sum(),
        'added places': x + T.arange(n).dimshuffle(0, 'x'), 'dot with the mean': T.dot(x, x.mean(axis=0)),
        'normalised by the mean': bn.batch_normalization_test(
            x, *[row(a) for a in (w[:, 0], w[:, 1], x.mean(axis=0), w[:, 2])], axes=(0,)),
        'differences': v.dimshuffle(0, 'x') - v.dimshuffle('x', 0), 'fill across': T.fill(row(v), v.dimshuffle(0, 'x')),
        'gram': T.dot(x, x.T), 'copies': T.alloc(v, n, n), 'softmax across': T.nnet.softmax(x.T),
        'logsoftmax across': T.nnet.logsoftmax(x.T), 'centred by max': x - x.max(axis=0),
        'by a test': ifelse(T.gt(x.mean(), 0.6), x, -x), 'inverse of a crossproduct':
        T.dot(x, T.nlinalg.matrix_inverse(T.dot(x.T, x) + T.eye(4))),
        'columns of a crossproduct': solve(COVARIANCE, x.T), 'a system of sums': lower(COVARIANCE, x.sum(axis=0)) * x,
        'centred by an op': CENTRED(x) * v.dimshuffle(0, 'x'), 'centred joined': (TWICE - TWICE.mean(axis=0))[n:],
        'merged rows': TIMES, 'rows of merged pairs': T.dot(TIMES, TIMES.T)[:n].sum(axis=1),
        'joined, rows of all': TIMES - TIMES.mean(axis=0),
        'pairs of joined': T.dot(TWICE, TWICE.T)[:n].sum(axis=1),
        'diagonal of pairs': T.diag(PAIRS), 'diagonal of their transpose': T.diag(PAIRS.T) * v,
        'trace of pairs': T.nlinalg.trace(PAIRS), 'of rows': T.diag(v), 'another diagonal': T.diag(PAIRS, 1),
        'diagonal of samples and others': T.diag(T.dot(x, table.T)), 'filled diagonal of rows': T.fill_diagonal(x, 0),
        'pairs but for the diagonal': T.fill_diagonal(PAIRS, -9),
        'filled with a sum': T.fill_diagonal(PAIRS.T, v.sum()),
        'of each pair': T.diagonal(x.dimshuffle(0, 'x', 1) - x.dimshuffle('x', 0, 1)),
        'InfoNCE': T.log(T.diag(T.nnet.softmax(PAIRS))),
        'batch normalisation': bn.batch_normalization_train(x, table[0], table[1], axes=(0,))[0],
    }


@change_flags(floatX='float64')
def refused():
    """Return {name: (expression, reason)} of expressions that cannot be cut."""
    place, unknown = 'picks samples by their place', 'how %s depends on single samples'
    matrix = 'MatrixInverse takes its matrix as a whole'
    return {
        'two orders': (time_major.reshape((-1, 4)) * s.reshape((-1, 4)), 'different axes of its inputs'),
        'sorted': (T.sort(x, axis=0), 'it goes along the samples'),
        'accumulated': (T.cumsum(x, axis=0), 'it goes along the samples'),
        'pooled across': (pool_2d(x, (2, 2), ignore_border=True), 'it pools over samples'),
        'set some of more': (T.set_subtensor(table[:n], x), place),
        'set from one on': (T.set_subtensor(T.zeros((n + 1, 4))[1:], x), place),
        'joined parts of two lengths': (T.concatenate([s.reshape((-1, 4)), x]), 'it joins along'),
        'joined with a row': (T.concatenate([T.zeros((1, 4)), x]), 'it joins along'), 'joined with picked ones': (
            T.concatenate([v[(T.arange(n).dimshuffle(0, 'x') + 0 * words).flatten()], v]), 'it joins along'),
        'joined with others': (T.concatenate([x, table]), 'it joins along'), 'rolled': (T.roll(x, 1, axis=0), place),
        'three quarters': (TWICE[:n + 1], place), 'every other of joined': (TWICE[::2], place),
        'a trace in a loop': (loop(lambda a, h: h + T.nlinalg.trace(T.dot(a.T, a)), T.constant(np.float64(1)),
                                   sequences=time_major), 'what other samples have come to'),
        'inverse of rows': (T.nlinalg.matrix_inverse(T.dot(x, x.T) + T.eye(n)), matrix),
        'a shifted diagonal': (T.AllocDiag(1)(v), 'not the main'),
        'sent': (io.MPISend(1, 2)(w)[0], 'each replica would call MPISend'),
        'of an unknown op': (noisy(w[0]), 'each replica would call FromFunctionOp.*set mgpu_pure = True'),
        'of an unknown op, and sums': (noisy(x.sum(axis=0)), 'each replica would call'),
        'overwritten': (inplace.tanh_inplace(x.sum(axis=0)), 'it writes into'),
        'all but the last': (x[:n - 1], place), 'from one up to n': (x[1:n], place),
        'as many as a number': (x[:N], place), 'first': (x[0], place), 'reversed': (x[::-1], place),
        'all but one': (x[1:], place), 'slopes': (v[1:] - v[:-1], place),
        'shuffled': (x[labels], place), 'set one': (T.set_subtensor(x[0], 0), place),
        'argmax': (T.argmax(x, axis=0), 'place of the maximum'),
        'centred in a loop': (loop(lambda h: h - h.mean(axis=0), x, n_steps=2), 'what other samples have come to'),
        'inverse': (T.nlinalg.matrix_inverse(x), matrix),
        'unknowns': (solve(np.eye(N), x), 'Solve takes its matrix as a whole'),
        'branches of other lengths': (T.concatenate([ifelse(T.eq(phase, 0), x, T.repeat(x, 2, axis=0)), x]),
                                      'it joins along the samples'),
        'a system of samples': (lower(PAIRS, table[:n]), 'Solve takes its matrix as a whole'),
        'sparse above sparse': (sparse.vstack([SPARSE, SPARSE]), 'do not lie along axis 1'),
        'every other': (x[T.arange(0, n, 2), 0], place),
        'a loop over samples': (loop(lambda a, h: h + a, T.zeros_like(w[:, 0]), sequences=x), 'it loops over samples'),
        'until': (theano.scan(lambda h: (h * 2, theano.scan_module.until(T.gt(h.sum(), 30))), outputs_info=x,
                              n_steps=6)[0], 'what other samples have come to'),
        'until one sample': (theano.scan(lambda h: (h * 2, theano.scan_module.until(T.gt(h[0, 0], 30))),
                                         outputs_info=x, n_steps=6)[0], place),
        'a loop that fills': (loop(lambda h: T.fill(h, 0) + h.mean(axis=0), x, n_steps=2), 'what other samples'),
        'coordinates by samples': (T.unravel_index(T.arange(4), labels, ndim=N)[0], 'its dimensions are samples'),
        'reshaped by samples': (T.reshape(w, labels, ndim=2), 'its shape is made of samples'),
        'raveled by samples': (T.ravel_multi_index([0] * N, labels), 'its dimensions are samples'),
        'raveled beside a vector': (T.ravel_multi_index((words, np.arange(3)), (3, 3)), 'as many axes'),
        'selected': (x[T.gt(v, 0.5).nonzero()], unknown % 'Nonzero'),
        'from the second on': (x[T.arange(1, n), labels[1:]], place),
        'places of another vector': (FLAT[T.arange(N) * 4 + labels], place), 'places from one on': (
            FLAT[T.arange(1, n + 1) * 4 - labels], place), 'fewer places': (FLAT[T.arange(n - 1) * 4], place),
        'set at other rows': (T.set_subtensor(FLAT[labels], 0), place),
        'flat and by label': (FLAT[labels * 4 + labels], place),
        'the first half': (x[T.arange(n // 2), 0], place), 'as many as numbers': (x[T.arange(N), labels], place),
    }


@change_flags(floatX='float64')
def refused_for_a_batch():
    """Return {name: (expression, reason)} of expressions for which only the batch shows that they cannot be cut."""
    place = 'picks samples by their place'
    return {
        'diagonal of rows': (T.diag(x), 'the diagonal does not reach all samples'),
        'all of joined': (TWICE[:2 * n], 'not all of one'), 'a long way into joined': (TWICE[3 * n:], 'not all of one'),
        'joined with some of too few': (T.concatenate([w.T[:n, :2], x[:, :2]])[:n], 'not all of one'),
        'twice as many as n': (T.concatenate([s, s], axis=1).reshape((n * 6, 4))[:2 * n], place),
        'too few for each': (FLAT[T.arange(n) * 3 + labels], place),
        'too many for each': (s.flatten()[T.arange(n) * 14], place),
        'every other place': (FLAT[T.arange(0, 4 * n, 8)], place),
        'the labels of others': (FLAT[T.arange(n) * 4 + labels + 3], place),
        'negative': (FLAT[T.arange(n) * 4 - labels - 1], place),
        'multiplied labels': (FLAT[T.arange(n) * labels], place),
        'another order': (TIMES.flatten()[T.arange(3 * n) * 4 + words.flatten()], place),
        'written into twice as many': (T.set_subtensor(T.concatenate([T.repeat(x, 2, axis=0)] * 2)[:2 * n], x),
                                       'as many rows of each sample'),
        'of one sample': (T.addbroadcast(x, 0), 'more than one sample'),
        'a table beside joined': (TWICE + table, 'as many rows as there are samples'),
        'added to some of zeros': (T.inc_subtensor(T.zeros((9, 4))[:n + n], x[:, :1]), place),
    }


@change_flags(floatX='float64')
def convolutions():
    """Return {name: expression} of expressions that only C++ computes."""
    return {
        'conv': conv2d(images, kernel, border_mode='half'),
        'conv transposed': AbstractConv2d_gradInputs()(kernel, images, T.stack([6, 6])),
        'legacy': conv.conv2d(images, kernel), 'legacy, full': conv.conv2d(images, kernel, border_mode='full'),
        'legacy, with shapes': conv.conv2d(images, kernel, (N, 2, 4, 4), (2, 2, 3, 3)),
        'legacy, of one column': conv.conv2d(images, T.concatenate([kernel, kernel[:, :, :, :1]], axis=3), (N, 2, 4, 4),
                                             (2, 2, 3, 4)).dimshuffle(0, 1, 2),
        'of joined': conv2d(T.concatenate([images, images ** 2]), kernel), 'pool of joined': pool_2d(
            T.concatenate([images, images ** 2]), (2, 2), ignore_border=True),
        'pool': pool_2d(images, (2, 2), ignore_border=True), 'pool of steps': pool_2d(s, (1, 2), ignore_border=True),
        'neighbours': images2neibs(images, (2, 2)),
    }


def random_numbers():
    streams, others = MRG_RandomStreams(1), RandomStreams(1)
    return {
        'uniform': streams.uniform(x.shape), 'normal': streams.normal(x.shape),
        'normal and x': streams.normal((n, 4)) + x,
        'binomial': streams.binomial(x.shape, p=0.5), 'uniform for each': streams.uniform((n, 1)),
        'of NumPy': others.normal((n, 4)), 'uniform of NumPy': others.uniform(x.shape),
    }


EXACT = {**of_single_samples(), **statistics(), **numbers_of_samples(), **met(), **random_numbers()}
REFUSED, REFUSED_BATCHES, CONVOLUTIONS = refused(), refused_for_a_batch(), convolutions()
# Names of expressions for which Theano has no gradient, or a wrong one; a gradient of whole numbers is none.
WITHOUT_GRADIENT = ['diff', 'alloc of rows', 'normalised by sample', 'cast', 'diagonals', 'diagonals, offset',
                    'of each pair', 'singular values', 'qr', 'unique sums', 'chosen sums', 'of an op of a user']
# {name: reason} of expressions whose gradient cannot be cut.
GRADIENT_REFUSED = {**dict.fromkeys(['sparse dot', 'sparse and transposed', 'sparse and more'],
                                    'how CSMProperties depends'),
                    'prod': 'it reduces over the samples: ProdWithoutZeros'}


def check(outputs, mode=PLAIN):
    program = partition(list(DATA), outputs)
    whole = theano.function(list(DATA), outputs, mode=mode, on_unused_input='ignore', no_default_updates=True)
    expected, run = whole(*DATA.values()), compiled(program, mode)
    for sizes in SHARDS:
        for ours, plain in zip(run(split(DATA.values(), sizes)), expected):
            assert np.shape(ours) == np.shape(plain) and ours.dtype == plain.dtype
            np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-12)


@change_flags(floatX='float64')
def with_gradients(variable, inputs=(x, s, v, images)):
    """Return a loss that is made of a variable, and its gradients."""
    loss = T.tanh(variable).sum() + variable.mean() / 3
    return [loss] + theano.grad(loss, list(inputs) + WEIGHTS, disconnected_inputs='ignore')


@pytest.mark.slow_with('two states', 'n steps', 'outputs', 'centred by an op', 'recurrence', 'sums in a loop',
                       'op with two outputs')
@pytest.mark.parametrize('name', EXACT)
def test_expression(name):
    check([EXACT[name]])


WITH_GRADIENT = [name for name, variable in EXACT.items() if variable.dtype.startswith('float')
                 and name not in WITHOUT_GRADIENT]


@pytest.mark.slow_with('op with two outputs', 'joined with some of others', 'two states', 'outputs')
@pytest.mark.parametrize('name', slow_but([*WITH_GRADIENT[::3], *GRADIENT_REFUSED], WITH_GRADIENT))
def test_gradients(name):
    if name in GRADIENT_REFUSED:
        with pytest.raises(CannotCut, match=GRADIENT_REFUSED[name]):
            partition(list(DATA), with_gradients(EXACT[name]))
    else:
        check(with_gradients(EXACT[name]))


def test_gradients_of_weights_beside_a_sparse_product():
    check(with_gradients(EXACT['sparse dot'], []))


@pytest.mark.slow_but_with('pool of steps', 'legacy', 'neighbours')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolution(name):
    check([CONVOLUTIONS[name]] + with_gradients(CONVOLUTIONS[name]), COMPILED)


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused(name):
    variable, reason = REFUSED[name]
    with pytest.raises(CannotCut, match=r'^((?! \(/).)*' + reason):  # not in the source line that is quoted after it
        partition(list(DATA), [variable])


@pytest.mark.parametrize('name', REFUSED_BATCHES)
def test_what_is_refused_for_a_batch(name):
    variable, reason = REFUSED_BATCHES[name]
    run = compiled(partition(list(DATA), [variable]), PLAIN)
    with pytest.raises(AssertionError, match=r'Assert{.*' + reason):
        run(split(DATA.values(), SHARDS[0]))


@pytest.mark.parametrize('name', ['table', 'elements', 'half'])
def test_lengths_that_do_not_fit_the_batch_are_errors_as_on_one_device(name):
    """Each replica took one row for each of its samples, from an array that has another length than the batch."""
    variable = {'table': x + table, 'elements': T.dot(v, table), 'half': x * np.ones((3, 1))}[name]
    with pytest.raises(ValueError):
        theano.function(list(DATA), variable, mode=PLAIN, on_unused_input='ignore')(*DATA.values())
    run = compiled(partition(list(DATA), [variable]), PLAIN)
    for sizes in SHARDS:
        with pytest.raises((ValueError, AssertionError)):  # the latter of an Elemwise in Python
            run(split(DATA.values(), sizes))


def rnn_of(series):
    """Return the states of a loop over the times of series."""
    states, _ = theano.scan(lambda at, h: T.tanh(T.dot(at, w[:3]) + h), [series.dimshuffle(1, 0, 2)],
                            [T.zeros((series.shape[0], w.shape[1]), 'float64')])
    return states


@change_flags(floatX='float64')
def test_no_length_is_compared_where_the_graph_shows_that_rows_are_as_many():
    """A check of the labels kept Theano from computing softmax, cross-entropy and gradient in one op."""
    for cost in (T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w)), labels).mean(),
                 -T.log(T.nnet.softmax(T.dot(x, w)))[T.arange(labels.shape[0]), labels].mean(),
                 rnn_of(s).mean()):
        program = partition(list(DATA), [cost] + theano.grad(cost, [w]))
        assert not [node for node in io_toposort([], program.in_stages)
                    if isinstance(node.op, Assert) and OTHER_LENGTHS in node.op.msg]
