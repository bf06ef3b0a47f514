"""The loop of scan in C: it compiles on every Python, and gives the results of the loop in Python."""
import importlib
import os
import subprocess
import sys
import sysconfig
import warnings

from theano_mgpu.compat import import_hooks, numpy2, theano_scan

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof.cmodule import GCC_compiler

pytestmark = pytest.mark.needs_compiler
FLAGS = ['ENSUREARRAY', 'ENSURECOPY', 'ALIGNED', 'WRITEABLE', 'UPDATE_ALL', 'C_CONTIGUOUS', 'F_CONTIGUOUS']  # of NumPy


def code_for_the_compiler(monkeypatch):
    """Return the C code of the loop as the compiler gets it."""
    monkeypatch.setattr(GCC_compiler, 'compile_str', staticmethod(lambda name, code, **_: code))
    with open(os.path.join(theano.__path__[0], 'scan_module', 'c_code', 'scan_perform.c')) as file:
        code = file.read()
    with theano_scan.build_the_loop():
        assert GCC_compiler.compile_str('another', code) == code
        return code, GCC_compiler.compile_str('scan_perform', code)


def compiles(code, path):
    path.write_text(code)
    command = ['g++', '-fsyntax-only', '-w', '-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION',
               *('-DNPY_%s=NPY_ARRAY_%s' % (flag, flag) for flag in FLAGS),
               *numpy2.OPTIONS * numpy2.is_needed(), '-I' + sysconfig.get_path('include'), '-I' + np.get_include(),
               str(path)]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def test_the_loop_is_compiled(monkeypatch, tmp_path):
    theirs, ours = code_for_the_compiler(monkeypatch)
    assert compiles(ours, tmp_path / 'ours.cpp')
    assert ours.count('PyLong_FromVoidPtr(PyArray_DATA') == 5  # addresses, not elements, are compared
    assert 'Py_SIZE(x) < 0' in theirs and 'Py_SIZE(x) < 0' not in ours  # aborted a process of Python 3.12
    if sys.version_info >= (3, 11):
        assert not compiles(theirs, tmp_path / 'theirs.cpp')


def test_a_loop_that_cannot_be_compiled_runs_in_python_with_a_warning(monkeypatch):
    monkeypatch.setattr(import_hooks, '_refused', {})
    monkeypatch.delitem(sys.modules, theano_scan.LOOP, raising=False)
    with pytest.raises(ImportError), pytest.warns(UserWarning, match='the loop runs in Python.*Compilation failed'):
        with theano_scan.build_the_loop():
            raise Exception('Compilation failed\nwith many lines')
    for _ in range(2):  # it is not tried again
        with pytest.raises(ImportError, match='the loop runs in Python'):
            importlib.import_module(theano_scan.LOOP)


def test_without_a_compiler_there_is_no_warning(monkeypatch, recwarn):
    monkeypatch.setattr(import_hooks, '_refused', {})
    with pytest.raises(ImportError, match='no c compiler'), theano_scan.build_the_loop():
        raise ImportError("no c compiler, can't compile cython code")
    assert not recwarn and not import_hooks._refused


def test_sizes_that_numpy_has_changed_are_no_warning(recwarn):
    with theano_scan.build_the_loop():
        warnings.warn('numpy.broadcast size changed, may indicate binary incompatibility', RuntimeWarning, stacklevel=1)
        warnings.warn('another', UserWarning, stacklevel=1)
    assert [str(each.message) for each in recwarn] == ['another']


def loops():
    """Return inputs, and results of loops of each kind, with gradients."""
    x, w = T.fmatrix(), T.fmatrix()
    hidden, _ = theano.scan(lambda row, before: T.tanh(row + T.dot(before, w)), sequences=x, outputs_info=[x[0]])
    two_back, _ = theano.scan(lambda a, b: (a * .5 + b).astype('float32'),
                              outputs_info=[dict(initial=x[:2], taps=[-2, -1])], n_steps=4)
    until, _ = theano.scan(lambda s: (s + 1, theano.scan_module.until(s.sum() > 9)), outputs_info=[x[0] * 0], n_steps=9)
    last = theano.scan(lambda s: s * w.sum(), outputs_info=[x[1]], n_steps=5)[0][-1]
    return [x, w], [hidden, two_back, until, last, *T.grad(hidden.sum() + two_back.sum() + last.sum(), [x, w])]


@pytest.mark.slow  # it compiles many small ops
def test_results_are_those_of_the_loop_in_python():
    random = np.random.RandomState(0)
    values = random.randn(7, 3).astype('float32'), random.randn(3, 3).astype('float32')
    results = []
    for linker in ('cvm', 'vm'):  # in C, and in Python
        inputs, outputs = loops()
        results.append(theano.function(inputs, outputs, mode=theano.Mode(linker, 'fast_run'))(*values))
    assert sys.modules[theano_scan.LOOP].perform
    for ours, pythons in zip(*results):
        np.testing.assert_array_equal(ours, pythons)


def test_an_error_of_a_step_names_its_op():
    x = T.fmatrix()
    f = theano.function([x], theano.scan(lambda row: T.dot(row, T.ones((4, 2), 'float32')), sequences=x)[0])
    with pytest.raises(ValueError, match='[Ss]hape|aligned|mismatch'):
        f(np.zeros((2, 3), 'float32'))


@pytest.mark.slow
def test_a_loop_of_more_than_500_outputs():
    x = T.fscalar()
    outputs, _ = theano.scan(lambda: [x + i for i in range(600)], n_steps=2)
    results = theano.function([x], outputs, mode=theano.Mode('cvm', None))(1)
    np.testing.assert_array_equal(results, np.repeat(np.arange(1, 601)[:, None], 2, axis=1))
