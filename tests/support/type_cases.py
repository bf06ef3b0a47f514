"""Small scripts, one for each type that an argument, an output or a shared variable can have; each yields figures."""
import theano_mgpu  # noqa: F401

import numpy as np
import theano
import theano.sparse as ts
import theano.tensor as T
import theano.typed_list as typed_list
from scipy import sparse
from theano.tensor.raw_random import random_state_type, uniform
from theano.tensor.type_other import SliceType

from .call_cases import X, case, function, outcome, shared

R = np.random.RandomState(1)
DENSE = R.randn(7, 6) * (R.rand(7, 6) < 0.4)
SQUARE = R.randn(7, 7) * (R.rand(7, 7) < 0.4)
FORMATS = {'csr': sparse.csr_matrix, 'csc': sparse.csc_matrix}


def dense(value):
    """Return a sparse result as a list of its format, dtype and elements; others as they are."""
    if isinstance(value, (list, tuple)):
        return [dense(each) for each in value]
    return [value.format, str(value.dtype), value.toarray()] if sparse.issparse(value) else value


@case('type', 'csr', 'csc')
def sparse_arguments():
    for name, make in FORMATS.items():
        s, w = ts.matrix(name, 's', dtype='float64'), shared(np.ones((6, 3)))
        y = T.tanh(ts.structured_dot(s, w))
        f = function([s], [y, T.sqr(y).mean()], updates=[(w, w - 0.1 * T.grad(T.sqr(y).mean(), w))])
        for n in (7, 4, 1, 6):
            yield f(make(DENSE[:n]))
            yield w.get_value()
        yield outcome(f, DENSE)[0]
        yield outcome(f, make(DENSE.astype('complex')))[0]
        yield outcome(f, make(DENSE.astype('float32')))[0]
        both = function([s, T.dvector('v')], ts.dot(s, T.ones((7, 2))), on_unused_input='ignore')
        yield both(make(SQUARE), X[:, 0])


@case('type', 'csr output', 'csc output')
def sparse_outputs():
    x = T.dmatrix('x')
    for convert in (ts.csr_from_dense, ts.csc_from_dense):
        f = function([x], [convert(x), x.sum(), convert(x * 2)])
        for n in (7, 4, 1):
            yield dense(f(DENSE[:n]))
        yield dense(function([x], convert(x))(DENSE))
        yield dense(function([x], {'a': convert(x), 'b': x})(DENSE)['a'])
    yield function([x], ts.dot(ts.csr_from_dense(x), T.ones((6, 2))))(DENSE)


@case('type', 'csr in, csr out', 'csr default')
def sparse_to_sparse():
    s, x, t = ts.csr_matrix('s', dtype='float64'), T.dmatrix('x'), ts.csr_matrix('t', dtype='float64')
    yield dense(function([s], s * 2)(sparse.csr_matrix(DENSE)))
    yield dense(function([s], s)(sparse.csr_matrix(DENSE)))
    yield dense(function([s], ts.transpose(s))(sparse.csr_matrix(DENSE)))
    yield function([s], ts.dense_from_sparse(s).sum(axis=1))(sparse.csr_matrix(DENSE))
    yield dense(function([s, t], s + t)(sparse.csr_matrix(DENSE), sparse.csr_matrix(DENSE)))
    f = function([x, theano.In(t, value=sparse.csr_matrix(np.eye(6)))], [ts.dot(x, t), t])
    yield dense(f(DENSE))
    f['t'] = sparse.csr_matrix(3 * np.eye(6))
    yield dense(f(DENSE))
    yield dense(f(DENSE))


@case('type', 'csr shared', 'csr update')
def sparse_shared():
    x, data = T.dmatrix('x'), theano.shared(sparse.csr_matrix(np.eye(6)), borrow=True)
    f = function([x], [ts.dot(x, data), data * 2], updates=[(data, data * 2)])
    g = function([x], ts.dot(x, data).sum())
    for _ in range(2):
        yield dense(f(DENSE))
        yield g(DENSE)
        yield dense(data.get_value())
    buffer = sparse.csr_matrix(np.eye(6))
    data.set_value(buffer, borrow=True)
    yield g(DENSE)
    buffer.data *= 3
    yield g(DENSE)
    i, rows = T.iscalar('i'), theano.shared(sparse.csr_matrix(DENSE))
    h = function([i], ts.dot(rows[i * 4:(i + 1) * 4], T.ones((6, 2))))
    yield [h(0), h(1)]


@case('type', 'typed list')
def lists():
    x = T.dmatrix('x')
    items = typed_list.TypedListType(T.dmatrix)('items')
    f = function([x, items], [x.sum(axis=1), items, typed_list.append(items, x)])
    yield f(X, [X, 2 * X])
    yield f(X, [])
    yield function([items, x], items[0].sum() + x.sum(axis=1))([X, X], X)
    yield function([items], typed_list.length(items))([X, X])
    yield outcome(f, X, [X[0]])[0]


