"""Bugs that were found and fixed, each under its symptom: waiting for compiled code."""
import contextlib
import os
import socket
import threading
import types

import theano_mgpu as mgpu
from theano_mgpu.runtime import compiler
from theano_mgpu.utils import progress, rank_process

import numpy as np
import pytest
import theano
import theano.tensor as T
from keras import backend as K
from support.modes import PYTHON
from support.processes import python
from theano.configparser import change_flags
from theano.gof import Optimizer, cmodule, compilelock

pytestmark = pytest.mark.verified
BATCH = np.ones((3, 2), 'float32')


@pytest.fixture
def notes(monkeypatch):
    """Return the notes on long work, which is all work here; `heard` is set with the first one."""
    said = types.SimpleNamespace(texts=[], heard=threading.Event())
    monkeypatch.setattr(progress, 'PATIENCE', 0)
    monkeypatch.setattr(progress, '_told', set())
    monkeypatch.setattr(rank_process, 'say', lambda text: (said.texts.append(text), said.heard.set()))
    return said


def test_waiting_for_compiled_code_is_one_note(tmp_path, monkeypatch, caplog, notes):
    """Two processes that compiled logged two lines several times a second: "Waiting for existing lock by process"."""
    folder, turns = tmp_path / 'lock_dir', []

    def taken_over(*limits):
        turns.append(limits)
        if len(turns) < 5:
            new = tmp_path / 'new'  # a file that is just being written has no owner that a note could name
            new.write_text('%d_%d_%s' % (os.getppid(), len(turns), socket.gethostname()))
            new.replace(folder / 'lock')
        else:
            notes.heard.wait(60)
            (folder / 'lock').unlink()
            folder.rmdir()
        return 0
    folder.mkdir()
    (folder / 'lock').write_text('%d_0_%s' % (os.getppid(), socket.gethostname()))
    monkeypatch.setattr(compilelock, 'random', types.SimpleNamespace(uniform=taken_over, randint=lambda *limits: 1))
    compilelock.lock(str(folder))
    compilelock.Unlocker(str(folder)).unlock()
    text, = notes.texts
    assert 'waiting for process %d on %s' % (os.getppid(), socket.gethostname()) in text
    assert 'goes on by itself' in text and 'end it, and remove the folder %s' % folder in text
    assert not caplog.records


def test_a_long_compilation_says_what_it_compiles_and_for_which_contexts(cpu2, monkeypatch, notes):
    """A large model took a minute before its first step, without a word; then each of its parts had a note."""
    compile_for = compiler.compile_for

    def slow(*args, **kwargs):
        with progress.working():
            assert notes.heard.wait(20)
        return compile_for(*args, **kwargs)
    monkeypatch.setattr(compiler, 'compile_for', slow)
    x = T.matrix('x')
    for _ in range(2):
        mgpu.function([x], x * 2, mode=PYTHON, name='twice')
    notes.heard.clear()
    mgpu.Predictor([x], x * 2, mode=PYTHON).close()
    assert notes.texts == ['note: compiling %s for host0, host1 takes a while: its graph is being optimised' % name
                           for name in ('twice', 'predict')]


def test_a_long_compilation_by_plain_theano_is_noted(cpu2, notes):
    """Under `enable`, which first times plain Theano, a script compiled for 97 s without a word."""
    class Slow(Optimizer):
        def apply(self, graph):
            assert notes.heard.wait(20)
    x = T.matrix('x')
    mgpu.enable()
    try:
        theano.function([x], x * 2, mode=theano.Mode('py', Slow()), name='doubled')
    finally:
        mgpu.disable()
    assert notes.texts == ['note: compiling doubled takes a while: its graph is being optimised']


