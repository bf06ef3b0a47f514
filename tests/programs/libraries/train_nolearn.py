"""nolearn on Lasagne: a network in the form of an estimator of scikit-learn, with samples held back for validation."""
import lasagne
import numpy as np
from data import classes, show
from lasagne.layers import Conv2DLayer, DenseLayer, DropoutLayer, InputLayer, MaxPool2DLayer
from lasagne.nonlinearities import softmax
from nolearn.lasagne import BatchIterator, NeuralNet, TrainSplit

lasagne.random.set_rng(np.random.RandomState(1))
x, y = classes(153, 1, 8, 8)
network = NeuralNet(
    layers=[(InputLayer, {'shape': (None, 1, 8, 8)}), (Conv2DLayer, {'num_filters': 4, 'filter_size': 3}),
            (MaxPool2DLayer, {'pool_size': 2}), (DenseLayer, {'num_units': 10}), (DropoutLayer, {}),
            (DenseLayer, {'num_units': 2, 'nonlinearity': softmax})],
    update=lasagne.updates.nesterov_momentum, update_learning_rate=.05, update_momentum=.9, max_epochs=3,
    batch_iterator_train=BatchIterator(batch_size=25), train_split=TrainSplit(eval_size=.2))
network.fit(x, y)
for epoch in network.train_history_:
    show('losses', [epoch['train_loss'], epoch['valid_loss']])
show('probabilities', network.predict_proba(x).sum(axis=0))
print('classes', network.predict(x).sum())
show('weights', [abs(each.get_value()).sum() for each in lasagne.layers.get_all_params(network.layers_.values())])
