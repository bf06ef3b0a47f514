"""Blocks and Fuel: bricks, an algorithm, a data stream, monitors, and a main loop."""
import numpy as np
from blocks.algorithms import GradientDescent, Momentum
from blocks.bricks import MLP, Rectifier, Softmax
from blocks.bricks.cost import CategoricalCrossEntropy, MisclassificationRate
from blocks.extensions import FinishAfter
from blocks.extensions.monitoring import DataStreamMonitoring, TrainingDataMonitoring
from blocks.filter import VariableFilter
from blocks.graph import ComputationGraph, apply_dropout
from blocks.initialization import Constant, IsotropicGaussian
from blocks.main_loop import MainLoop
from blocks.model import Model
from blocks.roles import INPUT
from data import classes, show
from fuel.datasets import IndexableDataset
from fuel.schemes import SequentialScheme, ShuffledScheme
from fuel.streams import DataStream
from theano import tensor

x, y = classes(151, 20)
features, targets = tensor.matrix('features'), tensor.lmatrix('targets')
mlp = MLP([Rectifier(), Softmax()], [20, 12, 2], weights_init=IsotropicGaussian(.3), biases_init=Constant(0), seed=1)
mlp.initialize()
probabilities = mlp.apply(features)
cost = CategoricalCrossEntropy().apply(targets.flatten(), probabilities)
cost.name = 'cost'
errors = MisclassificationRate().apply(targets.flatten(), probabilities)
errors.name = 'errors'
graph = ComputationGraph(cost)
hidden = VariableFilter(roles=[INPUT], bricks=[mlp.linear_transformations[1]])(graph)
graph = apply_dropout(graph, hidden, .1, seed=2)
data = IndexableDataset({'features': x, 'targets': y.astype('int64')[:, None]})
algorithm = GradientDescent(cost=graph.outputs[0], parameters=graph.parameters, step_rule=Momentum(.1, .9))
loop = MainLoop(
    algorithm, DataStream(data, iteration_scheme=ShuffledScheme(151, 25, rng=np.random.RandomState(3))),
    model=Model(graph.outputs[0]), extensions=[
        FinishAfter(after_n_epochs=3), TrainingDataMonitoring([cost], prefix='train', after_epoch=True),
        DataStreamMonitoring([cost, errors], DataStream(data, iteration_scheme=SequentialScheme(151, 40)))])
loop.run()
for step, row in sorted(loop.log.items()):
    for name in sorted(row):
        if name in ('cost', 'errors', 'train_cost'):
            show('%s of step %s' % (name, step), row[name])
show('weights', [abs(each).sum() for _, each in sorted(loop.model.get_parameter_values().items())])
