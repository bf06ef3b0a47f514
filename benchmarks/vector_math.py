#!/usr/bin/env python
"""Functions such as exp and tanh in elementwise loops on the host, by glibc's libmvec and by libm.

Both kinds of loops (theano_mgpu/compat/vector_math.py) take turns, a block of calls each, over one array of float32;
ratios are medians over the rounds (lowest to highest). The table has PyTorch, too, where it is installed. A second
table has training steps of plain Theano: a batch of an LSTM, and the update by Adam.

  libm, libmvec, PyTorch  nanoseconds an element, by one thread
  of libm's               time of libmvec's loop, in parts of the time of libm's loop
  strided                 the same in the columns of a matrix, as in the gates of an LSTM
  ulp, libm's             largest error in units of the last place: of ours over the values, of Theano's own C code over
                          every 16th of them
  special                 values at which NaN, infinity, a zero or a sign is other than libm's
  position                values whose result alone is other than in a vector, of those that are special or every 16th
  ms                      a training step with libmvec

Examples:

  python benchmarks/vector_math.py
  python benchmarks/vector_math.py --all --functions tanh --batch-sizes
"""
import ctypes
import functools
import os
import subprocess
import sys
import tempfile

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu  # noqa: F401  Theano as it patches it
from theano_mgpu.compat import vector_math
from theano_mgpu.utils.tables import table

import numpy as np
import theano
import theano.tensor as T
from models import adam, lstm
from turns import WARM_UP, make_parser, ratio, seconds, spread, take_turns

EXPONENT = np.float32(2.7)
# Of each function: Theano's, PyTorch's, and C++ code of float32 by libm, and of float64.
FUNCTIONS = {
    'exp': (T.exp, 'exp', 'std::exp(x)', 'std::exp(x)'),
    'log': (T.log, 'log', 'std::log(x)', 'std::log(x)'),
    'tanh': (T.tanh, 'tanh', 'std::tanh(x)', 'std::tanh(x)'),
    'sigmoid': (T.nnet.sigmoid, 'sigmoid',
                'x < -88.0f ? 0.0f : x > 15.0f ? 1.0f : 1.0f / (1.0f + std::exp(-x))', '1 / (1 + std::exp(-x))'),
    'softplus': (T.nnet.softplus, 'nn.functional.softplus',
                 'x < -103.0f ? 0.0f : x > 14.0f ? x : std::log1p(std::exp(x))',
                 'x > 700 ? x : std::log1p(std::exp(x))'),
    'pow': (lambda x: x ** EXPONENT, 'pow', 'std::pow(x, y)', 'std::pow(x, y)'),
    'erf': (T.erf, 'erf', 'std::erf(x)', 'std::erf(x)'),
    'expm1': (T.expm1, 'expm1', 'std::expm1(x)', 'std::expm1(x)'),
    'log1p': (T.log1p, 'log1p', 'std::log1p(x)', 'std::log1p(x)'),
}
SAMPLE = 1 << 20


class Errors(ctypes.Structure):
    _fields_ = [('ours', ctypes.c_double), ('libm', ctypes.c_double), ('at', ctypes.c_float),
                ('special', ctypes.c_int64), ('position', ctypes.c_int64)]


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('--functions', nargs='+', choices=FUNCTIONS, default=list(FUNCTIONS), metavar='NAME',
                        help='of: %s (default: all)' % ', '.join(FUNCTIONS))
    parser.add_argument('--elements', type=int, default=100000, metavar='N', help='(default %(default)s)')
    parser.add_argument('--batch-sizes', type=int, nargs='*', default=[32, 256], metavar='N',
                        help='sequences of a training step (default: 32 256)')
    parser.add_argument('--block', type=float, default=0.05, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--all', action='store_true',
                        help='errors over all values of float32, minutes a function, and not over a million of them')
    arguments = parser.parse_args()
    if min(arguments.elements, arguments.rounds) < 1:
        parser.error('--elements and --rounds are at least 1')
    return arguments


def loop(function, values, vector_math):
    """Return a Theano function that stores a function of some values."""
    x, z = theano.shared(values), theano.shared(values)
    with theano.configparser.change_flags(**{'mgpu.vector_math': vector_math}):
        return theano.function([], [], updates=[(z, function(x))])


