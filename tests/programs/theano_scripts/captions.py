"""Captions of images, in the manner of arctic-captions: an LSTM that attends to places of an image.

Captions are columns of an array of words, beside a mask. The probability of each word is picked from all of them, as
one vector.
"""
from collections import OrderedDict

import numpy
import theano
import theano.tensor as tensor

floatX = theano.config.floatX


def init_params(rng, n_words, dim_word, dim, ctx_dim):
    shapes = OrderedDict([
        ('Wemb', (n_words, dim_word)), ('init_state_W', (ctx_dim, dim)), ('init_memory_W', (ctx_dim, dim)),
        ('lstm_W', (dim_word, 4 * dim)), ('lstm_U', (dim, 4 * dim)), ('lstm_b', (4 * dim,)),
        ('lstm_Wc', (ctx_dim, 4 * dim)), ('att_Wc', (ctx_dim, ctx_dim)), ('att_Wd', (dim, ctx_dim)),
        ('att_b', (ctx_dim,)), ('att_U', (ctx_dim, 1)), ('sel_W', (dim, 1)), ('logit_lstm_W', (dim, dim_word)),
        ('logit_ctx_W', (ctx_dim, dim_word)), ('logit_W', (dim_word, n_words)), ('logit_b', (n_words,))])
    return OrderedDict((name, theano.shared(numpy.asarray(0.2 * rng.randn(*shape), dtype=floatX), name=name))
                       for name, shape in shapes.items())


def slice_of(values, n, dim):
    return values[:, n * dim:(n + 1) * dim]


def lstm_cond_layer(tparams, state_below, context, mask, dim):
    """Return the states of an LSTM that is given a weighted mean of the places of the image in each step."""
    nsteps = state_below.shape[0]
    ctx_mean = context.mean(1)
    init_state = tensor.tanh(tensor.dot(ctx_mean, tparams['init_state_W']))
    init_memory = tensor.tanh(tensor.dot(ctx_mean, tparams['init_memory_W']))
    pctx = tensor.dot(context, tparams['att_Wc']) + tparams['att_b']
    below = tensor.dot(state_below, tparams['lstm_W']) + tparams['lstm_b']

    def step(m, x, h, c, attended, weights, pctx, context):
        pstate = tensor.dot(h, tparams['att_Wd'])
        places = tensor.tanh(pctx + pstate[:, None, :])
        alpha = tensor.dot(places, tparams['att_U'])
        alpha = tensor.nnet.softmax(alpha.reshape([alpha.shape[0], alpha.shape[1]]))
        seen = (context * alpha[:, :, None]).sum(1)
        sel = tensor.nnet.sigmoid(tensor.dot(h, tparams['sel_W']))
        seen = sel.reshape([sel.shape[0]])[:, None] * seen
        preact = tensor.dot(h, tparams['lstm_U']) + x + tensor.dot(seen, tparams['lstm_Wc'])
        i, f, o = [tensor.nnet.sigmoid(slice_of(preact, n, dim)) for n in range(3)]
        new_c = f * c + i * tensor.tanh(slice_of(preact, 3, dim))
        new_c = m[:, None] * new_c + (1. - m)[:, None] * c
        new_h = m[:, None] * (o * tensor.tanh(new_c)) + (1. - m)[:, None] * h
        return new_h, new_c, seen, alpha
    (h, _, seen, alphas), _ = theano.scan(
        step, sequences=[mask, below], outputs_info=[
            init_state, init_memory, tensor.alloc(numpy.asarray(0., floatX), below.shape[1], context.shape[2]),
            tensor.alloc(numpy.asarray(0., floatX), below.shape[1], context.shape[1])],
        non_sequences=[pctx, context], n_steps=nsteps, profile=False)
    return h, seen, alphas


