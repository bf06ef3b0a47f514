"""Small scripts for arguments of `theano.function`, their values, and calls; each script yields figures.

The same script runs in plain Theano, divided, and on several ranks: `outcome` makes a figure of an error, too.
"""
import copy
import pickle
import re
from collections import OrderedDict

import theano_mgpu  # noqa: F401

import numpy as np
import theano
import theano.tensor as T
from theano.compile.function_module import Function
from theano.compile.pfunc import pfunc
from theano.gof.vm import VM_Linker
from theano.tensor import inplace

X = np.random.RandomState(0).randn(7, 3)
CASES = {}
# A virtual machine whose ops are interpreted: it takes output_subset, and compiles nothing.
MODE = theano.Mode(VM_Linker(use_cloop=True, lazy=True, c_thunks=False), 'fast_compile').excluding(
    'constant_folding', 'topo_constant_folding')
WHOLE = []  # scripts that plain Theano computes
ALONE = []  # scripts of one process: on ranks, errors of a graph differ


def case(owner, *names, whole=False, alone=False):
    """Return a decorator that adds a script for a callable's arguments, or attributes; see `WHOLE` and `ALONE`."""
    def add(script):
        for name in names:
            CASES.setdefault((owner, name), []).append(script)
        if whole:
            WHOLE.append(script)
        if alone:
            ALONE.append(script)
        return script
    return add


def scripts():
    return list(dict.fromkeys(script for each in CASES.values() for script in each))