def test_no_note_says_that_all_modules_are_done(notes):
    """Notes said "3 of 3 modules of C code are done", and "6 of 5"."""
    with progress.compiling('part'), progress.modules_bar(2) as bar:
        for said in 'note: compiling part takes a while: 1 of 2 modules of C code are done, and are kept for the ' \
                'next start', None:
            bar.update(1)
            with progress.working():
                assert said is None or notes.heard.wait(20)
            progress._told.clear()
            assert notes.texts == [said] * bool(said)
            notes.texts.clear()


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_no_more_modules_are_done_than_there_are(tmp_path):
    """A module that was not foreseen was counted, too."""
    code = """if True:
        import theano_mgpu as mgpu, theano.tensor as T
        from theano_mgpu.compat.theano_compilation import Ahead
        from theano_mgpu.utils import progress
        bars, make, Ahead._missing = [], progress.passing_bar, lambda *args: []
        progress.passing_bar = lambda *args: bars.append(make(*args)) or bars[-1]
        x = T.vector('x')
        mgpu.function([x], T.nnet.sigmoid(x).sum() + 2, contexts=mgpu.init('a->cpu'))
        print([(bar.n, bar.total) for bar in bars])
    """
    flags = 'compile.wait=1,mgpu.compile_jobs=2,cxx=g++,base_compiledir=%s' % tmp_path
    assert python('-c', code, flags=flags).stdout == '[(1, 1)]\n'


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_what_the_caches_have_is_not_noted_however_long_it_takes(tmp_path):
    """A note came on each warm start of a busy machine: it told of the time, whatever the time was for."""
    script = tmp_path / 'script.py'
    script.write_text("""if True:
        import time, theano_mgpu as mgpu, theano.tensor as T
        from theano_mgpu.utils import progress
        from theano.gof import cmodule
        progress.PATIENCE, load = .1, cmodule.dlimport
        cmodule.dlimport = lambda *args: time.sleep(.3) or load(*args)  # on a busy machine
        x = T.matrix('x')
        f = mgpu.function([x], T.nnet.softmax(T.tanh(x) + 2), contexts=mgpu.init('a->cpu'))
        print(f([[1., 2.]]).shape)
    """)
    flags = 'floatX=float32,traceback.limit=8,mgpu.keep_graphs=True,base_compiledir=%s' % (tmp_path / 'compiled')
    cold, warm = [python(script, flags=flags).stderr for _ in range(2)]
    assert cold.count('takes a while') == 1 and 'compiling script.py:8 for a takes a while: ' in cold and not warm


@pytest.mark.parametrize('make, is_divided', [
    (lambda x: K.function([x], [x * 2]), True), (lambda x: theano.function([x], x * 2), True),
    (lambda x: K.function([], [K.variable(1.) * 2]), False), (lambda x: K.eval(K.variable(1.) * 2), False)],
    ids=['K.function', 'theano.function', 'no input', 'K.eval'])
def test_a_function_without_a_name_is_named_after_the_line_of_the_script(make, is_divided, cpu2, monkeypatch):
    """A note said "compiling .../keras/backend/theano_backend.py:1417 for a, b takes a while"."""
    titles, x = [], T.matrix('x')
    monkeypatch.setattr(progress, 'compiling', lambda name, on='': titles.append('compiling ' + name + on)
                        or contextlib.nullcontext())
    report = mgpu.enable(always=True)
    try:
        with change_flags(mode='FAST_COMPILE'):
            function = make(x)
            line = 'compiling %s:%d' % (os.path.basename(__file__), make.__code__.co_firstlineno)
            assert set(titles) == {line}
            if is_divided:
                function([BATCH] if hasattr(function, 'function') else BATCH)
                assert titles[-1] == line + ' for host0, host1'
                copy = getattr(function, 'function', function).copy()
                copy(BATCH)
                assert titles[-1] == line + ' copy for host0, host1'
    finally:
        mgpu.disable()
    names = ['compiling ' + usage.name for usage in report.usages]
    assert names[-2:] == [line, line + ' copy'] if is_divided else not names


@pytest.mark.slow
def test_c_code_of_a_gpu_is_the_same_in_each_process():
    """Processes that compiled pooling left "the same cache key is associated to different modules"."""
    script = 'import theano_mgpu; from theano.gpuarray.pool import GpuPool; print(GpuPool(True).params_type.name)'
    first, second = [python('-c', script).stdout for _ in range(2)]
    assert first == second and first.startswith('_Params_')


class Starting:
    """A part of a key; while it is written, a process starts, reads all keys, and cleans up."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        cmodule.ModuleCache(self.folder)
        return Starting, (self.folder,)

    def __eq__(self, other):
        return isinstance(other, Starting)

    def __hash__(self):
        return 1


def test_compiled_code_stays_while_another_process_starts(tmp_path):
    """Compiled code was deleted in use: "No such file or directory: '.../key.pkl'"; then each use failed."""
    folder, key = tmp_path / 'tmp1', ((1,), ('hash:1',))
    folder.mkdir()
    module, keys_file = folder / ('m1.' + cmodule.get_lib_extension()), folder / 'key.pkl'
    module.touch()
    data = cmodule.KeyData({key}, 'hash', str(keys_file), str(module))
    data.save_pkl()
    data.add_key(((1,), ('hash:1', Starting(str(tmp_path)))))
    assert sorted(os.listdir(folder)) == ['key.pkl', module.name]
    assert cmodule.ModuleCache(str(tmp_path)).entry_from_key == dict.fromkeys(data.keys, str(module))
