"""The benchmarks run, and show what they promise."""
import json
import os
import re
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import needs_compiler
from models import handwritten_digits
from test_ranks import needs_mpi

FOLDER = os.path.join(os.path.dirname(__file__), '..', 'benchmarks')


def run(script, *arguments, flags=None):
    env = {key: value for key, value in os.environ.items() if key != 'THEANO_FLAGS'}
    if flags:
        env['THEANO_FLAGS'] = flags
    done = subprocess.run([sys.executable, os.path.join(FOLDER, script)] + list(arguments), capture_output=True,
                          text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mnist_cnn_learns_the_same_on_two_contexts(tmp_path):
    path = str(tmp_path / 'results.json')
    text = run('mnist_cnn.py', '--contexts', 'a->cpu;b->cpu', '--epochs', '3', '--json', path)
    assert "scikit-learn's 1,797 scanned digits" in text or 'mnist.npz' in text
    with open(path) as f:
        one, two = json.load(f)['rows']
    assert (one['contexts'], two['contexts']) == (['a'], ['a', 'b'])
    assert one['accuracy'] > 0.8 and abs(one['accuracy'] - two['accuracy']) < 0.01
    assert 0 < two['difference'] < 1e-3 and one['difference'] is None
    assert set(two['phases']) == {'scatter', 'run', 'fetch', 'all_reduce', 'update'}
    assert all(title in text for title in ('samples/s', 's/step', 'all_reduce', 'accuracy', 'difference'))


def test_a_file_like_mnists_is_used(tmp_path):
    path = str(tmp_path / 'mnist.npz')
    rng = np.random.RandomState(0)
    images, labels = rng.randint(0, 256, (6, 28, 28)).astype('uint8'), rng.randint(0, 10, 6)
    np.savez(path, x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:])
    name, train, test = handwritten_digits(path)
    assert name.startswith(path) and train[0].shape == (4, 1, 28, 28) and test[1].dtype == 'int32'
    np.testing.assert_allclose(train[0][:, 0] * 255, images[:4], rtol=1e-5)


def test_scanned_digits_have_whole_grey_levels(monkeypatch):
    """Else max-pooling meets ties up to rounding, and float64 runs part company."""
    import models
    monkeypatch.setattr(models, 'MNIST_FILE', '/nowhere')
    levels = handwritten_digits()[1][0] * 255
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-3)


def test_bad_arguments_are_explained():
    for arguments, message in ((['--epochs', '0'], 'at least 1'), (['--data', 'nowhere.npz'], 'no such file')):
        done = subprocess.run([sys.executable, os.path.join(FOLDER, 'mnist_cnn.py')] + arguments, capture_output=True,
                              text=True)
        assert done.returncode == 2 and message in done.stderr


TWO = 'contexts=a->cpu;b->cpu'


@needs_compiler
def test_keras_mnist_learns(tmp_path):
    text = run('keras_mnist.py', '--epochs', '3', flags=TWO)
    accuracy = re.search(r'test accuracy ([\d.]+), on a \(cpu\), b \(cpu\)', text)
    assert float(accuracy.group(1)) > 0.8


@needs_compiler
def test_keras_autoencoder_draws(tmp_path):
    path = str(tmp_path / 'digits.png')
    text = run('keras_autoencoder.py', '--filters', '4', '8', '--epochs', '1', '--samples', '256', '--output', path,
               flags=TWO)
    assert 'picture: %s' % path in text
    assert plt.imread(path).shape[:2] == (390, 1500)


@needs_mpi
@pytest.mark.slow
def test_scaling_compares(tmp_path):
    json_path, plot_path = str(tmp_path / 's.json'), str(tmp_path / 's.png')
    text = run('scaling.py', '--quick', '--models', 'mlp', '--json', json_path, '--plot', plot_path)
    with open(json_path) as f:
        rows = json.load(f)['results']
    assert [(row['kind'], row['workers'], row['threads']) for row in rows] == [
        ('keras', 1, 1), ('keras', 1, 2), ('mgpu', 1, 1), ('mgpu', 2, 1)]
    assert all(len(row['seconds']) == 2 and 0 < row['lowest'] <= row['median'] for row in rows)
    assert text.count('Keras on Theano ') == 2 and plt.imread(plot_path).shape[0] > 300


@pytest.mark.parametrize('script', ['mnist_cnn.py', 'step_overhead.py', 'keras_mnist.py', 'keras_autoencoder.py',
                                    'keras_overhead.py', 'scaling.py'])
def test_help_teaches(script):
    assert 'Examples:' in run(script, '--help')
