"""Train a classifier with a main loop in the style of Blocks: an algorithm, monitors and extensions.

Install: Theano only. Blocks itself (0.2) is on GitHub only, and depends on Fuel, which does not build on recent
versions of Python. This script imitates the parts of Blocks that use Theano:

- inputs that are found in the graph, and matched with the sources of a data stream by name;
- functions that are called with keywords;
- batch normalisation with population statistics that the algorithm updates;
- monitors that accumulate over batches, in shared variables.

Run:

    theano-mgpu run examples/blocks_main_loop.py
"""
import argparse
import time
from collections import OrderedDict

import numpy as np
import theano
from theano import tensor
from theano.gof.graph import inputs as graph_inputs
from theano.ifelse import ifelse


def shared_floatx(value, name=None):
    return theano.shared(np.asarray(value, theano.config.floatX), name=name)


# --- Data, in place of Fuel ----------------------------------------------------------------------

class DataStream:
    """Batches of synthetic samples, as dicts from the name of a source to an array; the last batch is smaller."""

    def __init__(self, examples, batch_size, seed):
        rng = np.random.RandomState(seed)
        centers = np.random.RandomState(0).randn(4, 16)
        targets = rng.randint(0, 4, examples)
        features = centers[targets] + 2 * rng.randn(examples, 16)
        self.sources = OrderedDict([('features', features.astype(theano.config.floatX)),
                                    ('targets', targets[:, None].astype('uint8'))])
        self.examples, self.batch_size = examples, batch_size

    def get_epoch_iterator(self):
        for start in range(0, self.examples, self.batch_size):
            yield {name: values[start:start + self.batch_size] for name, values in self.sources.items()}


# --- Model, in place of bricks -------------------------------------------------------------------

class Linear:
    def __init__(self, input_dim, output_dim, rng):
        self.W = shared_floatx(rng.randn(input_dim, output_dim) / np.sqrt(input_dim), 'W')
        self.b = shared_floatx(np.zeros(output_dim), 'b')
        self.parameters = [self.W, self.b]

    def apply(self, inputs):
        return tensor.dot(inputs, self.W) + self.b


class BatchNormalization:
    """Batch normalisation: by the statistics of the batch in training, and of the population otherwise."""

    def __init__(self, dim, epsilon=1e-4):
        self.scale, self.shift = shared_floatx(np.ones(dim), 'scale'), shared_floatx(np.zeros(dim), 'shift')
        self.mean, self.stdev = shared_floatx(np.zeros(dim), 'mean'), shared_floatx(np.ones(dim), 'stdev')
        self.parameters, self.epsilon = [self.scale, self.shift], epsilon

    def apply(self, inputs, training):
        mean, stdev = self.mean, self.stdev
        if training:
            mean = inputs.mean(axis=0)
            stdev = tensor.sqrt(inputs.var(axis=0) + np.asarray(self.epsilon, inputs.dtype))
            self.population_updates = [(self.mean, mean), (self.stdev, stdev)]
        return (inputs - mean) / stdev * self.scale + self.shift


class Classifier:
    def __init__(self, dims, seed=1):
        rng = np.random.RandomState(seed)
        self.linear = [Linear(n_in, n_out, rng) for n_in, n_out in zip(dims, dims[1:])]
        self.normalizations = [BatchNormalization(dim) for dim in dims[1:-1]]
        self.parameters = [p for brick in self.linear + self.normalizations for p in brick.parameters]

    def apply(self, inputs, training):
        for linear, normalization in zip(self.linear, self.normalizations):
            inputs = tensor.nnet.relu(normalization.apply(linear.apply(inputs), training))
        return self.linear[-1].apply(inputs)


def cost_and_error(scores, targets):
    """Return the mean cross-entropy and the rate of misclassified samples."""
    labels = targets.flatten().astype('int32')
    cost = tensor.nnet.categorical_crossentropy(tensor.nnet.softmax(scores), labels).mean()
    error = tensor.neq(labels, scores.argmax(axis=1)).mean(dtype=theano.config.floatX)
    cost.name, error.name = 'cost', 'error_rate'
    return cost, error


def batch_inputs(variables):
    """Return the inputs of a graph that are neither constant nor shared: a batch has their values."""
    found = OrderedDict((v, None) for v in graph_inputs(variables)
                        if not isinstance(v, (theano.Constant, theano.compile.SharedVariable)))
    return list(found)


# --- Monitors ------------------------------------------------------------------------------------

class Mean:
    """The mean of a quantity over the samples of several batches: an accumulated numerator and denominator."""

    def __init__(self, quantity, batch_size):
        self.name = quantity.name
        numerator = quantity * batch_size.astype(theano.config.floatX)
        denominator = batch_size.astype(theano.config.floatX)
        started, total, count = shared_floatx(0), shared_floatx(0), shared_floatx(0)
        self.initialization = [(started, tensor.zeros_like(started))]
        self.accumulation = [(total, numerator + ifelse(started, total, tensor.zeros_like(total))),
                             (count, denominator + ifelse(started, count, tensor.zeros_like(count))),
                             (started, tensor.ones_like(started))]
        self.readout = total / count


class DatasetEvaluator:
    """The means of quantities over a data stream, in constant memory."""

    def __init__(self, quantities, batch_size):
        means = [Mean(quantity, batch_size) for quantity in quantities]
        self.names = [mean.name for mean in means]
        accumulation = [pair for mean in means for pair in mean.accumulation]
        self._initialize = theano.function([], [], updates=[pair for mean in means for pair in mean.initialization])
        self._accumulate = theano.function(batch_inputs([new for _, new in accumulation]), [], updates=accumulation)
        self._readout = theano.function([], [mean.readout for mean in means])

    def evaluate(self, data_stream):
        self._initialize()
        for batch in data_stream.get_epoch_iterator():
            self._accumulate(**batch)
        return OrderedDict((name, float(value)) for name, value in zip(self.names, self._readout()))