def outcome(call, *args, **kwargs):
    """Return the result of a call, or the error that it raises, as figures."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        text = str(error).partition('Apply node that caused')[0]  # the rest depends on Theano's optimiser
        return type(error).__name__, re.sub('0x[0-9a-f]+|<TensorType.*?>|File .*', '', text).strip()


def shared(value, name=None):
    return theano.shared(np.array(value, 'float64'), name)


def function(*args, **kwargs):
    return theano.function(*args, **{'mode': MODE, **kwargs})


def affine(**kwargs):
    """Return a function with a batch, a factor with a default, and an update; and its weights."""
    x, factor, w = T.dmatrix('x'), T.dscalar('factor'), shared(np.ones(3), 'w')
    outputs = [T.dot(x, w) * factor, T.sqr(x).mean()]
    return function([x, theano.In(factor, value=0.5)], outputs, updates=[(w, w + x.sum(axis=0))], **kwargs), w


# ------------------------------------------------------------------------------------------------------ the call

@case(Function.__call__, 'args')
def positions():
    f, w = affine()
    yield f(X)
    yield f(X, 2)
    for wrong in ((), (X, 2, 3), (X[0],), ('text',), (X, X), (X.astype(complex),), ([[1, 2], [3]],)):
        yield outcome(f, *wrong)
        yield w.get_value()
    for other in (X.tolist(), X.astype('float32'), np.asfortranarray(X), X[::-1, ::-1], X[:1], X[:2],
                  np.ones((4, 3), int)):
        yield f(other)
    yield w.get_value()


@case(Function.__call__, 'args', 'output_subset', alone=True)
def errors_of_the_graph():
    f, w = affine()
    yield f(X)
    f['factor'] = 3
    yield outcome(f, X[:, :2])[0]
    yield w.get_value()
    yield [f(X), f['factor']]
    # An output that is not asked for is not computed.
    x = T.dmatrix('x')
    g = function([x], [x.sum(axis=1), T.dot(x, T.ones((5,)))])
    yield g(X, output_subset=[0])
    yield outcome(g, X)[0]


@case(Function.__call__, 'kwargs')
def keywords():
    f, w = affine()
    yield f(x=X)
    yield f(factor=3, x=X)
    yield f(X, factor=2)
    for args, wrong in (((X,), {'x': X}), ((), {'factor': 2}), ((X,), {'y': 1}), ((X, 1), {'factor': 2}),
                        ((), {'x': 'text'}), ((X, 1), {'output': 1})):
        yield outcome(f, *args, **wrong)
        yield f['factor']
    yield f(X)
    yield w.get_value()
    a, b = T.dmatrix('same'), T.dmatrix('same')
    g = function([a, b], a + b)
    yield g(X, X)
    yield outcome(g, X, same=X)
    yield outcome(function([T.dmatrix(), a], a * 2, on_unused_input='ignore'), X, same=X)


@case(Function.__call__, 'output_subset')
def some_outputs():
    f, w = affine()
    for subset in ([0], [1], [1, 0], [0, 0], [], None, [0, 1]):
        yield f(X, output_subset=subset)
        yield w.get_value()
    for wrong in ((0,), 'ab', 1, {}):
        yield outcome(f, X, output_subset=wrong)
        yield w.get_value()
    yield f(X, output_subset=[1], factor=2)
    f['factor'] = 4
    yield f(X, output_subset=[0])
    yield f(X)
    x = T.dmatrix('x')
    g = function([x], OrderedDict([('sum', x.sum(axis=1)), ('all', x.sum()), ('max', x.max())]))
    for keys in (['all'], ['max', 'sum'], []):
        yield g(X, output_subset=keys)
    yield outcome(g, X, output_subset=['other'])
    single = function([x], x.sum(axis=1))
    yield single(X, output_subset=[0])
    yield outcome(function([x], x.sum(), mode=theano.Mode('py', 'fast_compile')), X, output_subset=[0])


# ------------------------------------------------------------------------------------------------------ the function

@case(theano.function, 'inputs')
@case(pfunc, 'params')
def inputs():
    x, y, i = T.dmatrix('x'), T.dvector('y'), T.lscalar('i')
    f = function((x, y, theano.In(i, value=1)), x.sum() + y * i)
    yield f(X, X[:, 0])
    yield f(X, X[:, 0], 3)
    yield pfunc([x, y], x.sum() + y, mode=MODE)(X, X[:, 0])
    yield outcome(function, [x, x], x)[0]
    yield outcome(function, [shared(X)], x)[0]


@case(theano.function, 'outputs')
@case(pfunc, 'outputs')
def outputs():
    x, w = T.dmatrix('x'), shared(np.zeros(3))
    rows, total = x.sum(axis=1), x.sum()
    updates = [(w, w + x.sum(axis=0))]
    for kind in (rows, total, [rows], [total], (rows, total), [], None, theano.Out(rows), [theano.Out(total), rows],
                 {'b': total, 'a': rows}, [rows, rows], [x, total], {}):
        f = function([x], kind, updates=updates)
        found = f(X)
        yield type(found).__name__
        yield found
        yield f(X[:1])
        yield w.get_value()
    yield outcome(function, [x], 'text')[0]


@case(pfunc, 'output_keys', whole=True)  # only `theano.function` is divided
def keys():
    x = T.dmatrix('x')
    f = pfunc([x], [x.sum(axis=1), x.sum()], output_keys=['a', 'b'], mode=MODE)
    yield f(X)
    yield f(X, output_subset=['b'])


@case(theano.function, 'mode')
@case(pfunc, 'mode')
def modes():
    for mode in (MODE, theano.Mode('py', 'fast_compile'), theano.Mode('vm', None), theano.Mode('py', None)):
        f, w = affine(mode=mode)
        yield f(X)
        f['factor'] = 3
        yield f(X)
        yield f(X)
        yield w.get_value()


@case(theano.function, 'updates')
@case(pfunc, 'updates')
def updates():
    x, w, n = T.dmatrix('x'), shared(np.ones(3)), theano.shared(0)
    pairs = [(w, w * 0.5 + x.mean(axis=0)), (n, n + x.shape[0])]
    for kind in (pairs, OrderedDict(pairs), tuple(pairs)):
        f = function([x], T.dot(x, w), updates=kind)
        yield f(X)
        yield f(X[:3])
        yield w.get_value()
        yield n.get_value()
    yield outcome(function, [x], x, updates=[(w, w), (w, w)])[0]
    yield outcome(function, [x], x, updates=[(x, x)])[0]


@case(theano.function, 'givens')
@case(pfunc, 'givens')
def givens():
    x, i, data = T.dmatrix('x'), T.lscalar('i'), shared(X)
    for kind in ({x: data[i * 4:(i + 1) * 4]}, [(x, data[i * 4:(i + 1) * 4])]):
        f = function([theano.In(i, value=1)], [x.sum(axis=1), x.sum()], givens=kind)
        yield f(0)
        yield f()
        f['i'] = 0
        yield f()
        yield f()


@case(theano.function, 'no_default_updates')
@case(pfunc, 'no_default_updates')
def default_updates():
    x, n, m = T.dmatrix('x'), theano.shared(0), theano.shared(0)
    n.default_update, m.default_update = n + x.shape[0], m + 1
    for flag in (False, True, [n], []):
        f = function([x], x.sum(axis=1) + n + m, no_default_updates=flag)
        yield f(X)
        yield f(X)
        yield [n.get_value(), m.get_value()]


@case(theano.function, 'accept_inplace', whole=True)
@case(pfunc, 'accept_inplace')
def in_place():
    x = T.dmatrix('x')
    y = inplace.exp_inplace(x * 2)
    yield function([x], y, accept_inplace=True)(X)
    yield outcome(function, [x], y)[0]


@case(theano.function, 'name')
@case(pfunc, 'name')
def names():
    f, _ = affine(name='a name')
    yield f.name
    yield outcome(f, 'text')
    yield f(X)


@case(theano.function, 'rebuild_strict')
@case(pfunc, 'rebuild_strict')
def rebuilt():
    x, y = T.dmatrix('x'), T.fmatrix('y')
    f = function([y], x.sum(axis=1), givens={x: y}, rebuild_strict=False)
    yield f(X.astype('float32'))
    yield outcome(function, [y], x.sum(axis=1), givens={x: y})[0]


@case(theano.function, 'allow_input_downcast')
@case(pfunc, 'allow_input_downcast')
def downcast():
    x, s = T.fmatrix('x'), T.fscalar('s')
    for flag in (None, True, False):
        f = function([x, theano.In(s, value=np.float32(1))], x.sum(axis=1) * s, allow_input_downcast=flag)
        yield outcome(f, X)
        yield outcome(f, X.astype('float32'), 0.1)
        yield outcome(f, X.astype('float32'), np.float64(0.1))
        yield outcome(f, X.astype('float32'))


@case(theano.function, 'profile', whole=True)
@case(pfunc, 'profile', whole=True)
@case(Function, 'profile', whole=True)
def profiled():
    profile = theano.compile.ProfileStats(message='calls', atexit_print=False)
    f, _ = affine(profile=profile)
    yield f(X)
    yield f(X, 3)
    yield [f.profile is profile, profile.fct_callcount]


@case(theano.function, 'on_unused_input')
@case(pfunc, 'on_unused_input')
def unused():
    x, y = T.dmatrix('x'), T.dvector('y')
    yield outcome(function, [x, y], x.sum())[0]
    yield function([x, y], x.sum(axis=1), on_unused_input='ignore')(X, X[:, 0])
    yield function([x, theano.In(y, value=[1, 2])], x.sum(axis=1), on_unused_input='ignore')(X)


# ------------------------------------------------------------------------------------------------------ In and Out

@case(theano.In, 'variable')
@case(theano.In, 'name')
@case(theano.In, 'autoname')
def named_inputs():
    x, s = T.dmatrix('x'), T.dscalar('s')
    f = function([x, theano.In(s, name='rate', value=1)], x * s)
    yield f(X, rate=2)
    yield outcome(f, X, s=2)
    f['rate'] = 5
    yield f(X)
    g = function([x, theano.In(s, value=1, autoname=False)], x * s)
    yield outcome(g, X, s=2)
    yield g(X, 3)
    g[s] = 4
    yield g(X)
    g[1] = 6
    yield g(X)
    yield outcome(g.__setitem__, 's', 4)[0]


@case(theano.In, 'value')
@case(Function, 'value')
@case(Function, 'container')
@case(Function, 'defaults')
@case(Function, 'finder')
@case(Function, 'inv_finder')
@case(Function, 'indices')
def values_of_inputs():
    x, s, v = T.dmatrix('x'), T.dscalar('s'), T.dvector('v')
    w = shared([1, 2, 3], 'w')
    f = function([x, theano.In(s, value=0.1), theano.In(v, value=[1, 2, 3])], T.dot(x * s, v + w))
    yield f(X)
    f['s'] = 0.7
    yield f['s']
    yield f(X)
    yield f['s']
    yield f(X)
    f.value['s'] = 3
    f[v] = [0, 0, 1]
    yield [f.value['v'], f.value[s], f.value[w]]
    yield f(X)
    f.container['s'].value = 9
    f.container[v].data = [7, 7, 7]
    yield outcome(f, X, 1, 'text')
    yield f(X)
    f.container['s'].value = 9
    yield [f.container[1].value, f.finder[s].value, 's' in f, 't' in f, w in f, s in f.value, 's' in f.container]
    yield f(X, v=[1, 1, 1])
    yield f(X)
    f['s'] = 6
    yield f(X[:0])  # an empty batch is plain Theano's
    yield f(X)
    g = function([x, theano.In(s, value=1)], x.reshape((4, 3)).sum(axis=1) * s)
    yield g(X[:4])
    g['s'] = 3
    yield g(X[:2].repeat(2, axis=1))  # and so is a batch of another length than the graph's
    yield [g['s'], g(X[:4])]
    f['x'] = X  # an input without a default has to be given
    yield outcome(f)
    f['s'] = 2
    yield outcome(f, X, s=3)
    yield f(X)
    yield outcome(f.__getitem__, 'none')
    yield outcome(f.__setitem__, 'none', 1)
    yield outcome(f.__setitem__, 's', 'text')[0]
    f[w] = [5, 5, 5]
    yield w.get_value()
    yield f(X)
    w.set_value([1, 0, 0])
    yield [f['w'], f[w], f.container['w'].value, f.value[w]]
    yield f(X)
    yield [required for required, _, _ in f.defaults]
    yield [type(f.inv_finder[f.container['s']]).__name__, f.indices[1][0].name]


@case(theano.In, 'update')
def states_of_inputs():
    x, s, m = T.dmatrix('x'), T.dscalar('s'), T.dvector('m')
    w = shared(np.ones(3), 'w')
    states = [theano.In(s, value=0, update=s + x.sum()), theano.In(m, value=np.zeros(3), update=m + x.mean(axis=0))]
    f = function([x] + states, [T.dot(x, w) + s, m.sum()], updates=[(w, w + m)])
    for n in (7, 3, 7):
        yield f(X[:n])
        yield [f['s'], f['m'], w.get_value()]
    f['s'] = 100
    yield f(X)
    yield f['s']
    yield f(X, 5)
    yield f(X, output_subset=[1])
    yield [f['s'], f['m'], w.get_value()]
    yield outcome(f, X[:, :2])[0]
    yield [f['s'], f['m'], w.get_value()]


@case(theano.In, 'mutable')
@case(theano.In, 'borrow')
def borrowed_inputs():
    x, y, s = T.dmatrix('x'), T.dmatrix('y'), T.dscalar('s')
    for flags in ({'mutable': True}, {'borrow': True}, {'mutable': False, 'borrow': True}, {'mutable': False}):
        f = function([theano.In(x, **flags), theano.In(y, **flags), theano.In(s, value=2, **flags)],
                     [x * 2 + y, x, (x * y * s).sum()])
        data = X.copy()
        yield f(X.copy(), X.copy())
        yield f(data, data)
        yield f(X.copy(), X[::-1].copy(), 3)


@case(theano.In, 'strict')
def strict():
    x, s = T.dmatrix('x'), T.dscalar('s')
    f = function([theano.In(x, strict=True), theano.In(s, value=np.array(1.), strict=True)], x.sum(axis=1) * s)
    yield f(X)
    yield outcome(f, X.astype('float32'))
    yield outcome(f, X.tolist())[0]
    yield outcome(f, X, 2)
    yield f(X, np.array(2.))


@case(theano.In, 'allow_downcast')
def downcast_of_an_input():
    x, y = T.fmatrix('x'), T.fmatrix('y')
    f = function([theano.In(x, allow_downcast=True), theano.In(y, allow_downcast=False)], x + y)
    yield f(X, X.astype('float32'))
    yield outcome(f, X, X)


@case(theano.In, 'implicit')
def implicit():
    x, s, w = T.dmatrix('x'), T.dscalar('s'), shared(3.)
    f = function([x, theano.In(s, value=2, implicit=True)], x * s)
    yield f(X)
    yield outcome(f, X, 3)
    yield outcome(f, X, s=3)
    f['s'] = 4
    yield f(X)
    # Plain Theano computes a function that shares the container of a variable.
    g = function([x, theano.In(s, value=w.container)], x * s)
    yield g(X)
    w.set_value(5.)
    yield g(X)


@case(theano.In, 'shared', whole=True)
def shared_inputs():
    """Yield a value that the function keeps, by an argument for Theano's own use."""
    x, s, w = T.dmatrix('x'), T.dscalar('s'), shared(3.)
    f = function([x, theano.In(s, value=w.container, shared=True)], x * s)
    yield f(X)
    w.set_value(5.)
    yield f(X)


