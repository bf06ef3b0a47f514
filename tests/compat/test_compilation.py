"""Compiling for Theano: several modules at a time, in one process and in several, without the collector."""
import gc
import glob
import os
import subprocess
import sys
import time

import theano_mgpu  # noqa: F401  before theano
from theano_mgpu.comm import patches as comm_patches
from theano_mgpu.compat import theano_cache
from theano_mgpu.utils import mpi_environment, processor
from theano_mgpu.utils.attributes import collector_paused

import pytest
import theano
import theano.tensor as T
from theano.configparser import change_flags
from theano.gof import cmodule, compilelock
from theano.gof.cc import get_module_cache
from theano.gpuarray import type as gpuarray_type
from theano.scalar.basic import Composite

pytestmark = pytest.mark.needs_compiler
# A compiler that notes each module that it begins, and waits for a file if the code has "slow" in it.
COMPILER = '''#!/bin/sh
case "$*" in *mod.cpp*) ;; *) exec g++ "$@";; esac
for word; do case "$word" in *mod.cpp) source=$word;; esac; done
if grep -q slow_marker "$source"; then
    echo begun >> {folder}/slow
    while [ ! -e {folder}/go ]; do sleep 0.05; done
fi
exec g++ "$@"
'''
PROGRAM = '''
import sys
import theano_mgpu, theano, theano.tensor as T
from theano.tensor import elemwise

class Marked(elemwise.Elemwise):
    """Its C code has a marker."""
    def c_support_code(self):
        return "// %s_marker" % sys.argv[1]

x = T.vector()
print('begun', flush=True)
print(theano.function([x], Marked(theano.scalar.tanh)(x), mode=theano.Mode('c', None))([0.0]), flush=True)
'''


@pytest.fixture
def begin(tmp_path):
    """Return a function that starts a process which compiles by COMPILER, into a folder of this test."""
    compiler = tmp_path / 'compiler'
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    started = []

    def start(program, *words, jobs=1):
        flags = 'cxx=%s,base_compiledir=%s,floatX=float64,mgpu.compile_jobs=%d' % (
            compiler, tmp_path / 'compiled', jobs)
        started.append(subprocess.Popen([sys.executable, '-c', program, *words], stdout=subprocess.PIPE, text=True,
                                        env=dict(os.environ, THEANO_FLAGS=flags, TMPDIR=str(tmp_path))))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path, text='begun\n'):
    """Wait until COMPILER has noted an event."""
    end = time.monotonic() + 120
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < end, '%s does not become %r' % (path.name, text)
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_compile_at_the_same_time(begin, tmp_path):
    """One process at a time could compile: the second one waited until the first one's module was there."""
    slow = begin(PROGRAM, 'slow')
    wait_for(tmp_path / 'slow')
    quick = begin(PROGRAM, 'quick')
    assert quick.communicate(timeout=120)[0].split() == ['begun', '[0.]'] and slow.poll() is None
    (tmp_path / 'go').touch()
    assert slow.communicate(timeout=120)[0].split() == ['begun', '[0.]']


@pytest.mark.slow
def test_what_one_process_compiles_the_others_wait_for_and_load(begin, tmp_path):
    first = begin(PROGRAM, 'slow')
    wait_for(tmp_path / 'slow')
    second = begin(PROGRAM, 'slow')
    assert second.stdout.readline() == 'begun\n'
    time.sleep(1)  # long enough for it to begin to compile, too, if it did
    (tmp_path / 'go').touch()
    assert [process.communicate(timeout=120)[0].split()[-1] for process in (first, second)] == ['[0.]'] * 2
    assert (tmp_path / 'slow').read_text() == 'begun\n'


BEGINS_TWO = """
import theano_mgpu, theano, theano.tensor as T
from theano.tensor import elemwise

class Marked(elemwise.Elemwise):
    def c_support_code(self):
        return "// slow_marker"

x = T.vector()
outputs = [Marked(op)(x) for op in (theano.scalar.tanh, theano.scalar.cos)]
f = theano.function([x], outputs, mode=theano.Mode('vm', None))
print(f([0.0]), flush=True)
"""


def test_modules_of_a_function_are_compiled_at_the_same_time(begin, tmp_path):
    process = begin(BEGINS_TWO, jobs=2)
    wait_for(tmp_path / 'slow', 'begun\n' * 2)  # before the first module is there
    (tmp_path / 'go').touch()
    assert process.communicate(timeout=120)[0] == '[array([0.]), array([1.])]\n'
    assert (tmp_path / 'slow').read_text() == 'begun\n' * 2  # each was compiled once
    assert not glob.glob(str(tmp_path / 'theano_mgpu.*'))


@pytest.mark.parametrize('rank, jobs', [('0', 7), ('1', 1)])
def test_one_rank_of_a_host_compiles_ahead(monkeypatch, rank, jobs):
    for variable, value in zip(mpi_environment.MPIRUN.variables, [rank, '2', rank, '2']):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(theano.config.mgpu, 'compile_jobs', 7)
    comm_patches.leave_compiling_to_the_first_rank()
    assert theano.config.mgpu.compile_jobs == jobs


def test_an_error_of_the_compiler_is_that_of_theano(monkeypatch):
    """The error is the same whether a module was compiled ahead or not."""
    class Wrong(theano.tensor.elemwise.Elemwise):
        def c_support_code(self):
            return 'no code %s' % id(self)
    x = T.dvector()
    outputs = [Wrong(theano.scalar.tanh)(x), Wrong(theano.scalar.cos)(x)]
    with change_flags(**{'mgpu.compile_jobs': 2}), pytest.raises(Exception, match='Compilation failed') as caught:
        theano.function([x], outputs, mode=theano.Mode('vm', None))
    assert 'compiling the node' in str(caught.value)
    assert compilelock.get_lock.n_lock == 0  # Theano kept it, and other processes waited for minutes


