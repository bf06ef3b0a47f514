"""Progress bars: in a terminal, in a notebook, and silence elsewhere."""
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import types

import theano_mgpu as mgpu
from theano_mgpu.utils import progress

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.launch import INTERPRETED
from support.modes import PYTHON

SCRIPT = """
import theano_mgpu as mgpu
import numpy as np, theano, theano.tensor as T
mgpu.init('a->cpu;b->cpu')
x, w = T.matrix('x'), theano.shared(np.zeros(2, 'float32'), name='w')
loss = T.sqr(T.dot(x, w) - 1).mean()
step = mgpu.training_function([x], loss, [w], lambda gradients: {w: w - np.float32(0.1) * gradients[0]}, name='train')
batch = np.eye(2, dtype='float32')
assert len(list(step.over([[batch]] * 7, progress='epoch 1'))) == 7
assert len(list(step.over(iter([batch] * 5), progress=True))) == 5
step.verify(batch)
with mgpu.Predictor([x], T.dot(x, w)) as predictor:
    predictor.predict(np.zeros((100, 2), 'float32'), verbose=1)
"""


def in_terminal(code, **environment):
    """Return a script's output to stderr, which is a pseudo-terminal of 100 columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack('4H', 24, 100, 0, 0))
    process = subprocess.Popen([sys.executable, '-c', code], stderr=its, stdout=subprocess.DEVNULL,
                               env=dict(os.environ, **environment))
    os.close(its)
    shown = b''
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        shown += read
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


@pytest.mark.slow
def test_bars_in_a_terminal():
    """The script shows bars for epochs with and without a known length, for `verify`, and for prediction."""
    shown = in_terminal(SCRIPT, THEANO_FLAGS=INTERPRETED)
    assert 'epoch 1: 100%' in shown and '7/7 [' in shown and 'loss 1' in shown
    assert '5 batches [' in shown and 'verify:   0%' in shown
    assert '100/100 [' in shown and 'samples/s' in shown


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_modules_that_are_compiled_are_counted(tmp_path):
    shown = in_terminal(SCRIPT, THEANO_FLAGS='floatX=float32,mgpu.compile_jobs=2,base_compiledir=%s' % tmp_path)
    assert 'compiling train for a, b:' in shown and ' modules/s' in shown or 's/ modules' in shown
    assert '0%|' in shown


def step_of(contexts):
    contexts('cpu', 2)
    x, w = T.matrix('x'), theano.shared(np.zeros(2, theano.config.floatX))
    return mgpu.training_function([x], T.sqr(T.dot(x, w) - 1).mean(), [w], lambda gradients: {w: w - gradients[0]},
                                  mode=PYTHON)


def test_elsewhere_nothing_is_shown(contexts, capfd):
    step, batch = step_of(contexts), np.eye(2, dtype=theano.config.floatX)
    assert len(list(step.over([[batch]] * 3, progress=True))) == 3
    step.verify(batch)
    captured = capfd.readouterr()
    assert '3/3' not in captured.err and 'verify' not in captured.err and not captured.out


@pytest.mark.parametrize('terminal, notebook, rank, expected', [
    (True, False, '0', True), (False, False, '0', False), (False, True, '0', True), (True, True, '1', False)])
def test_where_bars_are_shown(terminal, notebook, rank, expected, monkeypatch):
    shell = types.SimpleNamespace(kernel=None) if notebook else types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, 'IPython', types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: terminal)
    for name, value in ('RANK', rank), ('LOCAL_RANK', rank), ('SIZE', '2'):
        monkeypatch.setenv('OMPI_COMM_WORLD_' + name, value)
    assert progress.is_shown() == expected


def test_a_script_may_have_replaced_stderr(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, types.SimpleNamespace(write=print)):
        monkeypatch.setattr(sys, 'stderr', stream)
        assert not progress.is_shown()


def test_a_bar_without_tqdm_is_an_error_only_if_it_was_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    with pytest.raises(mgpu.MgpuError, match='pip install tqdm'):
        progress.bar(3, True)
    monkeypatch.setattr(progress, 'is_shown', lambda: True)
    with progress.passing_bar(3, 'modules', 'compiling') as bar:
        bar.update(1)


def test_notebooks_show_reports_as_they_are_printed(contexts):
    step = step_of(contexts)
    for report in (mgpu.audit(step), step.verify(np.eye(2, dtype=theano.config.floatX))):
        shown = report._repr_html_()
        assert shown.startswith('<pre>') and shown.count('\n') == str(report).count('\n') > 2
        assert '<' not in shown[5:-6]


def test_the_timer_of_a_note_leaves_no_thread():
    """A thread more than the script's own kept processes from being forked, for a moment after a compilation."""
    before = threading.active_count()
    for _ in range(500):
        with progress.note_if_long(str):
            pass
        assert threading.active_count() <= before