@case('type', 'generic')
def generic():
    x, g = T.dmatrix('x'), theano.gof.generic('g')
    f = function([x, theano.In(g, value='default')], [x.sum(axis=1), g])
    for value in ('text', None, {'a': 1}, [1, 'b'], 3, 2.5, ('a', X), True):
        yield f(X, value)
    yield f(X)
    f['g'] = 'other'
    yield f(X)
    state = theano.shared('words')
    yield function([x], [x.sum(axis=1), state])(X)


@case('type', 'slice', whole=True)
def slices():
    x, rows = T.dmatrix('x'), SliceType()('rows')
    f = function([x, rows], [x[rows], x.sum()])
    yield f(X, slice(2, 5))
    yield f(X, slice(None))


@case('type', 'random state')
def random_states():
    x, state = T.dmatrix('x'), random_state_type('state')
    after, numbers = uniform(state, size=(3,), ndim=1)
    f = function([x, state], [x.sum(axis=1) + numbers.sum(), after])
    for _ in range(2):
        rows, found = f(X, np.random.RandomState(5))
        yield rows
        yield found.get_state()[1]
    g = function([x, theano.In(state, value=np.random.RandomState(5), update=after)], x.sum(axis=1) + numbers.sum())
    yield [g(X), g(X), g['state'].get_state()[1]]


@case('type', 'scalar')
def scalars():
    x, s, i = T.dmatrix('x'), theano.scalar.float64('s'), theano.scalar.int64('i')
    f = function([x, s, theano.In(i, value=2)], [x * T.tensor_from_scalar(s), s, x[:, i]])
    yield f(X, 3.5)
    yield f(X, np.float64(2), 1)
    f['i'] = 0
    yield f(X, 1.5)
    yield function([x], T.scalar_from_tensor(x.sum()))(X)


@case('type', 'dtype')
def dtypes():
    for dtype in ('bool', 'int8', 'uint8', 'int16', 'uint16', 'uint32', 'int64', 'uint64', 'float16', 'float32',
                  'complex64', 'complex128'):
        value = (X * 4).astype(dtype) if dtype != 'uint8' else (abs(X) * 90).astype(dtype)
        x, w = T.matrix('x', dtype), theano.shared(np.ones(3, dtype))
        outputs = [x, x.sum(axis=0), x.sum(), x.sum(axis=1), x * w, x[:, 0]]
        if not dtype.startswith('complex'):
            outputs += [x.max(axis=0), x.min(), (x > 0).any(), (x > 0).all(axis=0), x.astype('float64').mean()]
        f = function([x], outputs)
        for n in (7, 2, 1):
            found = f(value[:n])
            if dtype == 'float16':  # sums in another order round otherwise
                found = [each.astype('float64').round(1) for each in found]
            yield found
        yield outcome(f, value.astype(complex) + 1j)[0]


@case('type', 'memory')
def memory():
    x, s = T.dtensor3('x'), T.dscalar('s')
    f = function([x, s], [x.sum(axis=(1, 2)) * s, x[:, 0].mean()])
    whole = np.arange(7 * 4 * 6.).reshape(7, 4, 6)
    for value in (whole, np.asfortranarray(whole), whole[::-1, :, ::2], whole.transpose(2, 0, 1), whole[:0], whole[:1],
                  np.broadcast_to(whole[:1], whole.shape), np.ma.masked_less(whole, 5), np.matrix(np.eye(3))[None]):
        yield outcome(f, value, 2)
        yield outcome(f, value, np.array(3))
    yield outcome(f, np.array([[['a']]], object), 1)[0]
    yield outcome(f, None, 1)[0]
    yield outcome(f, whole, None)[0]


@case('type', 'broadcastable')
def broadcastable():
    x, row, column, tensor = T.dmatrix('x'), T.drow('row'), T.dcol('column'), T.dtensor4('t')
    f = function([x, row, column], [x + row * column, (x * row).sum(axis=0)])
    yield f(X, X[:1], X[:, :1])
    yield function([row], row * 2)(X[:1])
    yield function([column], [column * 2, column.sum()])(X[:, :1])
    yield outcome(function([row], row * 2), X)[0]
    yield function([tensor], tensor.max(axis=(1, 2, 3)))(X.reshape(7, 1, 3, 1))


@case('type', 'constant')
def constants():
    x, s, w = T.dmatrix('x'), T.dscalar('s'), shared(np.ones(2))
    yield function([x, s], [s, s * 2, T.constant(3), w, x.shape, x.shape[0], T.eye(2), x.sum(axis=1)])(X, 2)
