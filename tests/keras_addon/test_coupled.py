"""20 ragged steps of models whose samples depend on each other: those of plain Keras, everywhere."""
import os

import numpy as np
import pytest
from test_ranks import INTERPRETED, arrays, launch, needs_mpi

from . import coupled, rank_jobs
from .equivalence import QUICK, assert_equal, floatx
from .test_exact import DTYPES

TOLERANCE = {'float32': 1e-5, 'float64': 1e-9}
pytestmark = pytest.mark.filterwarnings('error::theano_mgpu.MgpuWarning')
MODELS = pytest.mark.parametrize('name', list(coupled.MODELS))


def check(name, dtype, contexts, kind, counts, mode):
    with floatx(dtype):
        expected = coupled.train(name, dtype, mode, gpus=0)
        for n in counts:
            contexts(kind, n)
            assert_equal(coupled.train(name, dtype, mode), expected, TOLERANCE[dtype])


@MODELS
@DTYPES
def test_on_the_host(name, dtype, contexts):
    check(name, dtype, contexts, 'cpu', [2, 3], QUICK)


@pytest.mark.cuda
@pytest.mark.slow
@MODELS
@pytest.mark.parametrize('n', [2, 3])
def test_on_devices(name, n, contexts):
    check(name, 'float32', contexts, 'gpu', [n], None)


@needs_mpi
def test_over_ranks(tmp_path):
    launch(2, 'coupled', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', job=os.path.abspath(rank_jobs.__file__),
           flags=INTERPRETED)
    found = iter(arrays(tmp_path / 'ranks.npz'))
    with floatx('float64'):
        for name in coupled.MODELS:
            for what, value in coupled.train(name, 'float64', QUICK, gpus=0):
                scale = np.abs(value).max() if np.size(value) else 1
                np.testing.assert_allclose(next(found), value, rtol=0, atol=1e-9 * scale, err_msg=name + ' ' + what)
    assert next(found, None) is None
