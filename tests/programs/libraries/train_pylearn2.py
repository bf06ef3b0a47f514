"""pylearn2: a multilayer perceptron, stochastic gradient descent, a monitor, and a main loop."""
import logging

from data import classes, show
from pylearn2.datasets.dense_design_matrix import DenseDesignMatrix
from pylearn2.models.mlp import MLP, Softmax, Tanh
from pylearn2.termination_criteria import EpochCounter
from pylearn2.train import Train
from pylearn2.training_algorithms.learning_rule import Momentum
from pylearn2.training_algorithms.sgd import SGD

logging.disable(logging.CRITICAL)
x, y = classes(151, 20)
data = DenseDesignMatrix(X=x, y=y[:, None], y_labels=2)
model = MLP([Tanh(layer_name='hidden', dim=12, irange=.3), Softmax(2, 'output', irange=.3)], nvis=20, seed=1)
algorithm = SGD(.1, batch_size=25, monitoring_dataset={'train': data}, termination_criterion=EpochCounter(3),
                learning_rule=Momentum(.9))
Train(data, model, algorithm).main_loop()
show('errors', model.monitor.channels['train_output_misclass'].val_record)
show('losses', model.monitor.channels['train_objective'].val_record)
show('weights', [abs(each.get_value()).sum() for each in model.get_params()])
