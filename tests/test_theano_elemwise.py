"""Elementwise ops on the host: vectorised, and the same results bit by bit."""
import platform
import subprocess

from theano_mgpu.patches.theano_elemwise import PATCHED

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof import CLinker, FunctionGraph
from theano.gof.cmodule import std_include_dirs
from theano.tensor.elemwise import Elemwise

pytestmark = pytest.mark.needs_compiler
f32 = np.float32


def adam():
    """Inputs and new values of Keras's Adam."""
    p, m, v, g = T.fvectors('pmvg')
    new_m, new_v = f32(.9) * m + f32(.1) * g, f32(.999) * v + f32(.001) * T.sqr(g)
    new_p = p - f32(.01) * new_m / (T.sqrt(T.clip(new_v, f32(0), f32(np.inf))) + f32(1e-7))
    return [p, m, v, g], [new_p, new_m, new_v]


def compiled(options):
    with theano.configparser.change_flags(**{'gcc.cxxflags': options}):
        inputs, outputs = adam()
        borrowed = [theano.In(variable, mutable=True, borrow=True) for variable in inputs]
        return theano.function(borrowed, outputs, mode=theano.Mode('cvm', 'fast_run'))


def assembly(node, path):
    """What g++ makes of an op, for any x86-64."""
    linker = CLinker().accept(FunctionGraph(node.inputs, node.outputs, clone=True))
    source = path / 'op.cpp'
    source.write_text(str(linker.get_dynamic_module().code()))
    arguments = [each for each in linker.compile_args() if not each.startswith('-m')]
    arguments += ['-I' + folder for folder in [*std_include_dirs(), *linker.header_dirs()]]
    subprocess.run([theano.config.cxx, *arguments, '-O3', '-march=x86-64', '-fPIC', '-w', '-S', source,
                    '-o', path / 'op.s'], check=True)
    return (path / 'op.s').read_text()


@pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='it reads instructions of x86-64')
def test_a_loop_is_vectorised(tmp_path, monkeypatch):
    nodes = compiled('').maker.fgraph.apply_nodes
    node, = [node for node in nodes if 'sqrt' in str(node.op)]
    assert 'sqrtps' in assembly(node, tmp_path)
    for name in PATCHED:
        monkeypatch.setattr(Elemwise, name, getattr(Elemwise, name).__wrapped__)
    assert 'sqrtps' not in assembly(node, tmp_path)


def test_results_stay_the_same_bit_by_bit(monkeypatch):
    vectorised = compiled('-march=native')
    for name in PATCHED:
        monkeypatch.setattr(Elemwise, name, getattr(Elemwise, name).__wrapped__)
    plain = compiled('-march=native')
    for n in (0, 1, 7, 16, 1003):
        given = np.random.RandomState(n).randn(4, n).astype('float32')
        given[2] = abs(given[2])
        strided = np.repeat(given, 2, axis=1)[:, ::2]
        expected = plain(*given.copy())
        for values in (given.copy(), strided):  # an output may take the memory of an input
            for found, each in zip(vectorised(*values), expected):
                np.testing.assert_array_equal(found, each)
