"""Word vectors by skip-gram with negative samples, trained by hand: only the rows of the words of a batch are changed.

usage: word2vec.py [sgd|adagrad|set]

Words occur several times in a batch, and each time counts.
"""
import sys

import numpy as np
import theano
import theano.tensor as T

floatX = theano.config.floatX


def pairs(rng, n_words, n, n_negative):
    """Return words, a word of the context of each, and words that are drawn at random."""
    centre = rng.randint(0, n_words, n)
    context = (centre + rng.randint(1, 4, n)) % n_words
    return centre.astype('int32'), context.astype('int32'), rng.randint(0, n_words, (n, n_negative)).astype('int32')


def main(how='sgd', n_words=23, n_dim=5, n_negative=4, epochs=3, n=70, batch_size=16):
    rng = np.random.RandomState(5)
    E = theano.shared(np.asarray(rng.uniform(-0.5, 0.5, (n_words, n_dim)), dtype=floatX), name='E')
    C = theano.shared(np.asarray(rng.uniform(-0.5, 0.5, (n_words, n_dim)), dtype=floatX), name='C')
    counts = theano.shared(np.zeros(n_words, dtype='int64'), name='counts')
    centre, context, negative = T.ivector('centre'), T.ivector('context'), T.imatrix('negative')
    rate = T.scalar('rate')

    e, c, d = E[centre], C[context], C[negative]
    near = T.sum(e * c, axis=1)
    far = T.sum(e.dimshuffle(0, 'x', 1) * d, axis=2)
    cost = T.sum(T.nnet.softplus(-near)) + T.sum(T.nnet.softplus(far))
    g_e, g_c, g_d = T.grad(cost, [e, c, d])
    updates = [(counts, T.inc_subtensor(counts[centre], 1))]
    if how == 'sgd':
        updates += [(E, T.inc_subtensor(e, -rate * g_e)),
                    (C, T.inc_subtensor(T.inc_subtensor(c, -rate * g_c)[negative], -rate * g_d))]
    elif how == 'adagrad':
        for table, ids, gradient in ((E, centre, g_e), (C, context, g_c)):
            total = theano.shared(np.zeros((n_words, n_dim), dtype=floatX))
            new = T.inc_subtensor(total[ids], gradient ** 2)
            updates += [(total, new), (table, T.inc_subtensor(table[ids], -rate * gradient / T.sqrt(new[ids] + 1e-6)))]
    else:  # the last of several rows of one word remains
        updates += [(E, T.set_subtensor(E[centre], e - rate * g_e)),
                    (C, T.set_subtensor(C[context], c - rate * g_c))]
    train = theano.function([centre, context, negative, rate], cost, updates=updates, name='train')
    similar = T.dot(E[centre], E.T) / T.sqrt(T.sum(E ** 2, axis=1))
    nearest = theano.function([centre], T.max(similar, axis=1), name='nearest')

    data = pairs(rng, n_words, n, n_negative)
    for epoch in range(epochs):
        for start in range(0, n, batch_size):
            batch = [array[start:start + batch_size] for array in data]
            print('epoch %d, batch %d, cost %.10g' % (epoch, start, train(*batch + [0.2 / (1 + epoch)])))
    for number, value in enumerate(nearest(np.arange(6, dtype='int32'))):
        print('word %d, similarity %.10g' % (number, value))
    for table in (E, C, counts):
        print('%s, mean magnitude %.10g' % (table.name, np.abs(table.get_value()).mean()))


if __name__ == '__main__':
    main(*sys.argv[1:])
