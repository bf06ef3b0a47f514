"""Unchanged scripts in the style of the Deep Learning Tutorials and published projects (theano_scripts).

Each script prints figures. It has to print the same ones as in plain Theano when `theano-mgpu run` divides its
functions over contexts, and when `theano-mgpu launch` runs it in two processes.
"""
import math
import os
import re

from theano_mgpu.utils.flag_text import join_flags, parse_flags

import pytest
from support.devices import context_map
from support.processes import python
from support.search_path import PROGRAMS

FOLDER = str(PROGRAMS / 'theano_scripts')
# Each script with its arguments.
CASES = ['logistic_sgd', 'logistic_sgd ragged', 'convolutional_mlp', 'SdA', 'rbm', 'rbm cd', 'lstm', 'lstm rmsprop',
         'lasagne_mnist mlp', 'lasagne_mnist mlp bn', 'lasagne_mnist cnn', 'lasagne_mnist cnn bn',
         'lasagne_mnist custom_mlp:2,24,.1,.3', 'no_batch', 'coupled', 'monitors',
         'word2vec sgd', 'word2vec adagrad', 'word2vec set', 'text_cnn nonstatic', 'text_cnn static', 'captions',
         'semi_supervised_gan separate', 'semi_supervised_gan joined']
# Scripts of `make test`; the others take longer, or show the same as one of these.
QUICK = ('logistic_sgd ragged',)
# Divide whatever can be divided, without measuring.
DIVIDE = ['--always']
# Functions that stay on one device, with a part of the reason; every other one is divided.
NO_BATCH, COUPLED = 'no batch enters it', 'cannot be computed in parts'
STAY = {'no_batch.py:17': NO_BATCH, 'no_batch.py:30': NO_BATCH, 'no_batch.py:42': NO_BATCH, 'sample_fn': NO_BATCH,
        'samplefun': NO_BATCH,
        'norm': NO_BATCH, 'adadelta_f_update': NO_BATCH, 'rmsprop_f_update': NO_BATCH,
        'process': COUPLED}
# Relative. Ten digits are printed: the last of them may be rounded either way.
TOLERANCES = {'float32': 1e-4, 'float64': 2e-9}
# Run as Python would, but for the fixes without which Theano does not import.
PLAIN = 'import theano_mgpu, os, runpy, sys; sys.argv = sys.argv[1:]; ' \
    'sys.path[0] = os.path.dirname(sys.argv[0]); runpy.run_path(sys.argv[0], run_name="__main__")'
NUMBER = re.compile(r'[-+]?\b\d+(?:\.\d+)?(?:e[-+]?\d+)?\b|[-+]?\b(?:nan|inf)\b')

pytestmark = pytest.mark.needs_compiler


def each_case(quick=()):
    """Parametrise a test by the scripts; scripts that are not in `quick` are slow."""
    return pytest.mark.parametrize('case', [case if case in quick else pytest.param(case, marks=pytest.mark.slow)
                                            for case in CASES])


def run_python(words, case, dtype, compiles=False):
    """Run a script by `python WORDS SCRIPT ARGUMENTS`, without contexts in the flags; return (stdout, stderr)."""
    flags = parse_flags(os.environ.get('THEANO_FLAGS', ''))
    flags.pop('contexts', None)
    flags['floatX'] = dtype
    if case in QUICK and not compiles:  # that would take most of the time; GPUs need it
        flags.update(cxx='', optimizer='fast_compile')
    name, *arguments = case.split()
    done = python(*words, os.path.join(FOLDER, name + '.py'), *arguments, folder=FOLDER, flags=join_flags(flags),
                  PYTHONDONTWRITEBYTECODE='1')
    return done.stdout, done.stderr


@pytest.fixture(scope='module')
def reference():
    """Return a function that returns the output of a script in plain Theano; it runs a script once for each floatX."""
    found = {}

    def run(case, dtype):
        if (case, dtype) not in found:
            found[case, dtype] = run_python(['-c', PLAIN], case, dtype)[0]
        return found[case, dtype]
    return run


