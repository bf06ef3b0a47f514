"""Functions without a batch: a power iteration, a matrix factorisation, a root of an equation of one variable."""
import numpy as np
import theano
import theano.tensor as T

floatX = theano.config.floatX
rng = np.random.RandomState(7)


def power_iteration(n=12, steps=12):
    """Print the largest eigenvalue of a matrix that lies in a shared variable."""
    values = rng.uniform(size=(n, n))
    A = theano.shared(np.asarray(values + values.T, dtype=floatX), name='A')
    v = theano.shared(np.asarray(rng.uniform(0.5, 1, size=n), dtype=floatX), name='v')
    w = T.dot(A, v)
    rayleigh = T.dot(v, w) / T.dot(v, v)
    step = theano.function([], rayleigh, updates=[(v, w / T.sqrt(T.sum(w ** 2)))])
    for number in range(steps):
        print('power iteration %d, eigenvalue %.10g' % (number, step()))
    print('first entry of the eigenvector %.10g' % v.get_value()[0])


def factorise(rows=9, columns=7, rank=3, steps=20):
    """Find two factors of a matrix by gradient descent, with a rate that is an argument."""
    target = theano.shared(np.asarray(rng.uniform(size=(rows, columns)), dtype=floatX), name='target')
    left = theano.shared(np.asarray(0.5 * rng.uniform(size=(rows, rank)), dtype=floatX), name='left')
    right = theano.shared(np.asarray(0.5 * rng.uniform(size=(rank, columns)), dtype=floatX), name='right')
    loss = T.sum((target - T.dot(left, right)) ** 2)
    rate = T.scalar('rate')
    step = theano.function([rate], loss, updates=[(p, p - rate * g)
                                                  for p, g in zip([left, right], T.grad(loss, [left, right]))])
    for number in range(steps):
        print('factorisation %d, loss %.10g' % (number, step(0.05)))
    for factor in (left, right):
        print('%s, sum %.10g' % (factor.name, factor.get_value().sum()))


def newton(steps=5):
    """Solve cos(x) = x, from 1."""
    x = T.scalar('x')
    y = T.cos(x) - x
    improve = theano.function([x], [x - y / T.grad(y, x), y])
    value = 1.
    for number in range(steps):
        value, rest = improve(value)
        print('Newton step %d, root %.10g' % (number, value))
    print('converged: %s' % (abs(rest) < 1e-4))


if __name__ == '__main__':
    power_iteration()
    factorise()
    newton()