# --- Algorithm -----------------------------------------------------------------------------------

class Momentum:
    def __init__(self, learning_rate, momentum=0.9):
        self.learning_rate = shared_floatx(learning_rate, 'learning_rate')
        self.momentum = shared_floatx(momentum, 'momentum')

    def compute_steps(self, gradients):
        """Return the steps to subtract from parameters, and the updates of the step rule's own variables."""
        steps, updates = OrderedDict(), []
        for parameter, gradient in gradients.items():
            velocity = shared_floatx(parameter.get_value() * 0, 'velocity')
            steps[parameter] = self.momentum * velocity + self.learning_rate * gradient
            updates.append((velocity, steps[parameter]))
        return steps, updates


class GradientDescent:
    def __init__(self, cost, parameters, step_rule):
        gradients = OrderedDict(zip(parameters, tensor.grad(cost, parameters)))
        self.cost, (self.steps, self.updates) = cost, step_rule.compute_steps(gradients)
        self.monitored = [cost, tensor.sqrt(sum((g ** 2).sum() for g in gradients.values()))]
        self.monitored[1].name = 'gradient_norm'

    def add_updates(self, updates):
        self.updates.extend(updates)

    def initialize(self):
        updates = [(parameter, parameter - step) for parameter, step in self.steps.items()] + self.updates
        self._inputs = batch_inputs([new for _, new in updates])
        self._function = theano.function(self._inputs, self.monitored, updates=updates)

    def process_batch(self, batch):
        wanted, given = {variable.name for variable in self._inputs}, set(batch)
        if wanted != given:
            raise ValueError('the stream gives %s, the graph needs %s' % (sorted(given), sorted(wanted)))
        values = self._function(*[batch[variable.name] for variable in self._inputs])
        return OrderedDict((variable.name, float(value)) for variable, value in zip(self.monitored, values))


# --- Main loop and extensions --------------------------------------------------------------------

class Extension:
    def before_training(self, main_loop):
        pass

    def after_batch(self, main_loop):
        pass

    def after_epoch(self, main_loop):
        pass


class Timing(Extension):
    def before_training(self, main_loop):
        self.began = time.perf_counter()

    def after_epoch(self, main_loop):
        main_loop.log['seconds'], self.began = time.perf_counter() - self.began, time.perf_counter()


class TrainingDataMonitoring(Extension):
    """The means over an epoch of the values that the algorithm computes for each batch."""

    def before_training(self, main_loop):
        self.rows = []

    def after_batch(self, main_loop):
        self.rows.append(main_loop.batch_log)

    def after_epoch(self, main_loop):
        for name in self.rows[0]:
            main_loop.log['train_' + name] = np.mean([row[name] for row in self.rows])
        self.rows = []


class DataStreamMonitoring(Extension):
    def __init__(self, quantities, batch_size, data_stream, prefix):
        self.evaluator, self.data_stream = DatasetEvaluator(quantities, batch_size), data_stream
        self.prefix = prefix

    def before_training(self, main_loop):
        self.after_epoch(main_loop)

    def after_epoch(self, main_loop):
        for name, value in self.evaluator.evaluate(self.data_stream).items():
            main_loop.log['%s_%s' % (self.prefix, name)] = value


class FinishAfter(Extension):
    def __init__(self, after_n_epochs):
        self.after_n_epochs = after_n_epochs

    def after_epoch(self, main_loop):
        main_loop.finished = main_loop.epochs_done >= self.after_n_epochs


class Printing(Extension):
    def before_training(self, main_loop):
        self.after_epoch(main_loop)

    def after_epoch(self, main_loop):
        columns = ['%s %.5f' % (name, value) for name, value in main_loop.log.items() if name != 'seconds']
        print('epoch %d: %s' % (main_loop.epochs_done, ', '.join(columns)), flush=True)


class MainLoop:
    def __init__(self, algorithm, data_stream, extensions):
        self.algorithm, self.data_stream, self.extensions = algorithm, data_stream, extensions
        self.log, self.batch_log, self.epochs_done, self.finished = OrderedDict(), {}, 0, False

    def run(self):
        self.algorithm.initialize()
        self._call('before_training')
        while not self.finished:
            for batch in self.data_stream.get_epoch_iterator():
                self.batch_log = self.algorithm.process_batch(batch)
                self._call('after_batch')
            self.epochs_done += 1
            self._call('after_epoch')

    def _call(self, event):
        for extension in self.extensions:
            getattr(extension, event)(self)


def main(epochs, batch_size):
    x, y = tensor.matrix('features'), tensor.TensorType('uint8', (False, False))('targets')
    model = Classifier([16, 32, 32, 4])
    cost, error = cost_and_error(model.apply(x, training=True), y)

    algorithm = GradientDescent(cost=cost, parameters=model.parameters, step_rule=Momentum(0.05))
    rate = np.asarray(0.1, theano.config.floatX)
    algorithm.add_updates([(population, population + rate * (batch - population))
                           for normalization in model.normalizations
                           for population, batch in normalization.population_updates])

    monitored = cost_and_error(model.apply(x, training=False), y)
    MainLoop(algorithm=algorithm, data_stream=DataStream(1000, batch_size, seed=2), extensions=[
        Timing(),
        TrainingDataMonitoring(),
        DataStreamMonitoring(monitored, x.shape[0], DataStream(300, batch_size, seed=3), prefix='valid'),
        FinishAfter(after_n_epochs=epochs),
        Printing(),
    ]).run()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--epochs', type=int, default=5)
    parser.add_argument('--batch-size', type=int, default=64)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.batch_size)
