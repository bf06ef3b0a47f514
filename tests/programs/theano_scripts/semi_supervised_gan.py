"""A generator and a classifier that knows generated samples, in the manner of OpenAI's improved-gan.

usage: semi_supervised_gan.py [separate|joined]

Weight normalisation that is initialised by a batch, minibatch discrimination, feature matching, and labels that are
picked by the length of a batch, which is a number. Labelled, unlabelled and generated samples go through the classifier
one after the other, or joined.
"""
import sys

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

floatX = theano.config.floatX


def log_sum_exp(x, axis=1):
    m = T.max(x, axis=axis)
    return m + T.log(T.sum(T.exp(x - m.dimshuffle(0, 'x')), axis=axis))


class Dense(object):
    """A layer with weight normalisation, whose scale and shift are set so that a batch is normalised."""

    def __init__(self, rng, n_in, n_out, nonlinearity):
        self.W = theano.shared(np.asarray(0.3 * rng.randn(n_in, n_out), dtype=floatX), name='W')
        self.g = theano.shared(np.ones(n_out, dtype=floatX), name='g')
        self.b = theano.shared(np.zeros(n_out, dtype=floatX), name='b')
        self.params, self.nonlinearity = [self.W, self.g, self.b], nonlinearity

    def __call__(self, x, init=None):
        W = self.W * (self.g / T.sqrt(1e-6 + T.sum(T.square(self.W), axis=0))).dimshuffle('x', 0)
        out = T.dot(x, W)
        if init is not None:
            m = T.mean(out, axis=0)
            inv_stdv = 1. / T.sqrt(T.mean(T.square(out - m.dimshuffle('x', 0)), axis=0) + 1e-3)
            init += [(self.b, -m * inv_stdv), (self.g, self.g * inv_stdv)]
            return self.nonlinearity((out - m.dimshuffle('x', 0)) * inv_stdv.dimshuffle('x', 0))
        return self.nonlinearity(out + self.b.dimshuffle('x', 0))


class Minibatch(object):
    """Minibatch discrimination: how close each sample is to the other ones of the batch."""

    def __init__(self, rng, n_in, n_kernels=3, dim=2):
        self.theta = theano.shared(np.asarray(0.3 * rng.randn(n_in, n_kernels, dim), dtype=floatX), name='theta')
        self.log_scale = theano.shared(np.zeros((n_kernels, dim), dtype=floatX), name='log_scale')
        self.params = [self.theta, self.log_scale]

    def __call__(self, x):
        W = self.theta * (T.exp(self.log_scale) / T.sqrt(T.sum(T.square(self.theta), axis=0))).dimshuffle('x', 0, 1)
        activation = T.tensordot(x, W, [[1], [0]])
        distances = T.sum(abs(activation.dimshuffle(0, 1, 2, 'x') - activation.dimshuffle('x', 1, 2, 0)), axis=2) \
            + 1e6 * T.eye(x.shape[0]).dimshuffle(0, 'x', 1)
        return T.concatenate([x, T.sum(T.exp(-distances), axis=2)], axis=1)


def adam_updates(params, cost, lr, mom1=0.5, mom2=0.999):
    updates, t = [], theano.shared(np.asarray(1., dtype=floatX))
    for p, g in zip(params, T.grad(cost, params)):
        v, m = (theano.shared(np.zeros_like(p.get_value())) for _ in range(2))
        v_t, m_t = mom1 * v + (1. - mom1) * g, mom2 * m + (1. - mom2) * T.square(g)
        step = v_t / (1. - mom1 ** t) / T.sqrt(m_t / (1. - mom2 ** t) + 1e-8)
        updates += [(v, v_t), (m, m_t), (p, p - lr * step)]
    return updates + [(t, t + 1)]