def build_model(tparams, dim, dim_word, alpha_c=0.7):
    x, mask, ctx = tensor.matrix('x', dtype='int64'), tensor.matrix('mask'), tensor.tensor3('ctx')
    n_timesteps, n_samples = x.shape[0], x.shape[1]
    emb = tparams['Wemb'][x.flatten()].reshape([n_timesteps, n_samples, dim_word])
    emb_shifted = tensor.zeros_like(emb)
    emb_shifted = tensor.set_subtensor(emb_shifted[1:], emb[:-1])
    proj_h, seen, alphas = lstm_cond_layer(tparams, emb_shifted, ctx, mask, dim)
    logit = tensor.tanh(emb_shifted + tensor.dot(proj_h, tparams['logit_lstm_W'])
                        + tensor.dot(seen, tparams['logit_ctx_W']))
    logit = tensor.dot(logit, tparams['logit_W']) + tparams['logit_b']
    logit_shp = logit.shape
    probs = tensor.nnet.softmax(logit.reshape([logit_shp[0] * logit_shp[1], logit_shp[2]]))
    x_flat = x.flatten()
    p_flat = probs.flatten()
    cost = -tensor.log(p_flat[tensor.arange(x_flat.shape[0]) * probs.shape[1] + x_flat] + 1e-8)
    cost = cost.reshape([x.shape[0], x.shape[1]])
    masked_cost = cost * mask
    cost = (masked_cost).sum(0)
    total = cost.mean() + alpha_c * ((1. - alphas.sum(0)) ** 2).sum(0).mean()
    return [x, mask, ctx], probs, cost, total


def prepare_data(rng, n_samples, n_words, n_places, ctx_dim):
    """Make captions whose words follow the brightest feature of their image, ended by word 0."""
    images = rng.rand(n_samples, n_places, ctx_dim)
    lengths = rng.randint(2, 5, n_samples)
    x, mask = numpy.zeros((lengths.max() + 1, n_samples), 'int64'), numpy.zeros((lengths.max() + 1, n_samples))
    for i, length in enumerate(lengths):
        first = images[i].mean(0).argmax()
        x[:length, i] = 1 + (first + numpy.arange(length)) % (n_words - 1)
        mask[:length + 1, i] = 1
    return x, mask.astype(floatX), images.astype(floatX)


def main(dim=5, dim_word=4, ctx_dim=3, n_places=4, n_words=7, lrate=0.1):
    rng = numpy.random.RandomState(1)
    tparams = init_params(rng, n_words, dim_word, dim, ctx_dim)
    inps, probs, cost, total = build_model(tparams, dim, dim_word)
    f_log_probs = theano.function(inps, -cost, name='f_log_probs', allow_input_downcast=True)
    f_probs = theano.function(inps, probs, name='f_probs', allow_input_downcast=True)
    grads = tensor.grad(total, list(tparams.values()))
    norm = sum((g ** 2).sum() for g in grads)
    grads = [tensor.switch(norm > 4., g / tensor.sqrt(norm) * 2., g) for g in grads]

    # RMSProp, in two functions.
    zipped = [theano.shared(p.get_value() * numpy.asarray(0., floatX)) for p in tparams.values()]
    running = [theano.shared(p.get_value() * numpy.asarray(0., floatX)) for p in tparams.values()]
    lr = tensor.scalar(name='lr')
    f_grad_shared = theano.function(
        inps, total, updates=list(zip(zipped, grads))
        + [(r, 0.95 * r + 0.05 * g ** 2) for r, g in zip(running, grads)], name='rmsprop_f_grad_shared',
        allow_input_downcast=True)
    f_update = theano.function([lr], [], updates=[
        (p, p - lr * g / tensor.sqrt(r + 1e-4)) for p, g, r in zip(tparams.values(), zipped, running)],
        name='rmsprop_f_update', allow_input_downcast=True)
    for update, n_samples in enumerate([9, 8, 5, 9, 7]):
        batch = prepare_data(rng, n_samples, n_words, n_places, ctx_dim)
        print('update %d, cost %.10g' % (update, f_grad_shared(*batch)))
        f_update(lrate)
    for number, value in enumerate(f_log_probs(*batch)):
        print('caption %d, log probability %.10g' % (number, value))
    print('mean magnitude of probabilities %.10g' % abs(f_probs(*batch) - 0.1).mean())
    for name, param in tparams.items():
        print('%s, mean magnitude %.10g' % (name, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main()
