"""Sentiment of sentences by an LSTM, in the manner of the LSTM tutorial of the Deep Learning Tutorials.

usage: lstm.py [adadelta|rmsprop|sgd]

Sentences are columns of an array of words, padded to the longest one of the minibatch, beside a mask.
"""
import sys
from collections import OrderedDict

import numpy
import theano
import theano.tensor as tensor
from theano import config
from theano.sandbox.rng_mrg import MRG_RandomStreams as RandomStreams

SEED = 123


def numpy_floatX(data):
    return numpy.asarray(data, dtype=config.floatX)


def load_data(rng, n, n_words=30):
    """Make sentences of 3 to 11 words; the label says whether words of the upper half prevail."""
    x, y = [], []
    for _ in range(n):
        label = rng.randint(2)
        length = rng.randint(3, 12)
        upper = rng.uniform(size=length) < (0.75 if label else 0.25)
        words = 1 + rng.randint(0, (n_words - 1) // 2, length) + upper * ((n_words - 1) // 2)
        x.append([int(word) for word in words])
        y.append(int(label))
    return x, y


def prepare_data(seqs, labels):
    """Pad sentences to a matrix of shape (maxlen, n_samples), with a mask."""
    lengths = [len(s) for s in seqs]
    n_samples = len(seqs)
    maxlen = numpy.max(lengths)
    x = numpy.zeros((maxlen, n_samples)).astype('int64')
    x_mask = numpy.zeros((maxlen, n_samples)).astype(theano.config.floatX)
    for idx, s in enumerate(seqs):
        x[:lengths[idx], idx] = s
        x_mask[:lengths[idx], idx] = 1.
    return x, x_mask, numpy.asarray(labels, dtype='int64')


def get_minibatches_idx(rng, n, minibatch_size, shuffle=False):
    """Return numbers of the samples of each minibatch; the last one takes the rest."""
    idx_list = numpy.arange(n, dtype='int32')
    if shuffle:
        rng.shuffle(idx_list)
    minibatches = []
    minibatch_start = 0
    for _ in range(n // minibatch_size):
        minibatches.append(idx_list[minibatch_start:minibatch_start + minibatch_size])
        minibatch_start += minibatch_size
    if minibatch_start != n:
        minibatches.append(idx_list[minibatch_start:])
    return zip(range(len(minibatches)), minibatches)


def ortho_weight(rng, ndim):
    u, s, v = numpy.linalg.svd(rng.randn(ndim, ndim))
    return u.astype(config.floatX)


def init_params(options, rng):
    params = OrderedDict()
    params['Wemb'] = (0.5 * rng.randn(options['n_words'], options['dim_proj'])).astype(config.floatX)
    params['lstm_W'] = numpy.concatenate([ortho_weight(rng, options['dim_proj']) for _ in range(4)], axis=1)
    params['lstm_U'] = numpy.concatenate([ortho_weight(rng, options['dim_proj']) for _ in range(4)], axis=1)
    params['lstm_b'] = numpy.zeros((4 * options['dim_proj'],)).astype(config.floatX)
    params['U'] = 0.5 * rng.randn(options['dim_proj'], options['ydim']).astype(config.floatX)
    params['b'] = numpy.zeros((options['ydim'],)).astype(config.floatX)
    return params


def init_tparams(params):
    tparams = OrderedDict()
    for kk in params:
        tparams[kk] = theano.shared(numpy_floatX(params[kk]), name=kk)
    return tparams


def unzip(zipped):
    new_params = OrderedDict()
    for kk, vv in zipped.items():
        new_params[kk] = vv.get_value()
    return new_params


def dropout_layer(state_before, use_noise, trng):
    return tensor.switch(use_noise,
                         (state_before * trng.binomial(state_before.shape, p=0.5, n=1, dtype=state_before.dtype)),
                         state_before * 0.5)


def lstm_layer(tparams, state_below, options, prefix='lstm', mask=None):
    nsteps = state_below.shape[0]
    if state_below.ndim == 3:
        n_samples = state_below.shape[1]
    else:
        n_samples = 1
    assert mask is not None

    def _slice(_x, n, dim):
        if _x.ndim == 3:
            return _x[:, :, n * dim:(n + 1) * dim]
        return _x[:, n * dim:(n + 1) * dim]

    def _step(m_, x_, h_, c_):
        preact = tensor.dot(h_, tparams[prefix + '_U'])
        preact += x_
        i = tensor.nnet.sigmoid(_slice(preact, 0, options['dim_proj']))
        f = tensor.nnet.sigmoid(_slice(preact, 1, options['dim_proj']))
        o = tensor.nnet.sigmoid(_slice(preact, 2, options['dim_proj']))
        c = tensor.tanh(_slice(preact, 3, options['dim_proj']))
        c = f * c_ + i * c
        c = m_[:, None] * c + (1. - m_)[:, None] * c_
        h = o * tensor.tanh(c)
        h = m_[:, None] * h + (1. - m_)[:, None] * h_
        return h, c

    state_below = (tensor.dot(state_below, tparams[prefix + '_W']) + tparams[prefix + '_b'])
    dim_proj = options['dim_proj']
    rval, updates = theano.scan(_step,
                                sequences=[mask, state_below],
                                outputs_info=[tensor.alloc(numpy_floatX(0.), n_samples, dim_proj),
                                              tensor.alloc(numpy_floatX(0.), n_samples, dim_proj)],
                                name=prefix + '_layers',
                                n_steps=nsteps)
    return rval[0]


def sgd(lr, tparams, grads, x, mask, y, cost):
    gshared = [theano.shared(p.get_value() * 0., name='%s_grad' % k) for k, p in tparams.items()]
    gsup = [(gs, g) for gs, g in zip(gshared, grads)]
    f_grad_shared = theano.function([x, mask, y], cost, updates=gsup, name='sgd_f_grad_shared')
    pup = [(p, p - lr * g) for p, g in zip(tparams.values(), gshared)]
    f_update = theano.function([lr], [], updates=pup, name='sgd_f_update')
    return f_grad_shared, f_update


def adadelta(lr, tparams, grads, x, mask, y, cost):
    zipped_grads = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_grad' % k) for k, p in tparams.items()]
    running_up2 = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_rup2' % k) for k, p in tparams.items()]
    running_grads2 = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_rgrad2' % k)
                      for k, p in tparams.items()]
    zgup = [(zg, g) for zg, g in zip(zipped_grads, grads)]
    rg2up = [(rg2, 0.95 * rg2 + 0.05 * (g ** 2)) for rg2, g in zip(running_grads2, grads)]
    f_grad_shared = theano.function([x, mask, y], cost, updates=zgup + rg2up, name='adadelta_f_grad_shared')
    updir = [-tensor.sqrt(ru2 + 1e-6) / tensor.sqrt(rg2 + 1e-6) * zg
             for zg, ru2, rg2 in zip(zipped_grads, running_up2, running_grads2)]
    ru2up = [(ru2, 0.95 * ru2 + 0.05 * (ud ** 2)) for ru2, ud in zip(running_up2, updir)]
    param_up = [(p, p + ud) for p, ud in zip(tparams.values(), updir)]
    f_update = theano.function([lr], [], updates=ru2up + param_up, on_unused_input='ignore',
                               name='adadelta_f_update')
    return f_grad_shared, f_update


def rmsprop(lr, tparams, grads, x, mask, y, cost):
    zipped_grads = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_grad' % k) for k, p in tparams.items()]
    running_grads = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_rgrad' % k) for k, p in tparams.items()]
    running_grads2 = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_rgrad2' % k)
                      for k, p in tparams.items()]
    zgup = [(zg, g) for zg, g in zip(zipped_grads, grads)]
    rgup = [(rg, 0.95 * rg + 0.05 * g) for rg, g in zip(running_grads, grads)]
    rg2up = [(rg2, 0.95 * rg2 + 0.05 * (g ** 2)) for rg2, g in zip(running_grads2, grads)]
    f_grad_shared = theano.function([x, mask, y], cost, updates=zgup + rgup + rg2up, name='rmsprop_f_grad_shared')
    updir = [theano.shared(p.get_value() * numpy_floatX(0.), name='%s_updir' % k) for k, p in tparams.items()]
    updir_new = [(ud, 0.9 * ud - lr * zg / tensor.sqrt(rg2 - rg ** 2 + 1e-4))
                 for ud, zg, rg, rg2 in zip(updir, zipped_grads, running_grads, running_grads2)]
    param_up = [(p, p + udn[1]) for p, udn in zip(tparams.values(), updir_new)]
    f_update = theano.function([lr], [], updates=updir_new + param_up, on_unused_input='ignore',
                               name='rmsprop_f_update')
    return f_grad_shared, f_update