@case(theano.Out, 'variable')
@case(theano.Out, 'borrow')
def borrowed_outputs():
    x, w = T.dmatrix('x'), shared(np.ones(3))
    f = function([x], [theano.Out(T.dot(x, w), borrow=True), theano.Out(w, borrow=True), theano.Out(w), x, w],
                 updates=[(w, w + x.sum(axis=0))])
    kept = f(X)
    yield [np.array(value) for value in kept]
    f(X)
    for value in f(X[:2])[2:]:
        value[...] = 0  # is no memory of the variable's, or of an argument's
    yield [X.sum(), w.get_value()]
    yield f(X)


@case(theano.shared, 'borrow')
def borrowed_memory():
    x, array, other = T.dmatrix('x'), np.ones((3, 2)), np.eye(3, 2)
    w = theano.shared(array, borrow=True)
    f = function([x], [T.dot(x, w), w.sum()])
    yield f(X)
    array *= 3
    yield f(X)
    w.get_value(borrow=True)[1] = 7
    yield [array.copy(), f(X)]
    w.set_value(other, borrow=True)
    yield f(X)
    other[...] = 2
    array[...] = 0
    yield [f(X), w.get_value()]


# ------------------------------------------------------------------------------------------------------- attributes

@case(Function, 'trust_input')
def trusted():
    f, w = affine()
    yield f(X)
    f.trust_input = True
    yield f(X)
    yield f(X, np.array(3.))
    f['factor'] = 2
    yield f(X)
    yield f(X)
    f.trust_input = False
    yield outcome(f, 'text')
    yield w.get_value()


