"""Training by index vectors, and monitors that accumulate over batches in shared variables.

Functions are called with keywords, return dicts, or nothing.
"""
import numpy as np
import theano
import theano.tensor as T

floatX = theano.config.floatX
rng = np.random.RandomState(5)


def shared(value, name):
    return theano.shared(np.asarray(value, dtype=floatX), name=name)


def main(epochs=3, n=70, batch_size=16, n_in=10, n_hidden=8, n_out=3):
    features = rng.randn(n, n_in)
    classes = np.argmax(np.dot(features, rng.randn(n_in, n_out)) + 0.5 * rng.randn(n, n_out), axis=1)
    X = shared(features, 'X')
    Y = theano.shared(classes.astype('int32'), name='Y')
    W1, b1 = shared(0.3 * rng.randn(n_in, n_hidden), 'W1'), shared(np.zeros(n_hidden), 'b1')
    W2, b2 = shared(0.3 * rng.randn(n_hidden, n_out), 'W2'), shared(np.zeros(n_out), 'b2')
    params = [W1, b1, W2, b2]

    x, y, idx, rate = T.matrix('x'), T.ivector('y'), T.lvector('idx'), T.scalar('rate')
    not_used = T.scalar('not_used')
    p = T.nnet.softmax(T.dot(T.tanh(T.dot(x, W1) + b1), W2) + b2)
    losses = T.nnet.categorical_crossentropy(p, y)
    wrong = T.neq(T.argmax(p, axis=1), y)
    cost = losses.mean()

    velocities = [shared(np.zeros(param.get_value().shape), 'v' + param.name) for param in params]
    updates = []
    for param, velocity, gradient in zip(params, velocities, T.grad(cost, params)):
        step = 0.9 * velocity - rate * gradient
        updates += [(velocity, step), (param, param + step)]
    train = theano.function([idx, theano.In(rate, value=0.05)], {'cost': cost, 'err': T.mean(wrong, dtype=floatX)},
                            updates=updates, givens={x: X[idx], y: Y[idx]}, name='train', profile=False)

    acc, errors = shared(0, 'acc'), theano.shared(np.int64(0), name='errors')
    count, moments = theano.shared(np.int64(0), name='count'), shared(np.zeros(n_in), 'moments')
    largest = shared(-1, 'largest')
    accumulate = theano.function([x, y], updates=[
        (acc, acc + T.sum(losses)), (errors, errors + T.sum(wrong)), (count, count + x.shape[0]),
        (moments, moments + T.sum(x ** 2, axis=0)), (largest, T.maximum(largest, losses.max()))], name='accumulate')
    evaluate = theano.function([x, y, theano.In(not_used, value=0.)], [losses.sum(), wrong.sum(), p], name='evaluate',
                               on_unused_input='ignore')
    probabilities = theano.function(inputs=[idx], outputs=p[:, 0], givens=[(x, X[idx])], name='probabilities')
    norm = theano.function([], T.sqrt(sum(T.sum(param ** 2) for param in params)), name='norm')
    weight = theano.function([x, not_used], T.sum(x, axis=0) / x.shape[0], on_unused_input='warn', name='weight')

    for epoch in range(epochs):
        order = rng.permutation(n)
        for number, start in enumerate(range(0, n, batch_size)):
            batch = order[start:start + batch_size]
            result = train(batch) if epoch == 0 else train(idx=batch, rate=0.02)
            print('epoch %d, batch %d, cost %.10g' % (epoch, number, result['cost']))
            print('epoch %d, batch %d, error rate %.10g' % (epoch, number, result['err']))
        for shared_variable in (acc, errors, count, moments):
            shared_variable.set_value(np.zeros_like(shared_variable.get_value()))
        largest.set_value(np.asarray(-1, dtype=floatX))
        for start in range(0, n, 25):
            nothing = accumulate(features[start:start + 25].astype(floatX), y=classes[start:start + 25].astype('int32'))
            assert not nothing
        print('epoch %d, samples %d' % (epoch, count.get_value()))
        print('epoch %d, mean loss %.10g' % (epoch, acc.get_value() / count.get_value()))
        print('epoch %d, error rate %.10g' % (epoch, errors.get_value() / float(count.get_value())))
        print('epoch %d, largest loss %.10g' % (epoch, largest.get_value()))
        print('epoch %d, first moment %.10g' % (epoch, moments.get_value()[0]))
        print('epoch %d, norm %.10g' % (epoch, norm()))
    total, mistakes, p_all = evaluate(features.astype(floatX), classes.astype('int32'))
    print('sum of losses %.10g' % total)
    print('mistakes %d' % mistakes)
    for row in range(3):
        print('sample %d, largest probability %.10g' % (row, p_all[row].max()))
    for number, value in enumerate(probabilities([3, 1, 4, 1, 5])):
        print('place %d, probability %.10g' % (number, value))
    for number, value in enumerate(weight(abs(features).astype(floatX), 0.)[:3]):
        print('column %d, mean magnitude %.10g' % (number, value))
    for param in params + velocities:
        print('%s, mean magnitude %.10g' % (param.name, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main()
