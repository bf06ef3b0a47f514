"""Fixtures and hooks of all tests: contexts on real devices, Theano's flags, and markers."""
import atexit
import gc
import os
import shutil
import signal
import tempfile

flags = os.environ.get('THEANO_FLAGS', '')
if 'floatX' not in flags:
    os.environ['THEANO_FLAGS'] = ('floatX=float32,' + flags).rstrip(',')
# These tests may themselves run in an allocation of a cluster: their processes must not take it for their own.
for name in list(os.environ):
    if name.startswith(('SLURM_', 'PBS_', 'LSB_', 'OMPI_MCA_orte_default_hostfile')) and name != 'SLURM_CONF':
        del os.environ[name]
# PoCL's cache is no place for two processes that use one kernel at once: they fail, or crash, now and then. Ranks have
# one each (theano_mgpu/devices/patches.py), and so do the test workers, with the processes that they start.
worker = os.environ.get('PYTEST_XDIST_WORKER', 'gw0')
if worker != 'gw0':
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    os.environ.setdefault('CUDA_ON_CPU_CACHE', os.path.join(cache, 'theano_mgpu', 'cuda_on_cpu'))  # of all processes
    os.environ['XDG_CACHE_HOME'] = os.path.join(cache, worker)
# Processes take the devices that the fewest others have, by files in the folder for temporary files. Each worker has a
# folder of its own: a test does not see the processes of other workers.
if 'PYTEST_XDIST_WORKER' in os.environ:
    tempfile.tempdir = os.environ['TMPDIR'] = tempfile.mkdtemp(prefix=worker + '-')
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
gc.set_threshold(50_000)  # graphs are many objects: with Python's 700, looking through them takes a quarter of the time

import theano_mgpu as mgpu
from theano_mgpu.compat import theano_imports
from theano_mgpu.devices.contexts import type_name
from theano_mgpu.runtime import graph_calls
from theano_mgpu.utils import rank_process

import pytest
import theano
from support import initial_weights, started
from support.devices import context_map
from support.modes import LAZY
from support.parameters import mark_slow
from support.requirements import MISSING, is_slow_on_opencl, takes_a_gpu
from support.two_hosts import two_hosts_or_skip

# A process that a test starts is not a child of a script: it imports theano_mgpu itself, or does without.
del os.environ[theano_imports.IMPORTED]

initial_weights.draw_by_numpy()
if os.environ.get('TEST_CUDA_GRAPHS') == 'first':  # most tests call a function too few times for a graph
    graph_calls.GraphCalls._has_seen = lambda self, arguments: True

collect_ignore = ['programs']  # tests run them


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Mark the slow variants of a test."""
    made = yield
    if isinstance(made, list) and made and isinstance(made[0], pytest.Function):
        mark_slow(made)
    return made


def pytest_make_parametrize_id(val):
    """Return the name of a signal in the name of a test: pytest's own differs between versions of Python."""
    return val.name if isinstance(val, signal.Signals) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(items):
    """Mark tests that compute on a GPU device, and put them first, with those that compute on one if there is one.

    A test worker begins with a run of neighbours. So one worker builds most OpenCL kernels: CLBlast's alone take 7 s.
    """
    for item in items:
        if takes_a_gpu(item):
            item.add_marker('opencl')
        if is_slow_on_opencl(item):
            item.add_marker('slow')
    items.sort(key=lambda item: not (item.get_closest_marker('opencl') or 'gpu' in item.name))


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
    """Skip a test with a marker of something that is missing here; each test sees its own notes, also repeated ones."""
    rank_process.note.cache_clear()
    for marker, reason_of in MISSING.items():
        reason = reason_of() if item.get_closest_marker(marker) else None
        if reason:
            pytest.skip(reason)


def pytest_configure(config):
    """Note what tests start, for a report that .ci/test-times reads."""
    if config.option.xmlpath:
        started.watch()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Write the kind of a test into its report."""
    if item.config.option.xmlpath:
        item.user_properties.append(('kind', started.kind(item)))


@pytest.fixture(autouse=True)
def self_check(request):
    """Have functions compute their first batch on one device, too, in tests marked `verified`."""
    is_on = request.node.get_closest_marker('verified') and not request.node.get_closest_marker('unverified')
    with theano.configparser.change_flags(**{'mgpu.verify': str(bool(is_on))}):
        yield


@pytest.fixture
def interpreted(request):
    """Have Python run functions without a mode, such as the steps of a loop, in tests that use no GPU."""
    on_gpu = request.node.get_closest_marker('opencl')
    with theano.configparser.change_flags(mode=theano.config.mode if on_gpu else LAZY):
        yield


@pytest.fixture
def own_draws(monkeypatch):
    """Let Keras draw initial weights itself, as it does in the processes that a test starts."""
    from keras import initializers
    monkeypatch.setattr(initializers, 'K', initializers.K.backend)


@pytest.fixture
def contexts():
    """Return a function that activates n contexts of a kind ('cpu' or 'gpu'), optionally on devices of one type."""
    def use(kind, n=2, of_one_type=False):
        made = mgpu.init(context_map(kind, n))
        if of_one_type and len(set(map(type_name, made))) > 1:
            made = mgpu.init(';'.join('same%d->%s' % (i, made[0].device) for i in range(n)))
        return made
    yield use
    mgpu.init('host0->cpu')


@pytest.fixture(params=['cpu', 'gpu'])
def kind(request):
    return request.param


@pytest.fixture
def cpu2(contexts):
    return contexts('cpu', 2)


@pytest.fixture
def gpu2(contexts):
    return contexts('gpu', 2)


@pytest.fixture
def enabled():
    """Return a function that enables all contexts for models of Keras; notes go to its report only."""
    from theano_mgpu.keras import disable, enable

    def start(**options):
        return enable(**dict({'tell': lambda text: None, 'always': True}, **options))
    yield start
    disable()


@pytest.fixture
def two_hosts(tmp_path):
    """Return two hosts that mpirun can start ranks on; skip the test if namespaces cannot be created."""
    with two_hosts_or_skip(tmp_path) as hosts:
        yield hosts


def pytest_collection_finish():
    """Keep Python's collector from objects that stay until the end, and run it less often: it takes a tenth of the
    time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
