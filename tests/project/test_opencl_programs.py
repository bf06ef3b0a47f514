"""The OpenCL programs of the tests: each is built once, in all processes that `.ci/quickly` has prepared."""
import os
import random
import subprocess
import sys
from pathlib import Path

import theano_mgpu  # noqa: F401
from theano_mgpu.runtime import compiler

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import opencl_programs
from support.modes import PYTHON
from support.search_path import search_path
from support.sending import Sender
from support.small_models import data

TESTS = Path(__file__).parents[1]


@pytest.fixture
def opencl2(gpu2):
    """Return two OpenCL contexts that share programs."""
    if gpu2[0].kind != 'opencl':
        pytest.skip('%s is no OpenCL device' % gpu2[0].device)
    if not opencl_programs.caches:
        pytest.skip('each process builds its own: the tests do not run by .ci/quickly, or TEST_OPENCL_CACHE is off')
    return gpu2


def counts():
    cache, = opencl_programs.caches
    return np.array([cache.built, cache.loaded, cache.shared])


def new_chain():
    """Return names of ops whose fused kernel no former test has."""
    any_ = random.SystemRandom()  # tests set the state of `random`
    return [any_.choice(['tanh', 'sin', 'cos', 'sgn', 'sqr', 'arctan']) for _ in range(16)]


def programs_of(context, chain):
    """Compile and run a function with a kernel of these ops; return the programs built, loaded, and shared for it."""
    before = counts()
    x = T.fvector('x')
    y, expected = x, np.ones(3, 'float32')
    for name in chain:
        y, expected = getattr(T, name)(y), getattr(np, {'sgn': 'sign', 'sqr': 'square'}.get(name, name))(expected)
    f = compiler.compile_for(context, [x], [y], {}, {})
    np.testing.assert_allclose(f(*Sender(f).send([np.ones(3, 'float32')]))[0], expected, rtol=1e-4, atol=1e-6)
    return (counts() - before).tolist()


@pytest.mark.slow
def test_a_program_is_built_once(opencl2):
    chain = new_chain()
    built, loaded, shared = programs_of(opencl2[0], chain)
    assert built > 0 and loaded == 0
    assert programs_of(opencl2[0], chain) == [0, 0, built + shared]
    again = programs_of(opencl2[1], chain)
    assert again == [0, built, built + shared]


ADDITIONS = {'elementwise': lambda x, y: T.sqr(x) - y, 'rows': lambda x, y: T.inc_subtensor(x[1:], y[1:]),
             'listed rows': lambda x, y: T.inc_subtensor(x[[2, 0]], y[1:])}


@pytest.mark.slow_but_with('listed rows')
@pytest.mark.parametrize('name', list(ADDITIONS))
def test_kernels_are_built_when_they_are_called(name, opencl2):
    """Each op had seven kernels: for contiguous arrays, and for one to three dimensions with two sizes of addresses."""
    x, y = T.ftensor3('x'), T.ftensor3('y')
    result = ADDITIONS[name](x, y)
    before = counts()
    f = compiler.compile_for(opencl2[0], [x, y], [result], {}, {})
    built, _, shared = counts() - before
    assert built + shared == 1
    values = np.arange(48, dtype='float32').reshape(2, 3, 2, 4)
    there = Sender(f).send(list(values))
    plain = theano.function([x, y], result, mode=PYTHON)
    for view in (lambda array: array, lambda array: array[:, ::-1, ::2]):
        np.testing.assert_array_equal(f(*map(view, there))[0], plain(*map(view, values)))


SCRIPT = """
import theano_mgpu as mgpu
contexts = mgpu.init({map!r})
import test_opencl_programs as here
print(here.programs_of(contexts[0], {chain!r}))
"""


def in_a_process(contexts, chain):
    mapped = ';'.join('%s->%s' % (c.name, c.device) for c in contexts)
    code = SCRIPT.format(map=mapped, chain=chain)
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, '-c', code], env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE,
                          universal_newlines=True, check=True)
    return eval(done.stdout.splitlines()[-1])


ENTRIES = """
import numpy as np
import theano_mgpu as mgpu
from support import opencl_programs
table, = opencl_programs.driver_tables()
places = opencl_programs.CREATE, opencl_programs.COMPILE, opencl_programs.LINK
before = [table[place] for place in places]
context, = mgpu.init('dev0->{device}')
import theano
w = theano.shared(np.ones(3, 'float32'), target='dev0')
value = theano.function([], theano.tensor.exp(w) + w)()
np.testing.assert_allclose(np.asarray(value), np.exp(1) + 1, rtol=1e-5)
print([table[place] == old for place, old in zip(places, before)], len(opencl_programs.caches))
"""


@pytest.mark.slow
@pytest.mark.parametrize('cache', ['on', 'off'])
def test_a_process_can_leave_the_driver_alone(cache, opencl2):
    done = subprocess.run([sys.executable, '-c', ENTRIES.format(device=opencl2[0].device)], stdout=subprocess.PIPE,
                          universal_newlines=True, check=True, env=dict(
                              os.environ, PYTHONPATH=search_path(TESTS), TEST_OPENCL_CACHE=cache))
    assert done.stdout.splitlines()[-1] == {'on': '[False, False, False] 1', 'off': '[True, True, True] 0'}[cache]


@pytest.mark.slow
def test_another_process_loads_it_and_builds_it_where_the_file_is_broken(opencl2):
    folder = Path(opencl_programs.caches[0]._folder)
    known = set(folder.rglob('*'))
    chain = new_chain()
    built, loaded, shared = programs_of(opencl2[0], chain)
    assert in_a_process(opencl2, chain) == [0, built, built + shared]
    for path in set(folder.rglob('*')) - known:
        path.write_bytes(b'broken')
    assert in_a_process(opencl2, chain) == [built, 0, shared]


def test_programs_built_with_other_options_of_the_driver_are_others(opencl2, monkeypatch):
    cache, = opencl_programs.caches
    programs_of(opencl2[0], ['tanh'])
    context, name = next(iter(cache._programs))
    paths = set()
    for options in ('', '-cl-opt-disable', '-cl-mad-enable'):
        monkeypatch.setenv('POCL_EXTRA_BUILD_FLAGS', options)
        paths.add(cache._path(context, name))
    assert len(paths) == 3


@pytest.mark.slow
def test_functions_give_the_same_with_and_without(opencl2, tmp_path):
    x = T.fmatrix('x')

    def results():
        f = compiler.compile_for(opencl2[0], [x], [T.tanh(x) * x, T.exp(x).sum(axis=0)], {}, {})
        return f(*Sender(f).send([data(6, 7)[0]]))

    with_cache = results()
    cache, = opencl_programs.caches
    cache._programs.clear()
    cache._binaries.clear()
    folder, cache._folder = cache._folder, str(tmp_path)
    built = cache.built
    try:
        without = results()
    finally:
        cache._folder = folder
    assert cache.built > built
    for one, other in zip(with_cache, without):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_there_may_be_no_opencl(monkeypatch):
    monkeypatch.setattr(opencl_programs, 'LOADER', 'libOpenCL.so.none')
    assert opencl_programs.driver_tables() == []


def test_read_only_tables_are_left_alone():
    assert opencl_programs._is_writable(id(opencl_programs))
    assert not opencl_programs._is_writable(0)
