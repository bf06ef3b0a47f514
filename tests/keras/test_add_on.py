"""`theano_mgpu.keras` with each Keras since 1.0: models, checkpoints and processes as in plain Keras."""
import json

import numpy as np
import pytest
from support.devices import context_map
from test_versions import FOLDER, KINDS, QUICK, tolerance, with_keras

SCRIPT = str(FOLDER / 'add_on.py')
VERSIONS = '1.0.8', '1.2.2', '2.0.9', '2.1.6', '2.2.4', '2.3.1'
LAUNCH = '-m', 'theano_mgpu', 'launch', '-n', '2'


def check_models(version, kinds, **options):
    found = json.loads(with_keras(version, SCRIPT, 'compare', *kinds, **options).stdout.splitlines()[-1])
    assert found['version'] == version and found['verified'] == [True] * len(kinds), found
    assert max([*found['enabled'].values(), *found['parallel'].values()]) < tolerance(version), found
    assert found['only_write'] == [False, True]  # Keras 1.0 has no LambdaCallback, which the rule asked for
    for name, _, n_contexts in found['rows']:  # one for each function of a model
        assert name.startswith(('sequential_', 'model_')) and not name.endswith('_model') and name in found['printed']
        assert n_contexts == 2, found
    assert sorted(kind for _, kind, _ in found['rows']) == sorted(['predict', 'test', 'train'] * len(kinds)), found


def numbers(path):
    with np.load(str(path)) as file:
        return dict(file)


def assert_same(ours, theirs, within=0):
    ours, theirs = numbers(ours), numbers(theirs)
    assert ours.keys() == theirs.keys() and len(ours) > 8
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=within, atol=within, err_msg=name)


@pytest.mark.slow_but_with('2.0.9', '1.0.8')
@pytest.mark.parametrize('version', VERSIONS)
def test_models(version):
    """An ImportError said that the add-on is for Keras 2.3.1."""
    check_models(version, ['of_weighted_classes'])


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
def test_all_kinds_of_models(version):
    check_models(version, [*KINDS, 'of_normalised_rows'])


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('version', VERSIONS)
def test_images(version):
    check_models(version, ['of_images'], flags='floatX=float64')


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
def test_files_and_places(version, tmp_path):
    with_keras(version, SCRIPT, 'save', str(tmp_path / 'model.h5'))


@pytest.mark.slow
@pytest.mark.parametrize('action', ['train', 'feed'])
@pytest.mark.parametrize('version', VERSIONS)
def test_a_fit_that_is_killed_continues(version, action, tmp_path):
    whole, continued, checkpoint = str(tmp_path / 'whole'), str(tmp_path / 'continued'), str(tmp_path / 'run.npz')
    all_samples = int(with_keras(version, SCRIPT, action, whole).stdout.split()[-1])
    with_keras(version, SCRIPT, action, continued, checkpoint, '8', expected=7)
    samples = int(with_keras(version, SCRIPT, action, continued, checkpoint).stdout.split()[-1])
    assert samples == all_samples * 7 // 15 or samples == 27  # of 15 batches, 8 were in the file
    assert_same(continued + '.0.npz', whole + '.0.npz')


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('action', ['train', 'feed'])
@pytest.mark.parametrize('version', VERSIONS)
def test_two_processes(version, action, tmp_path):
    one, two = str(tmp_path / 'one'), str(tmp_path / 'two')
    with_keras(version, SCRIPT, action, one)
    done = with_keras(version, *LAUNCH, SCRIPT, action, two)
    for rank in range(2):
        assert_same('%s.%d.npz' % (two, rank), one + '.0.npz', tolerance(version))
    assert done.stdout.count('Epoch 1/3') == 1
    if version > '1.1':  # a CSVLogger
        assert len((tmp_path / 'two.csv').read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('version', VERSIONS)
def test_two_processes_with_samples_of_their_own(version, tmp_path):
    one, two = str(tmp_path / 'one'), str(tmp_path / 'two')
    with_keras(version, SCRIPT, 'shard', one)
    with_keras(version, *LAUNCH, SCRIPT, 'shard', two, flags=QUICK + ',mgpu.data=sharded')
    for rank in range(2):
        assert_same('%s.%d.npz' % (two, rank), one + '.0.npz', tolerance(version))


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
def test_batches_that_are_sent_ahead(version):
    """All batches but the first of each epoch are; a queue may not have the next one yet."""
    done = with_keras(version, SCRIPT, 'ahead', context_map('gpu', 2), flags='floatX=float32')
    of_fit, of_generator = json.loads(done.stdout.splitlines()[-1])
    assert of_fit == 8 and (of_generator > 0) == (version >= '2.2')
