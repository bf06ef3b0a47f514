"""theanets: an autoencoder, a classifier with dropout, and an LSTM regressor, as in its examples, on generated data."""
import random

import numpy as np
import theanets
from show import show, show_sums

np.random.seed(1)
random.seed(1)
r = np.random.RandomState(0)
x = r.rand(203, 20).astype('f')
y = (x.sum(axis=1) > 10).astype('i')
sequences = r.randn(61, 7, 1).astype('f')


def train(network, samples, held_back, **options):
    """Train a network for four rounds, and print its losses and weights."""
    for _, (trained, valid) in zip(range(4), network.itertrain(samples, held_back, batch_size=40, rng=3, **options)):
        show('losses', [trained['loss'], valid['loss']])
    show_sums('weights', [each.get_value() for layer in network.layers for each in layer.params])
    return network


train(theanets.Autoencoder([20, 8, (8, 'relu'), 20], rng=5), x, x[:50], algo='rmsprop', input_noise=.1, weight_l2=1e-4,
      momentum=.9, learning_rate=.01)
classifier = train(theanets.Classifier([20, (12, 'relu'), 2], rng=5), [x, y], [x[:50], y[:50]], algo='adam',
                   hidden_dropout=.3, learning_rate=.01)
show('classes', [classifier.predict(x).sum(), classifier.score(x, y)])
regressor = train(theanets.recurrent.Regressor([1, {'form': 'lstm', 'size': 6}, 1], rng=5), [sequences, sequences],
                  [sequences, sequences], algo='sgd', learning_rate=.01, max_gradient_norm=1)
show('predictions', regressor.predict(sequences).sum())
