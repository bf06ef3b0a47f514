"""Functions and assembly of Theano's ops on the host, as g++ compiles them for users."""
import platform
import subprocess

import pytest
import theano
from theano.gof import CLinker, FunctionGraph
from theano.gof.cmodule import std_include_dirs

x86_64 = pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='it reads instructions of x86-64')


def one_module(inputs, outputs, optimizer=None, linker='c'):
    """Return a function whose ops are one module of C++, compiled for this machine: one call of g++, not one an op."""
    with theano.configparser.change_flags(**{'gcc.cxxflags': '-march=native'}):
        return theano.function(inputs, outputs, mode=theano.Mode(linker, optimizer))


def assembly(node, path, march='x86-64'):
    """Return the assembly that g++ makes of an op, for any x86-64 or another processor."""
    linker = CLinker().accept(FunctionGraph(node.inputs, node.outputs, clone=True))
    source = path / 'op.cpp'
    source.write_text(str(linker.get_dynamic_module().code()))
    arguments = [each for each in linker.compile_args() if not each.startswith('-ma')]
    arguments += ['-I' + folder for folder in [*std_include_dirs(), *linker.header_dirs()]]
    subprocess.run([theano.config.cxx, *arguments, '-O3', '-march=' + march, '-fPIC', '-w', '-S', source,
                    '-o', path / 'op.s'], check=True)
    return (path / 'op.s').read_text()


def use_theanos_own(monkeypatch, op, names):
    """Take away the replacements of some methods of an op for a test."""
    for name in names:
        monkeypatch.setattr(op, name, getattr(op, name).__wrapped__)
