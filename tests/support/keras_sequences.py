"""Layers in the style of keras-multi-head, keras-transformer, bojone/attention and keras-contrib's CRF."""
import numpy as np
import theano
import theano.tensor as T
from keras import backend as K
from keras import layers as L
from keras.engine import Layer
from keras.models import Model


class Heads(Layer):
    """A layer of attention with several heads, which are merged into the axis of the samples."""

    def __init__(self, heads, merge='shape', causal=False, **options):
        super().__init__(**options)
        self.supports_masking, self.heads, self.merge, self.causal = True, heads, merge, causal

    def build(self, shape):
        self.width = shape[-1] // self.heads
        self.kernels = [self.add_weight(name='w%d' % i, shape=(shape[-1], shape[-1]), initializer='glorot_normal')
                        for i in range(4)]
        super().build(shape)

    def compute_mask(self, inputs, mask=None):
        return mask

    def call(self, x, mask=None):
        query, key, value = [getattr(self, 'split_by_' + self.merge)(K.dot(x, kernel)) for kernel in self.kernels[:3]]
        scores = K.batch_dot(query, key, axes=2) / K.sqrt(K.cast(K.shape(query)[-1], K.floatx()))
        scores = K.exp(scores - K.max(scores, axis=-1, keepdims=True))
        if self.causal:
            places = K.arange(K.shape(x)[1])
            scores *= K.expand_dims(K.cast(K.expand_dims(places, 0) <= K.expand_dims(places, 1), K.floatx()), 0)
        if mask is not None:
            scores *= K.expand_dims(K.cast(getattr(self, 'mask_by_' + self.merge)(mask), K.floatx()), 1)
        values = K.batch_dot(scores / (K.sum(scores, axis=-1, keepdims=True) + K.epsilon()), value)
        return K.dot(getattr(self, 'joined_by_' + self.merge)(values, x), self.kernels[3])

    # Like keras-multi-head:

    def split_by_shape(self, x):
        n, steps, width = [K.shape(x)[i] for i in range(3)]
        x = K.permute_dimensions(K.reshape(x, (n, steps, self.heads, width // self.heads)), [0, 2, 1, 3])
        return K.reshape(x, (n * self.heads, steps, width // self.heads))

    def mask_by_shape(self, mask):
        steps = K.shape(mask)[1]
        return K.reshape(K.tile(K.expand_dims(mask, 1), [1, self.heads, 1]), (-1, steps))

    def joined_by_shape(self, y, x):
        n, steps, width = [K.shape(y)[i] for i in range(3)]
        y = K.permute_dimensions(K.reshape(y, (n // self.heads, self.heads, steps, width)), [0, 2, 1, 3])
        return K.reshape(y, (n // self.heads, steps, width * self.heads))

    # Like keras-transformer:

    def split_by_minus_one(self, x):
        steps, width = K.shape(x)[1], K.shape(x)[2]
        x = K.permute_dimensions(K.reshape(x, (-1, steps, self.heads, width // self.heads)), [0, 2, 1, 3])
        return K.reshape(x, (-1, steps, width // self.heads))

    def mask_by_minus_one(self, mask):
        return K.repeat_elements(mask, self.heads, 0)

    def joined_by_minus_one(self, y, x):
        y = K.reshape(y, (-1, self.heads, K.shape(y)[1], K.shape(y)[2]))
        return K.reshape(K.permute_dimensions(y, [0, 2, 1, 3]), (-1, K.shape(x)[1], K.shape(x)[2]))

    # Joined along the axis of the samples, as in many a translation of "Attention is all you need".

    def split_by_join(self, x):
        return K.concatenate([x[:, :, i * self.width:(i + 1) * self.width] for i in range(self.heads)], axis=0)

    def mask_by_join(self, mask):
        return K.tile(mask, [self.heads, 1])

    def joined_by_join(self, y, x):
        n = K.shape(x)[0]
        return K.concatenate([y[i * n:(i + 1) * n] for i in range(self.heads)], axis=2)


class MaskedMean(Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return None

    def compute_output_shape(self, shape):
        return shape[0], shape[2]

    def call(self, x, mask=None):
        mask = K.expand_dims(K.cast(mask, K.floatx()))
        return K.sum(x * mask, axis=1) / (K.sum(mask, axis=1) + K.epsilon())


def transformer():
    """Return a model with two layers of attention over words, with padding."""
    words = L.Input((5,))
    x = L.Embedding(7, 4, mask_zero=True)(words)
    x = L.add([x, Heads(2, causal=True)(x)])
    x = Heads(2, 'join')(Heads(4, 'minus_one')(x))
    return Model(words, L.Dense(3, activation='softmax')(MaskedMean()(x)))


class Chain(Layer):
    """A chain of tags with the energies of each tag and each pair, like keras-contrib's CRF."""

    def __init__(self, tags, **options):
        super().__init__(**options)
        self.supports_masking, self.tags = True, tags

    def build(self, shape):
        self.kernel = self.add_weight(name='kernel', shape=(shape[-1], self.tags), initializer='glorot_normal')
        self.pairs = self.add_weight(name='pairs', shape=(self.tags, self.tags), initializer='glorot_normal')
        super().build(shape)

    def compute_mask(self, inputs, mask=None):
        return None if mask is None else K.any(mask, axis=1)

    def compute_output_shape(self, shape):
        return shape[:2] + (self.tags,)

    def call(self, x, mask=None):
        self.x, self.mask = x, mask
        return K.in_train_phase(self.best_path(x, mask), self.best_path(x, mask))

    def loss(self, true, found):
        energies = K.sum(K.dot(self.x, self.kernel) * true, 2)
        pairs = K.sum(K.dot(true[:, :-1], self.pairs) * true[:, 1:], 2)
        if self.mask is not None:
            mask = K.cast(self.mask, K.floatx())
            energies, pairs = energies * mask, pairs * mask[:, :-1] * mask[:, 1:]
        total = self.recursion(K.dot(self.x, self.kernel), self.mask)[0]
        return K.sum(energies, -1) + K.sum(pairs, -1) + total[:, 0]

    def recursion(self, energies, mask, sums=True):
        first = K.zeros_like(energies[:, 0, :])
        constants = [K.expand_dims(self.pairs, 0)]
        if mask is not None:
            constants.append(K.cast(K.concatenate([mask, K.zeros_like(mask[:, :1])], axis=1), K.floatx()))

        def step(energy, states):
            before, counter, pairs = states[:3]
            if len(states) > 3:
                place = K.cast(counter[0, 0], 'int32')
                here = states[3][:, place:place + 2]
                energy = energy * K.expand_dims(here[:, 0])
                pairs = pairs * K.expand_dims(K.expand_dims(here[:, 0] * here[:, 1]))
            both = pairs + K.expand_dims(energy - before if sums else energy + before, 2)
            if sums:
                new = K.logsumexp(-both, 1)
                return new, [new, counter + 1]
            return K.cast(K.argmin(both, 1), K.floatx()), [K.min(both, 1), counter + 1]
        return K.rnn(step, energies, [first, K.zeros_like(first[:, :1])], constants=constants)

    def best_path(self, x, mask):
        table = K.reverse(K.cast(self.recursion(K.dot(x, self.kernel), mask, sums=False)[1], 'int32'), 1)
        last = T.unbroadcast(K.expand_dims(table[:, 0, 0]), 1)

        def step(table, states):
            best = table[T.arange(K.shape(table)[0]), states[0][:, 0]]
            best = T.unbroadcast(K.expand_dims(best), 1)
            return best, [best]
        path = K.reverse(K.rnn(step, table, [last])[1], 1)
        return K.one_hot(K.squeeze(path, 2), self.tags)


def tagger(masked):
    words = L.Input((5,))
    chain = Chain(3)
    model = Model(words, chain(L.Embedding(7, 4, mask_zero=masked)(words)))
    model.chain_loss = chain.loss
    return model


def mapped():
    """Return a model with a layer that maps a function over samples, and one whose loop maps each sample."""
    x = L.Input((5, 4))
    y = L.Lambda(lambda x: K.map_fn(lambda a: K.dot(a, K.transpose(a)), x), output_shape=(5, 5))(L.Dense(3)(x))
    y = L.Lambda(lambda x: theano.map(lambda a: T.sort(a, axis=0) - a.mean(), x)[0], output_shape=(5, 5))(y)
    return Model(x, L.Dense(3, activation='softmax')(L.Flatten()(y)))


def speech():
    """Return a model with CTC, over labels of different lengths."""
    x, labels = L.Input((9, 4)), L.Input((3,), dtype='int32')
    lengths = [L.Input((1,), dtype='int32') for _ in range(2)]
    y = L.Dense(4, activation='softmax')(x)
    cost = L.Lambda(lambda given: K.ctc_batch_cost(*given), output_shape=(1,))([labels, y] + lengths)
    return Model([x, labels] + lengths, cost)


def speech_data(n):
    rng = np.random.RandomState(0)
    return [[rng.randn(n, 9, 4), rng.randint(0, 3, (n, 3)).astype('int32'),
             rng.randint(7, 10, (n, 1)).astype('int32'), rng.randint(1, 4, (n, 1)).astype('int32')],
            [np.zeros((n, 1))]]
