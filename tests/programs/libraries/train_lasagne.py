"""Lasagne: a network with convolution, pooling, batch normalisation where there is one, and dropout."""
import lasagne
import numpy as np
import theano
import theano.tensor as T
from data import classes, show
from lasagne import layers
from lasagne.nonlinearities import softmax

lasagne.random.set_rng(np.random.RandomState(1))
x, y = classes(103, 1, 8, 8)
inputs, targets = T.tensor4('inputs'), T.ivector('targets')
network = layers.Conv2DLayer(layers.InputLayer((None, 1, 8, 8), inputs), 4, 3)
if hasattr(layers, 'batch_norm'):  # from Lasagne 0.2 on
    network = layers.batch_norm(network)
network = layers.DropoutLayer(layers.MaxPool2DLayer(network, 2), p=.2)
network = layers.DenseLayer(layers.DenseLayer(network, 10), 2, nonlinearity=softmax)
parameters = layers.get_all_params(network, trainable=True)
loss = lasagne.objectives.categorical_crossentropy(layers.get_output(network), targets).mean()
train = theano.function([inputs, targets], loss, updates=lasagne.updates.nesterov_momentum(loss, parameters, .05))
predict = theano.function([inputs], layers.get_output(network, deterministic=True))
for _ in range(3):
    show('loss', [train(x[start:start + 25], y[start:start + 25]) for start in range(0, len(x), 25)])
show('probabilities', predict(x).sum(axis=0))
show('weights', [abs(each).sum() for each in layers.get_all_param_values(network)])