def build_model(tparams, options):
    trng = RandomStreams(SEED)
    use_noise = theano.shared(numpy_floatX(0.))
    x = tensor.matrix('x', dtype='int64')
    mask = tensor.matrix('mask', dtype=config.floatX)
    y = tensor.vector('y', dtype='int64')
    n_timesteps = x.shape[0]
    n_samples = x.shape[1]
    emb = tparams['Wemb'][x.flatten()].reshape([n_timesteps, n_samples, options['dim_proj']])
    proj = lstm_layer(tparams, emb, options, prefix='lstm', mask=mask)
    proj = (proj * mask[:, :, None]).sum(axis=0)
    proj = proj / mask.sum(axis=0)[:, None]
    if options['use_dropout']:
        proj = dropout_layer(proj, use_noise, trng)
    pred = tensor.nnet.softmax(tensor.dot(proj, tparams['U']) + tparams['b'])
    f_pred_prob = theano.function([x, mask], pred, name='f_pred_prob')
    f_pred = theano.function([x, mask], pred.argmax(axis=1), name='f_pred')
    off = 1e-8
    if pred.dtype == 'float16':
        off = 1e-6
    cost = -tensor.log(pred[tensor.arange(n_samples), y] + off).mean()
    return use_noise, x, mask, y, f_pred_prob, f_pred, cost


