"""Samples that depend on each other, over N contexts, and graphs that cannot be computed in parts: as plain Theano."""
import os

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from theano.configparser import change_flags

QUICK = {'cpu': PYTHON, 'gpu': theano.Mode('cvm', 'fast_compile')}


class Small:
    """A linear layer with a loss of all samples, and its results in plain Theano and in a training function.

    Parameters
    ----------
    make_loss : callable
        ``make_loss(z, x)`` of the layer's outputs and inputs.
    """

    def __init__(self, make_loss, dtype='float32'):
        rng = np.random.RandomState(4)
        self.x = T.matrix('x', dtype)
        self.w = theano.shared(rng.randn(4, 3).astype(dtype), 'w')
        self.last = theano.shared(np.zeros((2, 3), dtype), 'last')
        self.last_gradient = theano.shared(self.w.get_value(), 'last gradient')
        z = T.tanh(T.dot(self.x, self.w))
        self.loss = make_loss(z, self.x)
        self.outputs = [z, z - z.mean(axis=0), T.dot(z, z.T)]
        self.of_batch = {self.last: z}

    def updates(self, gradients):
        return {self.w: self.w - np.asarray(0.1, self.w.dtype) * gradients[0], self.last_gradient: gradients[0]}

    def plain(self):
        updates = {**self.updates(theano.grad(self.loss, [self.w])), **self.of_batch}
        return self.train(theano.function([self.x], [self.loss] + self.outputs, updates=list(updates.items()),
                                          mode=QUICK['cpu']))

    def over_contexts(self, kind, **options):
        return mgpu.training_function([self.x], self.loss, [self.w], self.updates, self.outputs, mode=QUICK[kind],
                                      batch_updates=self.of_batch, **options)

    def train(self, step):
        """Return the outputs of ragged steps, and all state after each."""
        found = []
        for seed, n in enumerate((7, 5, 1, 4, 2)):
            x = np.random.RandomState(seed).randn(n, 4).astype(self.x.dtype)
            found += [np.array(value) for value in step(x)]
            found += [variable.get_value() for variable in (self.w, self.last, self.last_gradient)]
        return found


def contrastive(z, x):
    """Return a loss of each sample against all of them, as in SimCLR."""
    return T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(z, z.T)), T.arange(z.shape[0])).mean()


LOSSES = {'contrastive': contrastive,
          'dice': lambda z, x: 1 - (z * x[:, :3]).sum() / (abs(z).sum() + abs(x).sum()),
          'normalised': lambda z, x: (T.sqr((z - z.mean(axis=0)) / T.sqrt(z.var(axis=0) + 0.1)) * abs(x[:, :3])).mean(),
          'largest': lambda z, x: z.max(axis=0).sum() / x.max() + (z ** 2).mean()}
CPU_OPTIONS = [(2, {}), (3, {'micro_batches': 2}), (2, {'update_on': 'device', 'check_finite': True})]


def assert_all_close(ours, theirs, tolerance):
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg='value %d' % number)


@pytest.mark.slow_with('normalised-3-options1', 'normalised-2-options2', 'normalised-2-options0')
@pytest.mark.parametrize('n, options', CPU_OPTIONS)
@pytest.mark.parametrize('name', list(LOSSES))
def test_a_loss_in_which_samples_meet(contexts, name, n, options):
    """Loss, outputs, parameters, the last gradient, and a state that holds the last batch agree with plain Theano."""
    contexts('cpu', n)
    expected = Small(LOSSES[name], 'float64').plain()
    model = Small(LOSSES[name], 'float64')
    assert_all_close(model.train(model.over_contexts('cpu', **options)), expected, 1e-11)


@pytest.mark.cuda
@pytest.mark.parametrize('name, options', [
    pytest.param('contrastive', {'update_on': 'host'}, marks=pytest.mark.slow),
    pytest.param('largest', {'check_finite': True}, marks=pytest.mark.slow),
    pytest.param('normalised', {'micro_batches': 2}, marks=pytest.mark.slow)])
def test_a_loss_in_which_samples_meet_on_devices(gpu2, name, options):
    expected, model = Small(LOSSES[name]).plain(), Small(LOSSES[name])
    assert_all_close(model.train(model.over_contexts('gpu', **options)), expected, 2e-4)