@case(Function, 'copy')
@case(Function.copy, 'share_memory')
@case(Function.copy, 'name')
@case(Function.copy, 'profile')
def copies():
    f, w = affine(name='first')
    yield f(X)
    for g in (f.copy(), f.copy(share_memory=True), f.copy(name='second'), copy.copy(f), f.copy(profile=False)):
        yield g.name
        yield g(X)
        g['factor'] = 7
        yield g(X)
        yield f(X)
        yield w.get_value()
    profile = f.copy(profile=True)
    yield profile(X)
    yield profile.profile.fct_callcount


@case(Function.copy, 'swap')
def swapped():
    x, i = T.dmatrix('x'), T.lscalar('i')
    data, other, n, m = shared(X, 'data'), shared(2 * X, 'other'), theano.shared(0, 'n'), theano.shared(10, 'm')
    f = function([i], [x.sum(axis=1), x.sum() + n], givens={x: data[i * 4:(i + 1) * 4]}, updates=[(n, n + x.shape[0])])
    yield f(0)
    g = f.copy(swap={data: other})
    yield g(0)
    yield [n.get_value(), m.get_value()]
    h = f.copy(swap={n: m})
    yield h(1)
    yield f(1)
    yield [n.get_value(), m.get_value()]
    yield outcome(f.copy, swap={m: n})[0]