def pred_error(f_pred, data, iterator):
    valid_err = 0
    for _, valid_index in iterator:
        x, mask, y = prepare_data([data[0][t] for t in valid_index], numpy.array(data[1])[valid_index])
        preds = f_pred(x, mask)
        valid_err += (preds == y).sum()
    return 1. - numpy_floatX(valid_err) / len(data[0])


def train_lstm(optimizer, dim_proj=8, n_words=30, max_epochs=5, decay_c=0.001, lrate=0.02, batch_size=16,
               use_dropout=True, n_train=90, n_test=40):
    options = {'dim_proj': dim_proj, 'n_words': n_words, 'ydim': 2, 'use_dropout': use_dropout}
    rng = numpy.random.RandomState(SEED)
    train, test = load_data(rng, n_train, n_words), load_data(rng, n_test, n_words)
    tparams = init_tparams(init_params(options, rng))
    use_noise, x, mask, y, f_pred_prob, f_pred, cost = build_model(tparams, options)
    if decay_c > 0.:
        decay_c = theano.shared(numpy_floatX(decay_c), name='decay_c')
        weight_decay = 0.
        weight_decay += (tparams['U'] ** 2).sum()
        weight_decay *= decay_c
        cost += weight_decay
    f_cost = theano.function([x, mask, y], cost, name='f_cost')
    grads = tensor.grad(cost, wrt=list(tparams.values()))
    lr = tensor.scalar(name='lr')
    f_grad_shared, f_update = optimizer(lr, tparams, grads, x, mask, y, cost)

    kf_test = list(get_minibatches_idx(rng, n_test, batch_size))
    for eidx in range(max_epochs):
        kf = get_minibatches_idx(rng, n_train, batch_size, shuffle=True)
        for uidx, train_index in kf:
            use_noise.set_value(numpy_floatX(1.))
            labels = [train[1][t] for t in train_index]
            x, mask, labels = prepare_data([train[0][t] for t in train_index], labels)
            cost = f_grad_shared(x, mask, labels)
            f_update(lrate)
            if numpy.isnan(cost) or numpy.isinf(cost):
                print('bad cost detected: ', cost)
                return
            print('epoch %d, update %d, cost %.10g' % (eidx, uidx, cost))
        use_noise.set_value(numpy_floatX(0.))
        print('epoch %d, cost without noise %.10g' % (eidx, f_cost(x, mask, labels)))
        print('epoch %d, test error %.10g' % (eidx, pred_error(f_pred, test, kf_test)))
    x, mask, labels = prepare_data(*test)
    for number, probability in enumerate(f_pred_prob(x, mask)[:5, 1]):
        print('sentence %d, probability %.10g' % (number, probability))
    for name, value in unzip(tparams).items():
        print('%s, mean magnitude %.10g' % (name, abs(value).mean()))


if __name__ == '__main__':
    train_lstm({'adadelta': adadelta, 'rmsprop': rmsprop, 'sgd': sgd}[(sys.argv[1:] or ['adadelta'])[0]])