def main(how='separate', batch_size=10, n_in=6, n_classes=3, n_noise=4, epochs=3, n=50):
    rng = np.random.RandomState(2)
    streams = MRG_RandomStreams(15)
    generator = [Dense(rng, n_noise, 7, T.nnet.softplus), Dense(rng, 7, n_in, T.nnet.sigmoid)]
    layers = [Dense(rng, n_in, 8, T.nnet.relu), Minibatch(rng, 8), Dense(rng, 11, n_classes, lambda z: z)]
    if how == 'joined':
        del layers[1]
        layers[1] = Dense(rng, 8, n_classes, lambda z: z)
    disc_params = sum([layer.params for layer in layers], [])
    gen_params = sum([layer.params for layer in generator], [])

    def classify(x, noise=0.3):
        x = x + noise * streams.normal(x.shape, dtype=floatX) if noise else x
        features = layers[0](x)
        for layer in layers[1:-1]:
            features = layer(features)
        return layers[-1](features), features

    x_lab, x_unl, labels, lr = T.matrix('x_lab'), T.matrix('x_unl'), T.ivector('labels'), T.scalar('lr')
    noise = streams.uniform(size=(batch_size, n_noise), dtype=floatX)
    gen_dat = generator[1](generator[0](noise))
    if how == 'joined':
        out, features = classify(T.concatenate([x_lab, x_unl, gen_dat], axis=0))
        out_lab, out_unl, out_gen = out[:batch_size], out[batch_size:2 * batch_size], out[2 * batch_size:]
        real, fake = features[batch_size:2 * batch_size], features[2 * batch_size:]
    else:
        (out_lab, _), (out_unl, real), (out_gen, fake) = classify(x_lab), classify(x_unl), classify(gen_dat)
    l_lab = out_lab[T.arange(batch_size), labels]
    l_unl, l_gen = log_sum_exp(out_unl), log_sum_exp(out_gen)
    loss_lab = -T.mean(l_lab) + T.mean(T.mean(log_sum_exp(out_lab)))
    loss_unl = -0.5 * T.mean(l_unl) + 0.5 * T.mean(T.nnet.softplus(l_unl)) + 0.5 * T.mean(T.nnet.softplus(l_gen))
    train_err = T.mean(T.neq(T.argmax(out_lab, axis=1), labels))
    loss_gen = T.mean(T.square(T.mean(fake, axis=0) - T.mean(real, axis=0)))
    test_err = T.mean(T.neq(T.argmax(classify(x_lab, 0)[0], axis=1), labels))

    init = []
    layers[-1](layers[0](x_unl, init=init), init=init) if how == 'joined' else layers[0](x_unl, init=init)
    init_param = theano.function([x_unl], None, updates=init, name='init_param')
    train_disc = theano.function([x_lab, labels, x_unl, lr], [loss_lab, loss_unl, train_err], name='train_disc',
                                 updates=adam_updates(disc_params, loss_lab + loss_unl, lr))
    inputs = [x_lab, x_unl, lr] if how == 'joined' else [x_unl, lr]
    train_gen = theano.function(inputs, loss_gen, updates=adam_updates(gen_params, loss_gen, lr), name='train_gen')
    test = theano.function([x_lab, labels], test_err, name='test_batch')
    samplefun = theano.function([], gen_dat, name='samplefun')

    Y = rng.randint(0, n_classes, n).astype('int32')
    X = np.asarray(0.5 * rng.rand(n, n_in) + 0.5 * (Y[:, None] == np.arange(n_in) % n_classes), dtype=floatX)
    init_param(X)
    for epoch in range(epochs):
        order = rng.permutation(n)
        for start in range(0, n, batch_size):
            batch, others = slice(start, start + batch_size), order[start:start + batch_size]
            losses = train_disc(X[batch], Y[batch], X[others], 0.01)
            print('epoch %d, batch %d, losses %.10g, %.10g, errors %.10g' % ((epoch, start) + tuple(losses)))
            given = [X[batch], X[others]] if how == 'joined' else [X[others]]
            print('epoch %d, batch %d, matching %.10g' % (epoch, start, train_gen(*given + [0.01])))
        print('epoch %d, test errors %.10g' % (epoch, test(X, Y)))
    print('samples, mean magnitude %.10g' % abs(samplefun()).mean())
    for param in disc_params + gen_params:
        print('%s, mean magnitude %.10g' % (param.name, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main(*sys.argv[1:])