def figures(line):
    """Return the numbers in a line.

    >>> figures('epoch 1, cost -0.5e-05, W1 nan')
    [1.0, -5e-06, nan]
    """
    return [float(number) for number in NUMBER.findall(line)]


def assert_same_figures(output, expected, tolerance):
    """Check that two outputs have the same lines, with the same numbers to within a relative tolerance."""
    lines, expected_lines = output.splitlines(), expected.splitlines()
    for number, (line, wanted) in enumerate(zip(lines, expected_lines), 1):
        message = 'line %d is %r, in plain Theano %r' % (number, line, wanted)
        assert NUMBER.sub('#', line) == NUMBER.sub('#', wanted), message
        assert figures(line) == pytest.approx(figures(wanted), rel=tolerance, abs=1e-12), message
    assert len(lines) == len(expected_lines), 'the output ends after %d lines of %d' % (len(lines), len(expected_lines))


def summary(stderr):
    """Return the summary that `run` prints at exit: (name, contexts or 'host', reason) for each function."""
    rows = stderr[stderr.index('\nFUNCTION'):].splitlines()[2:]
    columns = [re.split('  +', row) for row in rows if '  ' in row]
    return [(row[0], row[1], row[-1]) for row in columns]


def assert_divided(stderr, contexts, alone=False):
    """Check that each function except `STAY` ran on all contexts; one context `alone` computes coupled samples, too."""
    ran = summary(stderr)
    assert ran
    for name, where, why in ran:
        if name in STAY and not (alone and STAY[name] == COUPLED):
            assert len(where.split()) == 1 and STAY[name] in why, (name, where, why)
        else:
            assert len(where.split()) == contexts and where != 'host', (name, where, why)


# --- The scripts ---------------------------------------------------------------------------------

def test_every_script_is_plain_theano():
    """Each script is written as by a user who does not know of this package."""
    for name in os.listdir(FOLDER):
        if name.endswith('.py'):
            with open(os.path.join(FOLDER, name)) as file:
                text = file.read()
            assert '\nimport theano\n' in text and 'mgpu' not in text, name


@each_case()
def test_the_figures_are_finite_and_those_of_either_precision(case, reference):
    """Single precision alone changes figures by less than the tolerance; a larger difference is due to the division."""
    single, double = reference(case, 'float32'), reference(case, 'float64')
    numbers = [number for line in double.splitlines() for number in figures(line)]
    assert len(numbers) > 20 and all(math.isfinite(number) for number in numbers)
    assert_same_figures(single, double, TOLERANCES['float32'])


# --- Over contexts, and over processes -----------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('contexts, dtype', [
    (2, 'float64'),
    (2, 'float32'),
    (1, 'float64'),
    (3, 'float64'),
])
@each_case(QUICK)
def test_on_contexts_of_one_process(case, contexts, dtype, reference):
    words = ['-m', 'theano_mgpu', 'run', '--contexts', context_map('cpu', contexts)] + DIVIDE
    output, stderr = run_python(words, case, dtype)
    assert_same_figures(output, reference(case, dtype), TOLERANCES[dtype])
    assert_divided(stderr, contexts, alone=contexts == 1)


@pytest.mark.mpi
@pytest.mark.slow
@each_case()
def test_in_two_processes(case, reference):
    words = ['-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--contexts', 'a->cpu'] + DIVIDE
    output, stderr = run_python(words, case, 'float64')
    assert_same_figures(output, reference(case, 'float64'), TOLERANCES['float64'])
    assert_divided(stderr, 1)


@pytest.mark.opencl
@pytest.mark.slow
@each_case()
def test_on_two_gpus(case, reference):
    """The devices are OpenCL devices; in `make test-cuda`, CUDA devices."""
    output, stderr = run_python(['-m', 'theano_mgpu', 'run', '--contexts', context_map('gpu', 2)] + DIVIDE, case,
                                'float32', compiles=True)
    assert_same_figures(output, reference(case, 'float32'), TOLERANCES['float32'])
    assert_divided(stderr, 2)