@pytest.mark.slow_with('options1-1-cpu')
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=[pytest.mark.opencl, pytest.mark.slow])])
@pytest.mark.parametrize('dim', [0, 1])
@pytest.mark.parametrize('options', [{}, {'micro_batches': 2}])
def test_a_state_of_each_sample(contexts, kind, options, dim):
    """Recurrent states work with samples along either axis, in batches that do not divide evenly."""
    contexts(kind, 2)
    found = []
    for function in (theano.function, mgpu.training_function):
        x, w = T.fmatrix('x'), theano.shared(np.full((3, 3), 0.4, 'float32'), 'w')
        h = theano.shared(np.zeros((5, 3) if dim == 0 else (3, 5), 'float32'), 'h')
        new = T.tanh(x + T.dot(h if dim == 0 else h.T, w))
        loss = (new ** 2).mean()
        states = {h: new if dim == 0 else new.T}
        if function is theano.function:
            learned = {w: w - np.float32(0.1) * T.grad(loss, w)}
            step = function([x], [loss, new], updates=list({**states, **learned}.items()), mode=QUICK['cpu'])
        else:
            step = function([x], loss, [w], lambda g, w=w: {w: w - np.float32(0.1) * g[0]}, [new], batch_updates=states,
                            mode=QUICK[kind], **options)
        outputs = [step(np.random.RandomState(n).randn(5, 3).astype('float32')) for n in range(3)]
        outputs[-1][1][...] = 9  # an output is the caller's
        h.set_value(h.get_value() * 0.5)
        outputs += [step(np.random.RandomState(7).randn(5, 3).astype('float32'))]
        found.append([np.array(value) for each in outputs for value in each] + [w.get_value(), h.get_value()])
    assert_all_close(found[1], found[0], 1e-5)


def test_a_state_of_which_each_replica_needs_all(contexts):
    """Sums over the samples' states cannot be computed in parts; sums over a state that stays whole can."""
    contexts('cpu', 2)
    found = []
    for function in (theano.function, mgpu.function):
        x, h = T.dmatrix('x'), theano.shared(np.ones((5, 3)), 'h')
        h.default_update = x + T.extra_ops.cumsum(h, axis=0)
        step = function([x], x * h, mode=QUICK['cpu'])
        found.append([step(np.random.RandomState(n).randn(5, 3)) for n in range(3)] + [h.get_value()])
        assert len(getattr(step, 'contexts', [1, 2])) == 2
    assert_all_close(found[1], found[0], 1e-12)


def refused_step(options, ours=True):
    x, w = T.matrix('x', 'float32'), theano.shared(np.ones(3, 'float32'), 'w')
    z = T.dot(x, w)
    sums = T.slinalg.cholesky(z * z.dimshuffle(0, 'x') + T.eye(x.shape[0]))
    loss = (sums ** 2).mean()

    def updates(gradients):
        return {w: w - np.float32(0.01) * gradients[0]}
    if ours:
        step = mgpu.training_function([x], loss, [w], updates, [sums], mode=QUICK['cpu'], **options)
    else:
        step = theano.function([x], [loss, sums], updates=updates([T.grad(loss, w)]), mode=QUICK['cpu'])
    return step, w


@pytest.mark.slow_with('options1')
@pytest.mark.parametrize('options', [{}, {'micro_batches': 2}, {'update_on': 'device'}])
def test_a_graph_that_cannot_be_cut_runs_on_one_context_and_says_why(cpu2, options):
    with pytest.warns(mgpu.MgpuWarning) as warned, change_flags(**{'traceback.limit': 8}):  # make test has none
        step, w = refused_step(options)
    assert len(warned) == 1 and warned[0].filename == __file__
    text = str(warned[0].message)
    assert 'runs whole on host0' in text and 'Cholesky' in text and os.path.basename(__file__) in text
    assert [context.name for context in step.contexts] == ['host0'] and step.n_replicas == 1
    plain, expected = refused_step(options, ours=False)
    for n in (5, 1, 4):
        x = np.random.RandomState(n).randn(n, 3).astype('float32')
        assert_all_close(step(x), plain(x), 1e-5)
        np.testing.assert_allclose(w.get_value(), expected.get_value(), rtol=1e-5)


def test_one_context_does_not_warn_of_what_cannot_be_cut(contexts, recwarn):
    contexts('cpu', 1)
    refused_step({})
    assert not [each for each in recwarn if issubclass(each.category, mgpu.MgpuWarning)]
