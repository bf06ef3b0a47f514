"""Theano's folder of compiled code: what processes wait for, and how fast they read it."""
import gc
import os
import subprocess
import sys
import time

import theano_mgpu  # noqa: F401  before theano
from theano_mgpu.utils.collector import collector_paused

import pytest
import theano
import theano.tensor as T
from theano.gof.cc import get_module_cache

pytestmark = pytest.mark.needs_compiler
# A compiler that notes what it begins, and for a module with "slow" in its code waits for a file.
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
    """A function that starts a process which compiles a module, 'slow' or 'quick'."""
    compiler = tmp_path / 'compiler'
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    started = []

    def start(name):
        flags = 'cxx=%s,base_compiledir=%s,floatX=float64' % (compiler, tmp_path / 'compiled')
        started.append(subprocess.Popen([sys.executable, '-c', PROGRAM, name], stdout=subprocess.PIPE, text=True,
                                        env=dict(os.environ, THEANO_FLAGS=flags)))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, 'no process has begun to compile'
        time.sleep(0.05)


def test_two_processes_compile_at_the_same_time(begin, tmp_path):
    """One process at a time compiled: the second one waited until the first one's module was there."""
    slow = begin('slow')
    wait_for(tmp_path / 'slow')
    quick = begin('quick')
    assert quick.communicate(timeout=120)[0].split() == ['begun', '[0.]'] and slow.poll() is None
    (tmp_path / 'go').touch()
    assert slow.communicate(timeout=120)[0].split() == ['begun', '[0.]']


def test_what_one_process_compiles_the_others_wait_for_and_load(begin, tmp_path):
    first = begin('slow')
    wait_for(tmp_path / 'slow')
    second = begin('slow')
    assert second.stdout.readline() == 'begun\n'
    time.sleep(1)  # long enough for it to begin to compile, too, if it did
    (tmp_path / 'go').touch()
    assert [process.communicate(timeout=120)[0].split()[-1] for process in (first, second)] == ['[0.]'] * 2
    assert (tmp_path / 'slow').read_text() == 'begun\n'


def test_where_files_cannot_be_locked_it_compiles_all_the_same(monkeypatch):
    from theano_mgpu.patches import theano_cache

    def lockf(*args):
        raise OSError('no locks available')
    monkeypatch.setattr(theano_cache.fcntl, 'lockf', lockf)
    number = T.constant(time.time(), dtype='float64')  # no process has compiled code with it yet
    x = T.dscalar()
    found = theano.function([x], x * number, mode=theano.Mode('c', None))
    assert found(2.0) == 2.0 * number.data


# --- The collector -------------------------------------------------------------------------------

def test_the_collector_rests_while_keys_are_read(monkeypatch):
    from theano.gof import cmodule
    seen = []
    monkeypatch.setattr(cmodule.os, 'listdir', lambda path: seen.append(gc.isenabled()) or [])
    monkeypatch.setattr(get_module_cache(), 'module_hash_to_key_data', {})
    get_module_cache().refresh(cleanup=False)
    assert seen == [False] and gc.isenabled()


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
