"""Functions with graphs within their ops, over shared variables that `shared` makes: on the host, or on a device."""
import numpy as np
import theano
import theano.tensor as T
from theano.gradient import disconnected_grad
from theano.ifelse import ifelse

N, D, K = 24, 3, 2
CASES = {}


def case(function):
    """Add a function that returns inputs, outputs, parameters to train by the first output, and maybe updates."""
    CASES[function.__name__] = function
    return function


def results(make, shared, function):
    """Return the outputs of two calls of a case, the new values of its variables, and the function."""
    inputs, outputs, parameters, updates = (*make(shared), {})[:4]
    updates = [*updates.items(), *((v, v - .1 * T.grad(outputs[0], v)) for v in parameters)]
    function = function(inputs, outputs, updates=updates, name=make.__name__)
    arguments = [some(*([N, 4, D] if v.ndim == 3 else [N, D][:v.ndim])) for v in inputs]
    return [each for _ in range(2) for each in function(*arguments)] + [v.get_value() for v, _ in updates], function


def some(*shape):
    return np.random.RandomState(sum(shape)).randn(*shape) / 2


def regression(shared):
    return T.dmatrix('x'), T.dvector('y'), shared(some(D), 'w')


def recurrent(shared, step, **options):
    """Return a function of a loop over turns."""
    x, y, w, u, start = T.dtensor3('x'), T.dvector('y'), *(shared(some(*shape)) for shape in [(D, K), (K, K), (K,)])
    states, updates = theano.scan(step, x.dimshuffle(1, 0, 2), y.dimshuffle(0, 'x') + start, [w, u], **options)
    return [x, y], [T.sqr(states[-1].sum(axis=1) - y).mean()], [w, u, start], updates


def turn(x, state, w, u):
    return T.tanh(T.dot(x, w) + T.dot(state, u))


@case
def second_derivatives(shared):
    x, y, w = regression(shared)
    loss = (T.nnet.softplus(T.dot(x, w)) - y * T.dot(x, w)).mean()
    product = T.grad(T.dot(T.grad(loss, w), w), w)
    return [x, y], [loss, T.hessian(loss, w), T.jacobian(T.tanh(x * w).mean(axis=0), w), product], [w]


@case
def of_a_map(shared):
    x, y, w = regression(shared)
    each, _ = theano.map(lambda row, answer, w: T.grad(T.sqr(T.dot(row, w) - answer), w), [x, y], [w])
    return [x, y], [T.sqr(each).sum()], [w]


@case
def strict(shared):
    return recurrent(shared, turn, strict=True)


@case
def own_updates(shared):
    count = shared(np.zeros(2), 'count')
    return recurrent(shared, lambda *args: (turn(*args), {count: count + 1}))


@case
def loop_in_a_loop(shared):
    """The inner one alone has a gradient."""
    return recurrent(shared, lambda x, state, w, u: theano.scan(
        lambda v, state, x, w: T.tanh(T.dot(x, w - T.grad(T.sqr(w).sum(), w)) + state * v), u, state, [x, w])[0][-1])


@case
def graph_in_a_loop(shared):
    """A graph reads a shared variable, or takes one as an argument."""
    x, state, u, scale = T.dmatrix(), T.dmatrix(), T.dmatrix(), shared(np.ones(K), 'scale')
    return recurrent(shared, lambda *args: theano.OpFromGraph(
        [x, state, u], [T.tanh(T.dot(x, args[2]) * scale + T.dot(state, u))])(args[0], args[1], args[3]))


@case
def gradient_in_a_graph(shared):
    x, y, w = regression(shared)
    a, b, v = T.dmatrix(), T.dvector(), w.type()
    loss = T.sqr(theano.OpFromGraph([a, b, v], [T.tanh(T.dot(a, v)) - b])(x, y, w)).mean()
    return [x, y], [loss, theano.OpFromGraph([a], [T.grad(T.sqr(T.dot(a, w)).mean(), w)])(x)], [w]


@case
def branches(shared):
    """A view of a shared variable is on its device, too."""
    (x, y, w), v = regression(shared), shared(some(D), 'v')
    is_on = shared(np.array(1.), 'is_on')
    loss = T.sqr(T.dot(x, ifelse(is_on > 0, w, v) + disconnected_grad(w)) - y).mean()
    return [x, y], [loss], [w], {v: ifelse(is_on > 0, T.grad(loss, w), T.grad(loss, v)), is_on: -is_on}