def strided_loop(function, values, vector_math):
    """Return a Theano function that stores a function of the second half of the columns of a matrix of 256 of them."""
    matrix = np.resize(values, (-(-len(values) // 128), 256))
    return loop(lambda x: function(x[:, 128:]), matrix, vector_math)


def torch_loop(name, values):
    """Return a callable that computes a function of PyTorch in one thread; None where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    function = functools.reduce(getattr, name.split('.'), torch)
    x = torch.from_numpy(values)
    return (lambda: function(x, float(EXPONENT))) if name == 'pow' else lambda: function(x)


def errors_of(name, is_all):
    """Return the Errors of a function over all values of float32, or over a sample."""
    if name not in vector_math.available():
        return Errors()
    _, _, by_libm, exact = FUNCTIONS[name]
    names = [each for each in vector_math.available() if each == name or each in vector_math.MADE_OF.get(name, ())]
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'vector_math.cpp')) as file:
        code = file.read()
    ours = '%s(x, y)' % name if name == 'pow' else '%s(x)' % name
    macros = ''.join('#define %s(x, y) (%s)\n' % each for each in [('OURS', ours), ('EXACT', exact)])
    libm = 'static inline float LIBM(float x, float y) { return %s; }\n' % by_libm
    with tempfile.TemporaryDirectory() as folder:
        source, path = os.path.join(folder, 'sweep.cpp'), os.path.join(folder, 'sweep.so')
        with open(source, 'w') as file:
            file.write(vector_math.support_code(names) + macros + libm + code)
        subprocess.run([theano.config.cxx, '-O3', '-march=native', '-fno-math-errno', *vector_math.OPTIONS, '-shared',
                        '-fPIC', source, '-o', path], check=True)
        sweep = ctypes.CDLL(path).sweep
    errors = Errors()
    count = 1 << 32 if is_all else SAMPLE
    sweep(ctypes.c_uint32(0), ctypes.c_uint32((1 << 32) // count), ctypes.c_uint64(count), ctypes.byref(errors))
    return errors


def training_step(batch_size, vector_math):
    """Return a function that trains an LSTM of 64 units on 20 steps of 32 values."""
    random = np.random.RandomState(0)
    model = lstm()
    x, labels = (theano.shared(each) for each in (random.randn(batch_size, 20, 32).astype('float32'),
                                                  random.randint(0, 10, batch_size).astype('int32')))
    with theano.configparser.change_flags(**{'mgpu.vector_math': vector_math}):
        return theano.function([], model.loss, givens=list(zip(model.inputs, [x, labels])),
                               updates=list(adam(T.grad(model.loss, model.params), model.params).items()))


def compare(sides, arguments, title):
    """Return the seconds of a call of each side, one for each round."""
    for each in sides.values():
        seconds(each, WARM_UP)
    repeats = max(1, int(arguments.block / max(seconds(each) for each in sides.values())))
    return take_turns({side: functools.partial(seconds, each, repeats) for side, each in sides.items()},
                      arguments.rounds, title)


def ratio_of(ours, theirs):
    """Return the ratio of two sides' times as text."""
    return '%.2f (%.2f to %.2f)' % ratio(ours, theirs)


def main():
    arguments = parse_arguments()
    values = (np.random.RandomState(0).rand(arguments.elements) * 4).astype('float32') + np.float32(0.01)
    rows = []
    for name in arguments.functions:
        function, torchs, _, _ = FUNCTIONS[name]
        sides = {'libm': loop(function, values, 'off'), 'libmvec': loop(function, values, 'auto'),
                 'strided libm': strided_loop(function, values, 'off'),
                 'strided libmvec': strided_loop(function, values, 'auto'), 'PyTorch': torch_loop(torchs, values)}
        measured = compare({side: each for side, each in sides.items() if each}, arguments, name)
        ns = {side: '%.2f' % (1e9 * spread(each).median / len(values)) for side, each in measured.items()}
        errors = errors_of(name, arguments.all)
        rows.append([name, ns['libm'], ns['libmvec'], ratio_of(measured['libmvec'], measured['libm']),
                     '%s / %s' % (ns['strided libmvec'], ns['strided libm']), ns.get('PyTorch', '')]
                    + '{0.ours:.2f} at {0.at:.9g}|{0.libm:.2f}|{0.special}|{0.position}'.format(errors).split('|'))
    print('%d elements, %d rounds; errors over %s values of float32' % (
        arguments.elements, arguments.rounds, 'all' if arguments.all else SAMPLE))
    print(table([['FUNCTION', 'libm', 'libmvec', "of libm's", 'strided', 'PyTorch', 'ulp', "libm's", 'special',
                  'position']] + rows))
    rows = []
    for n in arguments.batch_sizes:
        measured = compare({each: training_step(n, each) for each in ('off', 'auto')}, arguments, 'LSTM, %d' % n)
        rows.append(['LSTM, batches of %d' % n, '%.2f' % (1e3 * spread(measured['auto']).median),
                     ratio_of(measured['auto'], measured['off'])])
    if rows:
        print(table([['STEP', 'ms', "of libm's"]] + rows, right={1}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
