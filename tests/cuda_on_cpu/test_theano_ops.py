"""Theano's gpuarray ops on the stand-in, against Theano on the CPU.

All cases run in one child process, as importing Theano and making a context takes seconds. `make test-slow` runs them.
"""
import importlib.util
import json

import pytest

from cuda_on_cpu.child import clean_environment, python
from cuda_on_cpu.theano_cases import NAMES

HOUR = 3600  # s; with empty caches Theano and nvrtc compile for about ten minutes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(HOUR),
    pytest.mark.skipif(not importlib.util.find_spec('pygpu'), reason='pygpu is not installed'),
]
BROKEN = {
    'topk': 'GpuTopKOp uses __ballot, which nvrtc does not have for compute capability 7.0 and above',
}


@pytest.fixture(scope='module')
def outcomes():
    """Return the traceback of each case that failed, and None for the others."""
    base = clean_environment()
    base['THEANO_FLAGS'] = 'device=cuda0,contexts=,floatX=float32,dnn.enabled=False,print_active_device=False'
    done = python('-m', 'cuda_on_cpu.theano_cases', base=base, timeout=HOUR)
    # Other libraries may print too.
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert done.returncode == 0 and outcomes, done.stdout + done.stderr
    return outcomes


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=BROKEN[name])) if name in BROKEN else name
    for name in NAMES
])
def test_gpu_and_cpu_agree(outcomes, name):
    assert outcomes[name] is None, outcomes[name]


def test_every_case_ran(outcomes):
    assert sorted(outcomes) == sorted(NAMES)
