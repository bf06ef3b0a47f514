"""`mgpu.overlap`: the backward pass is cut at buckets of gradients, each exchanged while the next is computed."""

import theano_mgpu as mgpu
from theano_mgpu.plan import buckets

import numpy as np
import pytest
import theano
import theano.tensor as T
from models import adam
from support.small_models import conv_model, data, dense_model
from test_update_shares import UPDATES, values


@pytest.fixture
def overlap(monkeypatch):
    """Return a function that turns the flag on or off; the networks of tests are small."""
    monkeypatch.setattr(buckets, 'LEAST', 1)
    return lambda on: monkeypatch.setattr(theano.config.mgpu, 'overlap', str(on))


def layers(n, mode='FAST_COMPILE'):
    """Return a step over n equal layers."""
    rng, x = np.random.RandomState(0), T.matrix('x')
    params, h = [], x
    for i in range(n):
        params.append(theano.shared(rng.randn(3, 3).astype(theano.config.floatX), name='w%d' % i))
        h = T.tanh(T.dot(h, params[-1]))
    return mgpu.training_function([x], T.sqr(h).mean(), params, adam, mode=mode)


def n_pieces(step):
    return [len(stage.parts) for stage in step.plan.stages]


@pytest.mark.parametrize('n,most,pieces', [(3, 8, 3), (5, 2, 2), (1, 8, 1)])
def test_the_backward_pass_is_cut(n, most, pieces, contexts, overlap, monkeypatch):
    contexts('cpu', 2)
    monkeypatch.setattr(buckets, 'MOST', most)
    overlap(True)
    step = layers(n)
    assert n_pieces(step) == [pieces]
    last = step.executable.parts[step.plan.stages[0].parts[-1]]
    assert step.params[-1].name not in [str(v) for v in last.functions[0].get_shared()] or n == 1


@pytest.mark.opencl
@pytest.mark.cuda(opencl='slow')
@pytest.mark.parametrize('make,shape,updates,options', [
    (dense_model, (7,), 'clipped_adam', {'executor': 'threads'}), (dense_model, (7,), 'adam', {'micro_batches': 3}),
    pytest.param(conv_model, (2, 8, 8), 'momentum', {'executor': 'threads'},
                 marks=[pytest.mark.needs_compiler, pytest.mark.slow])])
def test_it_is_the_step_without_overlap(make, shape, updates, options, contexts, kind, overlap):
    names = [context.name for context in contexts(kind, 2)]
    sides = []
    for on in (True, False):
        overlap(on)
        model = make()
        sides.append(mgpu.training_function(model.inputs, model.loss, model.params, UPDATES[updates], contexts=names,
                                            **options))
    assert n_pieces(sides[0])[0] > 1 and n_pieces(sides[1]) == [1]
    for number, size in enumerate((11, 10, 1, 7, 2)):
        batch = data(size, *shape, seed=number)
        ours, theirs = (step(*batch) for step in sides)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for mine, its in zip(*(values([each.variable for each in step.updated]) for step in sides)):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.opencl
@pytest.mark.cuda(opencl='slow')
def test_a_batch_that_was_sent_ahead_is_sent_again_to_a_function_in_pieces(gpu2, overlap):
    """It was of the function before, with other slots."""
    overlap('auto')
    losses = []
    for looks in (True, False):
        step = layers(3, None)
        batches = [[np.full((n, 3), i + 1., theano.config.floatX)] for i, n in enumerate((6, 5, 4))]
        losses.append([])
        for loss in step.over(batches) if looks else map(step, *zip(*batches)):
            losses[-1].append(loss)
            if looks and len(losses[-1]) == 1:
                step._overlap(50)  # as after steps over slow networks
        assert n_pieces(step) == [3 if looks else 1]
    np.testing.assert_allclose(*losses, rtol=1e-5)
