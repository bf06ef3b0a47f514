"""An interpreter that runs a program shard by shard with plain Theano, and a model that needs several stages."""
import copy

import theano_mgpu as mgpu
from theano_mgpu.graph.analysis import SAME, Gather

import numpy as np
import theano
import theano.tensor as T
from theano.gof.graph import ancestors
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet.bn import batch_normalization_train


def combined(parts, reduction):
    if isinstance(parts[0], np.random.RandomState):
        return parts[0]
    if reduction == SAME:
        for part in parts[1:]:
            np.testing.assert_allclose(part, parts[0], rtol=1e-9, atol=1e-12)
        return parts[0]
    if isinstance(reduction, Gather):
        return np.concatenate(parts, reduction.axis)
    return np.asarray(reduction.ufunc.reduce(parts), parts[0].dtype)


def n_stages(program):
    """Return the number of stages; a computation after the last exchange counts as one."""
    last = {exchange.variable for exchange in program.exchanges}
    made = [output.variable for output in program.outputs if output.reduction is None and output.variable not in last]
    return max(1, len(program.stages) + bool(last.intersection(ancestors(made))))


def given(stage):
    """Return the variables that a stage needs from earlier ones."""
    return [exchange.variable for exchange in stage.exchanges] + list(stage.saved)


def run(program, shards, mode=None):
    """Return the outputs of a program on shards, lists of arrays; shared variables stay as they are."""
    return compiled(program, mode)(shards)


def compiled(program, mode=None):
    """Return a function of shards that runs a program."""
    functions = [theano.function(program.inputs + program.numbers + given(stage), stage.outputs, mode=mode,
                                 on_unused_input='ignore', no_default_updates=True) for stage in program.stages]
    exchanges = sum([stage.exchanges for stage in program.stages], []) + program.exchanges
    together = theano.function([exchange.variable for exchange in exchanges] + program.numbers[:1],
                               [output.variable for output in program.outputs if output.reduction is None], mode=mode,
                               on_unused_input='ignore', no_default_updates=True)
    return lambda shards: _run(program, functions, exchanges, together, shards)


def _run(program, functions, exchanges, together, shards):
    lengths = [len(shard[0]) for shard in shards]
    firsts = np.cumsum([0] + lengths)
    known = [{} for _ in shards]

    def exchange(exchanges):
        for variable, source, reduction in exchanges:
            value = combined([env[source] for env in known], reduction)
            for env in known:
                env[variable] = value
    for stage, function in zip(program.stages, functions):
        exchange(stage.exchanges)
        for place, source in stage.saved.items():
            for env in known:
                env[place] = env[source]
        for shard, length, first, env in zip(shards, lengths, firsts, known):
            results = function(*shard, sum(lengths), length, first, *[env[variable] for variable in given(stage)])
            env.update((variable, copy.deepcopy(result)) for variable, result in zip(stage.outputs, results))
    exchange(program.exchanges)
    constants = iter(copy.deepcopy(together(*[known[0][variable] for variable, _, _ in exchanges], sum(lengths))))
    found = []
    for output in program.outputs:
        if output.reduction is None:
            found.append(next(constants))
        else:
            found.append(combined([env[output.variable] for env in known], output.reduction))
    return found


def split(arrays, sizes):
    """Return arrays cut along axis 0, as a list of arrays a shard."""
    return list(zip(*[np.split(array, np.cumsum(sizes)[:-1]) for array in arrays]))


class CoupledModel:
    """A network with batch normalisation, dropout, and a dice loss: its samples depend on each other.

    Attributes
    ----------
    inputs, outputs : list of theano.Variable
    loss : theano.Variable
    params : list of SharedVariable
    running : dict of SharedVariable to theano.Variable
        Averages of the statistics.
    """

    def __init__(self, dtype):
        def shared(*shape, value=None):
            value = rng.randn(*shape) * 0.5 if value is None else np.full(shape, value)
            return theano.shared(value.astype(dtype), broadcastable=[n == 1 for n in shape])
        rng = np.random.RandomState(1)
        x, t = T.matrix('x', dtype), T.matrix('t', dtype)
        w, v, gamma, beta = self.params = [shared(6, 5), shared(5, 3), shared(1, 5, value=1), shared(1, 5, value=0)]
        mean, variance = shared(1, 5, value=0), shared(1, 5, value=1)
        self._streams = MRG_RandomStreams(3)
        h, _, _, new_mean, new_variance = batch_normalization_train(T.dot(x, w), gamma, beta, running_mean=mean,
                                                                    running_var=variance)
        h = T.tanh(h) * self._streams.binomial((x.shape[0], 5), p=0.7, dtype=dtype)
        p = T.nnet.sigmoid(T.dot(h, v))
        self.loss = 1 - 2 * (p * t).sum() / (p.sum() + t.sum()) + np.asarray(1e-3, dtype) * (v ** 2).sum()
        self.inputs, self.outputs = [x, t], [p, x.max()]
        self.running = {mean: new_mean, variance: new_variance}
        self._velocities = [theano.shared(np.zeros_like(weight.get_value()), broadcastable=weight.broadcastable)
                            for weight in self.params]

    @property
    def variables(self):
        """All shared variables that training changes."""
        return self.params + self._velocities + list(self.running) + [s for s, *_ in self._streams.state_updates]

    def momentum(self, gradients):
        found = {}
        for weight, velocity, gradient in zip(self.params, self._velocities, gradients):
            new = np.asarray(0.9, weight.dtype) * velocity - np.asarray(0.1, weight.dtype) * gradient
            found.update({velocity: new, weight: weight + new})
        return found

    def plain(self, mode):
        updates = self.momentum(T.grad(self.loss, self.params))
        return theano.function(self.inputs, [self.loss] + self.outputs, mode=mode,
                               updates=list(updates.items()) + list(self.running.items()))

    def over_contexts(self, mode, **options):
        """Return a training function over the active contexts, or over the contexts in `options`."""
        return mgpu.training_function(self.inputs, self.loss, self.params, self.momentum, self.outputs, mode=mode,
                                      batch_updates=self.running, **options)

    def train(self, function):
        """Train for five ragged steps; return every output, and all state after them."""
        rng, found = np.random.RandomState(2), []
        for n in (14, 13, 9, 14, 1):
            x = rng.randn(n, 6).astype(self.inputs[0].dtype)
            found += [np.array(value) for value in function(x, rng.rand(n, 3).astype(x.dtype))]
        return found + [variable.get_value() for variable in self.variables]
