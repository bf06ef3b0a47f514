"""Theano's ops of cuDNN on the stand-in, in each version, against Theano on the CPU. `make test-cuda` runs them."""
import functools
import importlib.util
import json

import pytest

from cuda_on_cpu.child import clean_environment, python
from cuda_on_cpu.cudnn_cases import NAMES

HOUR = 3600  # s; with empty caches Theano and nvrtc compile for some minutes
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cudnn,
    pytest.mark.timeout(HOUR),
    pytest.mark.skipif(not importlib.util.find_spec('pygpu'), reason='pygpu is not installed'),
]


@functools.lru_cache(maxsize=None)
def outcomes(cudnn):
    """Return the ops of cuDNN in each case, and the traceback of its failure or None."""
    base = clean_environment()
    base['THEANO_FLAGS'] = 'device=cuda0,contexts=,floatX=float32,print_active_device=False'
    done = python('-m', 'cuda_on_cpu.cudnn_cases', base=base, timeout=HOUR, cudnn=cudnn)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    return {name: (ops, failure) for name, ops, failure in lines}


@pytest.mark.parametrize('cudnn', [9, 8, 7])
@pytest.mark.parametrize('name', NAMES)
def test_cudnn_and_cpu_agree(cudnn, name):
    ops, failure = outcomes(cudnn)[name]
    assert failure is None, failure
    assert set(NAMES[name]) <= set(ops)
