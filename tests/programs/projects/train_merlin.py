"""Merlin: its networks for speech, trained as in train_DNN of src/run_merlin.py, on generated features.

PYTHONPATH has the folder src of the checkout.
"""
import random

import numpy as np
import theano
from models.deep_rnn import DeepRecurrentNetwork
from show import show, show_sums

np.random.seed(1)
random.seed(1)
r = np.random.RandomState(0)
x = r.rand(203, 12).astype('f')
y = np.tanh(x.dot(r.randn(12, 5))).astype('f')
utterances = r.rand(9, 22, 12).astype('f')  # time first, as Merlin's batches of utterances
features = np.cumsum(utterances, axis=0)[:, :, :5] * (r.rand(9, 22, 1) < .8).astype('f')


def train(x, y, batches, sizes, types, rate, **options):
    """Train a network for two rounds, whose batches are written to shared variables; predict by it."""
    network = DeepRecurrentNetwork(12, sizes, 5, 0, 1e-5, types, **options)
    shared = [theano.shared(each, name) for each, name in ((x, 'x'), (y, 'y'))]
    train_model, valid_model = network.build_finetune_functions(shared, shared)
    for _ in range(2):
        for batch in batches:
            for each, data in zip(shared, (x, y)):
                each.set_value(data[batch], borrow=True)
            show('error', train_model(rate, .9))
        for each, data in zip(shared, (x, y)):
            each.set_value(data, borrow=True)
        show('validation', valid_model())
    show_sums('weights', [each.get_value() for each in network.params])
    show_sums('predictions', [network.parameter_prediction(x[:, :7] if x.ndim == 3 else x[:50])])


frames = [slice(start, start + 50) for start in range(0, 203, 50)]
train(x, y, frames, [16, 16], ['TANH', 'RELU'], .002, dropout_rate=.2)
train(x, y, frames, [16], ['TANH'], .002, optimizer='adam')
train(utterances, features, [np.s_[:, :11], np.s_[:, 11:]], [16, 8], ['TANH', 'LSTM'], .002, rnn_batch_training=True)
train(utterances, features, [np.s_[:, :11], np.s_[:, 11:]], [8, 8], ['BLSTM', 'GRU'], .002, rnn_batch_training=True,
      optimizer='adam')
train(utterances[:, 0], features[:, 0], [np.s_[:]], [16, 8], ['TANH', 'SLSTM'], .002)
