"""A function that computes each sample apart, beside functions whose samples depend on each other.

The order of errors needs the errors of the whole batch, which are gathered. The Cholesky factor of a batch can't be
computed from factors of its parts.
"""
import numpy as np
import theano
import theano.tensor as T
from theano.tensor import slinalg

floatX = theano.config.floatX
rng = np.random.RandomState(11)


def shared(*shape):
    return theano.shared(np.asarray(0.3 * rng.randn(*shape), dtype=floatX))


def sgd(cost, params, rate=0.1):
    return [(p, p - rate * g) for p, g in zip(params, T.grad(cost, params))]


def main(epochs=3, n=33, batch_size=8, n_in=6, n_hidden=5):
    X = np.asarray(rng.randn(n, n_in), dtype=floatX)
    Y = np.asarray(np.tanh(X.sum(axis=1)) + 0.1 * rng.randn(n), dtype=floatX)
    x, y = T.matrix('x'), T.vector('y')

    # Squared errors: a mean over samples.
    W, b, v = shared(n_in, n_hidden), shared(n_hidden), shared(n_hidden)
    output = T.dot(T.tanh(T.dot(x, W) + b), v)
    squares = (output - y) ** 2
    apart = theano.function([x, y], squares.mean(), updates=sgd(squares.mean(), [W, b, v]), name='apart')
    predict = theano.function([x], output, name='predict')

    # The samples in the order of their errors, and a weight for each place: large errors count less.
    W2, b2, v2 = shared(n_in, n_hidden), shared(n_hidden), shared(n_hidden)
    output2 = T.dot(T.tanh(T.dot(x, W2) + b2), v2)
    ordered = T.sort((output2 - y) ** 2, axis=0)
    weights = 1. / (1. + T.cast(T.arange(ordered.shape[0]), floatX))
    trimmed = T.sum(weights * ordered) / T.sum(weights)
    by_rank = theano.function([x, y], trimmed, updates=sgd(trimmed, [W2, b2, v2]), name='by_rank')

    # The likelihood of a Gaussian process: the Gram matrix of the batch.
    log_scale = theano.shared(np.asarray(0.1, dtype=floatX), name='log_scale')
    distances = T.sum((x.dimshuffle(0, 'x', 1) - x.dimshuffle('x', 0, 1)) ** 2, axis=2)
    gram = T.exp(-T.exp(log_scale) * distances / n_in) + 0.3 * T.eye(x.shape[0])
    factor = slinalg.cholesky(gram)
    solved = slinalg.solve_lower_triangular(factor, y)
    nll = 0.5 * T.sum(solved ** 2) + T.sum(T.log(T.diag(factor)))
    process = theano.function([x, y], nll, updates=sgd(nll, [log_scale], 0.02), name='process')

    for epoch in range(epochs):
        for start in range(0, n, batch_size):
            batch = X[start:start + batch_size], Y[start:start + batch_size]
            print('epoch %d, batch %d, apart %.10g' % (epoch, start, apart(*batch)))
            print('epoch %d, batch %d, by rank %.10g' % (epoch, start, by_rank(*batch)))
            print('epoch %d, batch %d, process %.10g' % (epoch, start, process(*batch)))
    for number, value in enumerate(predict(X)[:5]):
        print('prediction %d, %.10g' % (number, value))
    for number, param in enumerate([W, b, v, W2, b2, v2, log_scale]):
        print('parameter %d, mean magnitude %.10g' % (number, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main()
