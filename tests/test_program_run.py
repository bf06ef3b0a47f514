"""Programs of stages over contexts and ranks train like one device, with ragged batches, whatever the samples share."""
from theano_mgpu.errors import ReplicaError

import numpy as np
import pytest
import theano
from rank_jobs import PYTHON
from stages import CoupledModel
from test_ranks import arrays, launch, needs_mpi


@pytest.fixture(scope='module')
def expected():
    """What plain Theano computes, by dtype."""
    models = {dtype: CoupledModel(dtype) for dtype in ('float32', 'float64')}
    return {dtype: model.train(model.plain(PYTHON)) for dtype, model in models.items()}


def assert_close(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('n, options', [
    (1, {}), (2, {}), (3, {}), (3, {'executor': 'threads'}), (2, {'micro_batches': 3}), (1, {'micro_batches': 2}),
    (2, {'update_on': 'device'}), (2, {'check_finite': True}), (2, {'least_samples': 5})])
def test_training_is_that_of_plain_theano(n, options, expected, contexts):
    contexts('cpu', n)
    model = CoupledModel('float64')
    assert_close(model.train(model.over_contexts(PYTHON, **options)), expected['float64'], 1e-12)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, {'update_on': 'host', 'micro_batches': 2}])
def test_training_on_devices_is_that_of_plain_theano(options, expected, gpu2):
    model = CoupledModel('float32')
    trained = model.train(model.over_contexts(theano.Mode('cvm', 'fast_compile'), **options))
    assert_close(trained, expected['float32'], 1e-5)


@needs_mpi
def test_training_over_ranks_is_that_of_plain_theano(expected, tmp_path):
    """Two contexts each; of a batch of one sample, one rank has none."""
    launch(2, 'stages', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', flags='floatX=float32,cxx=')
    assert_close(arrays(tmp_path / 'ranks.npz'), expected['float64'], 1e-12)


def test_a_step_that_fails_in_a_late_stage_changes_nothing(expected, cpu2, monkeypatch):
    model = CoupledModel('float64')
    step = model.over_contexts(PYTHON)
    before = [variable.get_value() for variable in model.variables]
    late = step.compiled_program.stages[-2][1]
    monkeypatch.setattr(late.graph, 'run', lambda replica, arguments: 1 / 0)
    with pytest.raises(ReplicaError, match='nothing was changed'):
        model.train(step)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable.get_value())
    monkeypatch.undo()
    assert_close(model.train(step), expected['float64'], 1e-12)
