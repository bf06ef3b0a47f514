"""Six kinds of models of each Keras, in each way to use several devices: as plain Keras computes them.

    pytest -m slow -s tests/keras/test_each_way.py    prints the largest differences
"""
import subprocess
import sys

import numpy as np
import pytest
from programs.keras_versions.zoo_difference import difference
from support.devices import gpu_devices
from support.search_path import ROOT
from test_versions import FOLDER, SINGLE, VERSIONS, with_keras

KINDS = ('of_images', 'of_sequences', 'of_masked_sequences', 'of_two_branches', 'of_weighted_classes', 'with_a_state')
CUDA = str(ROOT / 'tests' / 'cuda_on_cpu')
RUN = ['-m', 'theano_mgpu', 'run', '--always']
ON_CPU = ['--contexts', 'a->cpu;b->cpu']


def on_cuda():
    """Return the words that run a program on two CUDA devices, on one twice, or on two of the stand-in."""
    pytest.importorskip('pygpu')
    devices = [device for device in gpu_devices() if device.startswith('cuda')]
    if devices:
        return [*RUN, '--contexts', 'a->%s;b->%s' % tuple(devices[:2])]
    built = subprocess.run([sys.executable, CUDA, 'build'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if built.returncode:
        pytest.skip('the CUDA stand-in cannot be built')
    return [CUDA, 'run', '--devices', '2', sys.executable, *RUN, '--contexts', 'a->cuda0;b->cuda1']


WAYS = {'two contexts': lambda: RUN + ON_CPU,
        'two processes': lambda: ['-m', 'theano_mgpu', 'launch', '-n', '2', *RUN[2:], *ON_CPU],
        'two CUDA devices': on_cuda}


def written(version, words, path, flags):
    """Return the results that the zoo writes in one way."""
    with_keras(version, *words, str(FOLDER / 'zoo.py'), '--write', str(path), *KINDS, flags=flags)
    with np.load(str(path)) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    """Return a function that returns what plain Keras of a version computes."""
    known = {}

    def results(version):
        if version not in known:
            known[version] = written(version, [], tmp_path_factory.mktemp('plain') / 'results.npz', 'floatX=float64')
        return known[version]
    return results


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('version', [*VERSIONS, '2.3.1'])
def test_all_results(version, way, plain, tmp_path):
    words, expected = WAYS[way](), plain(version)
    found = written(version, words, tmp_path / 'results.npz', 'floatX=float64')
    assert found.keys() == expected.keys()
    differences = {name: difference(expected[name], found[name]) for name in expected}
    worst = {kind: max(d for name, d in differences.items() if name.startswith(kind)) for kind in KINDS}
    print('\nKeras %s, %s: %s' % (version, way, ', '.join('%s %.1e' % pair for pair in worst.items())))
    assert max(worst.values()) < (2e-5 if version in SINGLE else 1e-9), worst