def test_where_files_cannot_be_locked_it_compiles_all_the_same(monkeypatch):
    from theano_mgpu.compat import theano_compilation

    def lockf(*args):
        raise OSError('no locks available')
    monkeypatch.setattr(theano_compilation.fcntl, 'lockf', lockf)
    number = T.constant(time.time(), dtype='float64')  # no process has compiled code with it yet
    x = T.dscalar()
    found = theano.function([x], x * number, mode=theano.Mode('c', None))
    assert found(2.0) == 2.0 * number.data


# --- g++'s flags ---------------------------------------------------------------------------------

def flags_of_a_new_process(monkeypatch, **flags):
    monkeypatch.setattr(cmodule.GCC_compiler, 'march_flags', None)
    with change_flags(**{'gcc.cxxflags': '', **flags}):  # the flags of make test name a processor
        return cmodule.GCC_compiler.compile_args()


@pytest.mark.slow
def test_flags_of_the_processor_are_found_once(monkeypatch, tmp_path):
    """Another process reads them; on another processor, or with other flags, they are found again."""
    calls, popen = [], cmodule.subprocess_Popen
    monkeypatch.setattr(cmodule, 'subprocess_Popen',
                        lambda *args, **kwargs: (calls.append(args), popen(*args, **kwargs))[1])
    monkeypatch.setattr(type(theano.config), 'compiledir', str(tmp_path))

    def arguments(**flags):
        """Return the flags for g++ in a new process, and how often it has called g++ to find them."""
        calls.clear()
        return flags_of_a_new_process(monkeypatch, **flags), len(calls)

    found, n_calls = arguments()
    assert n_calls and any(flag.startswith('-march=') for flag in found)
    assert arguments() == (found, 0)
    other, _ = arguments(**{'gcc.cxxflags': '-DOTHER -march=x86-64'})
    assert set(other) - set(found) == {'-DOTHER', '-march=x86-64'}
    cpuinfo = tmp_path / 'cpuinfo'
    cpuinfo.write_text('model name: another\n\n')
    monkeypatch.setattr(processor, 'CPUINFO', str(cpuinfo))
    assert arguments() == (found, n_calls)
    monkeypatch.setattr(processor, 'CPUINFO', str(tmp_path / 'none'))
    assert arguments() == arguments() == (found, n_calls)


def test_flags_of_the_processor_that_cannot_be_kept_are_found_each_time(monkeypatch, tmp_path):
    """An import failed on a full disk, where the file was empty or could not be written."""
    for folder in (tmp_path, tmp_path / 'none'):
        monkeypatch.setattr(type(theano.config), 'compiledir', str(folder))
        for _ in range(2):
            assert any(flag.startswith('-march=') for flag in flags_of_a_new_process(monkeypatch))
            for path in tmp_path.iterdir():
                path.write_text('')
    assert len(list(tmp_path.iterdir())) == 1


def test_flags_that_theano_falls_back_to_are_not_kept(monkeypatch, tmp_path):
    """One failure of g++, on a full disk, say, would slow down all code that is compiled from then on."""
    monkeypatch.setattr(type(theano.config), 'compiledir', str(tmp_path))
    wrapper = tmp_path / 'g++'
    wrapper.write_text('#!/bin/sh\ncase "$*" in *"-E -v"*|*-march=core*) exec g++ "$@";; esac\nexit 1\n')
    wrapper.chmod(0o755)
    assert theano_cache.FALLBACKS.intersection(flags_of_a_new_process(monkeypatch, cxx=str(wrapper)))
    assert list(tmp_path.iterdir()) == [wrapper]


# --- The collector -------------------------------------------------------------------------------

def test_the_collector_rests_while_keys_are_read(monkeypatch):
    seen, cache, listdir = [], get_module_cache(), os.listdir

    def listed(path='.'):  # another thread may list a folder of its own
        return listdir(path) if path != cache.dirname else seen.append(gc.isenabled()) or []
    monkeypatch.setattr(os, 'listdir', listed)
    monkeypatch.setattr(cache, 'module_hash_to_key_data', {})
    cache.refresh(cleanup=False)
    assert seen == [False] and gc.isenabled()


def test_keys_are_read_without_devices(gpu2, tmp_path, monkeypatch):
    import pygpu
    registry = gpuarray_type._context_reg
    x = theano.scalar.float32()
    x.tag.test_value = pygpu.zeros((), 'float32', context=registry['dev0'])
    key = (1,), (Composite([x], [theano.scalar.tanh(x) * 2]), 'md5:0')
    entry = tmp_path / 'tmp1'
    entry.mkdir()
    (entry / 'm1.so').touch()
    data = cmodule.KeyData({key}, 'hash', str(entry / 'key.pkl'), str(entry / 'm1.so'))
    data.save_pkl()
    monkeypatch.delitem(registry, 'dev0')
    assert key in cmodule.ModuleCache(str(tmp_path)).entry_from_key
    assert 'dev0' not in registry


def test_the_collector_rests_while_a_function_is_compiled():
    seen = []

    class Looking(theano.gof.vm.VM_Linker):
        def accept(self, *args, **kwargs):
            seen.append(gc.isenabled())
            return super().accept(*args, **kwargs)
    x = T.dscalar()
    assert theano.function([x], x + 1, mode=theano.Mode(Looking(use_cloop=False), None))(1.0) == 2
    assert seen and not any(seen) and gc.isenabled()


def test_a_pause_within_a_pause():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