@case(Function.copy, 'delete_updates')
def without_updates():
    x, s, w = T.dmatrix('x'), T.dscalar('s'), shared(np.ones(3))
    f = function([x, theano.In(s, value=0, update=s + 1)], T.dot(x, w) + s, updates=[(w, w + x.sum(axis=0))])
    yield f(X)
    g = f.copy(delete_updates=True)
    for _ in range(2):
        yield outcome(g, X, 1)
        yield w.get_value()
    yield f(X)
    yield w.get_value()


@case(Function, 'free')
def freed():
    with theano.configparser.change_flags(allow_gc=False):
        x, w = T.dmatrix('x'), shared(np.ones(3))
        f = function([x], T.dot(x, w), mode=theano.Mode(VM_Linker(allow_gc=False, c_thunks=False), 'fast_compile'))
    yield f(X)
    f.free()
    yield w.get_value()
    w.set_value(np.ones(3))
    yield f(X)


@case(Function, 'get_shared')
@case(Function, 'sync_shared')
def shared_of_it():
    f, w = affine()
    yield [variable is w for variable in f.get_shared()]
    f(X)
    f.sync_shared()
    yield f.get_shared()[0].get_value()


@case(Function, 'input_storage')
@case(Function, 'output_storage')
@case(Function, 'maker')
@case(Function, 'fn')
@case(Function, 'outputs')
@case(Function, 'output_keys')
@case(Function, 'unpack_single')
@case(Function, 'return_none')
@case(Function, 'name')
@case(Function, 'nodes_with_inner_function')
@case(Function, 'n_returned_outputs')
def parts():
    f, w = affine()
    f(X)
    yield [len(f.input_storage), len(f.output_storage), len(f.maker.fgraph.outputs), callable(f.fn), f.output_keys]
    yield [f.unpack_single, f.return_none, f.name is None, f.nodes_with_inner_function, len(f.outputs)]
    yield f.input_storage[1].value
    f.input_storage[1].value = 9
    yield f(X)
    yield f.input_storage[2].value
    f.name = 'renamed'
    yield outcome(f, 'text')
    f.output_keys = ['a', 'b']
    yield f(X)
    f.output_keys = None
    yield f(X)


@case(Function, 'pickle_aliased_memory_strategy')
def pickled():
    f, w = affine()
    f(X)
    f['factor'] = 3
    for g in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f)):
        yield g['w']
        yield g(X)
        yield g(X)
        yield g['w']
    yield w.get_value()
    yield f(X)
