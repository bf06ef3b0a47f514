#!/usr/bin/env python
"""One model placed on several devices, as a pipeline, against one device, in memory and in seconds a training step.

The models are a dense network of 8 wide layers (mlp), a network of 9 convolutions (cnn) and a small U-Net (unet:
Ronneberger et al., 2015), whose skip connections cross the cuts. Each is cut into as many parts as there are devices,
with about as many multiplications in each.

All placements of a model and one device take turns, a block of steps each; a speed-up is the median over the rounds of
the ratio within a round (lowest to highest). The columns:

  MiB       the most memory on each device in a step, without what libgpuarray keeps for later; measured in a process
            of its own, where the devices are the CUDA stand-in's (tests/cuda_on_cpu)
  ms        the median time of a step, and of it: copies to, from and between devices (with the wait for
            copies), compute, and update (gradients added, new values)
  bubble    the part of the time in which a device of a pipeline of n devices and m micro-batches has nothing to do, by
            theory: (n - 1) / (m + n - 1), see GPipe (Huang et al., 2019)
  at most   the speed-up that the bubble leaves: n * (1 - bubble)

For comparison: the speed-up of U-Net on 1, 2, 4 and 8 GPUs in torchgpipe's table (Kim et al., 2020), with recomputation
in all of them and against one GPU without it, is 0.86, 1.25, 2.35 and 3.1.

Without an NVIDIA GPU tests/cuda_on_cpu has the devices, each with a thread of its own for its kernels: that
shows how well devices are kept busy where there are as many cores, not the speed of GPUs. Examples:

  python benchmarks/placement.py
  python benchmarks/placement.py --devices 4 --models mlp --micro-batches 4 8 16 --recompute
  python benchmarks/placement.py --contexts 'a->cpu;b->cpu' --executor threads
"""
import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import default_map
from theano_mgpu.utils.tables import table

import numpy as np
import theano.tensor as T
from models import sgd, shared, uniform
from theano.tensor.signal.pool import pool_2d
from turns import WARM_UP, make_parser, ratio, seconds, spread, take_turns, write_json

STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, 'tests', 'cuda_on_cpu')
COPIES = ('host_to_device', 'device_to_host', 'broadcast')
COMPUTE = ('launch', 'run')
UPDATE = ('all_reduce', 'exchange', 'update')
HEADER = ['MODEL', 'DEVICES', 'MICRO-BATCHES', 'MiB', 'ms', 'copies', 'compute', 'update', 'bubble', 'at most',
          'speed-up']


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--models', nargs='+', choices=sorted(MODELS), default=['mlp', 'cnn', 'unet'])
    parser.add_argument('--devices', type=int, default=2, metavar='N',
                        help='place the models on N CUDA devices (default %(default)s)')
    parser.add_argument('--contexts', metavar='MAP', help="place them on these, such as 'a->cpu;b->cpu'")
    parser.add_argument('--micro-batches', nargs='+', type=int, default=[1, 4, 8], metavar='M',
                        help='slices of a batch (default 1 4 8)')
    parser.add_argument('--recompute', action='store_true',
                        help='the backward pass computes the forward pass again, in place of keeping its values')
    parser.add_argument('--apart', action='store_true',
                        help='only mlp: no part waits for another one, since each has the batch as its input: what the '
                        'devices can gain on this machine at all')
    parser.add_argument('--executor', choices=['serial', 'threads'], help='how the devices are driven')
    parser.add_argument('--batch-size', type=int, default=128, help='(default %(default)s)')
    parser.add_argument('--block', type=float, default=1.0, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--units', type=int, default=1024, help='of a layer of mlp (default %(default)s)')
    parser.add_argument('--channels', type=int, default=16, help='of cnn and unet (default %(default)s)')
    parser.add_argument('--size', type=int, default=32, help='rows and columns of images, a multiple of 4 (default '
                        '%(default)s)')
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--only-memory', action='store_true', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min([arguments.devices, arguments.batch_size, arguments.rounds] + arguments.micro_batches) < 1:
        parser.error('--devices, --batch-size, --rounds and --micro-batches are at least 1')
    if arguments.apart and arguments.models != ['mlp']:
        parser.error('--apart is for --models mlp')
    if arguments.size % 4:
        parser.error('--size %d: U-Net halves images twice; give a multiple of 4' % arguments.size)
    return arguments


class Network:
    """A network that is built layer by layer, each on the device of its part.

    Parameters
    ----------
    costs : list of float
        Multiplications of each layer.
    names : list of str
        Contexts; none to build it without placement.
    """

    def __init__(self, costs, names):
        self.params = []
        self._places = [names[part] for part in parts(costs, len(names))] if len(names) > 1 else None

    def layer(self, number, apply, *shape):
        """Return the output of a layer: ``apply(w)`` for its weights, and a bias along axis 1."""
        rng = np.random.RandomState(number)

        def value():
            w, b = shared(uniform(rng, *shape), 'w%d' % number), shared(np.zeros(shape[-1 if len(shape) == 2 else 0]),
                                                                        'b%d' % number)
            self.params += [w, b]
            return T.nnet.relu(apply(w) + (b if len(shape) == 2 else b.dimshuffle('x', 0, 'x', 'x')))
        if self._places is None:
            return value()
        with mgpu.device(self._places[number]):
            return value()

    def begins_part(self, number):
        """Return whether a layer is the first one of a further device."""
        return self._places is not None and number > 0 and self._places[number] != self._places[number - 1]


def parts(costs, n):
    """Return the part of each layer, of n in a row with about equal costs."""
    middles = np.cumsum(costs) - np.asarray(costs) / 2
    return [int(n * middle / sum(costs)) for middle in middles]


def mlp(arguments, names):
    """Return 8 dense layers; a row is a sample."""
    units, x = arguments.units, T.matrix('x')
    network, hidden, ends = Network([1] * 8, names), x, []
    for i in range(8):
        if arguments.apart and network.begins_part(i):
            ends.append(hidden)
            hidden = x
        hidden = network.layer(i, lambda w, h=hidden: T.dot(h, w), units, units)
    return x, ends + [hidden], network.params, (units,), (units,)


def convolved(x):
    return lambda w: T.nnet.conv2d(x, w, border_mode='half')


def cnn(arguments, names):
    """Return 9 convolutions of 3x3, the first of images of one channel."""
    channels, x = arguments.channels, T.tensor4('x')
    network, hidden = Network([1 / channels] + [1] * 8, names), x
    for i in range(9):
        hidden = network.layer(i, convolved(hidden), channels, channels if i else 1, 3, 3)
    return x, [hidden], network.params, (1,) + (arguments.size,) * 2, (channels,) + (arguments.size,) * 2


def unet(arguments, names):
    """Return a U-Net of three levels, with two convolutions in each; images of one channel."""
    c, x = arguments.channels, T.tensor4('x')
    # Channels in and out of each convolution, and the factor by which its images are smaller.
    layers = [(1, c, 1), (c, c, 1), (c, 2 * c, 2), (2 * c, 2 * c, 2), (2 * c, 4 * c, 4), (4 * c, 4 * c, 4),
              (6 * c, 2 * c, 2), (2 * c, 2 * c, 2), (3 * c, c, 1), (c, c, 1)]
    network = Network([n_in * n_out / scale ** 2 for n_in, n_out, scale in layers], names)
    hidden, skipped = x, []
    for i, (n_in, n_out, _) in enumerate(layers):
        if i in (2, 4):
            skipped.append(hidden)
            hidden = pool_2d(hidden, (2, 2), ignore_border=True)
        if i in (6, 8):
            hidden = T.concatenate([twice_as_large(hidden), skipped.pop()], axis=1)
        hidden = network.layer(i, convolved(hidden), n_out, n_in, 3, 3)
    return x, [hidden], network.params, (1,) + (arguments.size,) * 2, (c,) + (arguments.size,) * 2


def twice_as_large(x):
    """Return images with each pixel four times."""
    for axis in (2, 3):
        x = T.stack([x, x], axis=axis + 1).reshape([x.shape[i] * (1 + (i == axis)) for i in range(4)])
    return x


MODELS = {'mlp': mlp, 'cnn': cnn, 'unet': unet}


def step_on(name, names, micro_batches, arguments):
    """Return a training step of a model on contexts, and a batch for it."""
    x, outputs, params, shape, target_shape = MODELS[name](arguments, names)
    target = outputs[0].type('target')
    loss = sum(T.sqr(output - target).mean() for output in outputs)
    step = mgpu.training_function([x, target], loss, params, sgd, contexts=names,
                                  micro_batches=micro_batches, recompute=arguments.recompute and len(names) > 1,
                                  executor=arguments.executor)
    rng = np.random.RandomState(0)
    batch = [rng.rand(arguments.batch_size, *each).astype('float32') for each in (shape, target_shape)]
    return lambda: step(*batch), step


def sides(names, arguments):
    """Return the sides that take turns: contexts and micro-batches; one device first."""
    return [(names[:1], 1)] + [(names, m) for m in arguments.micro_batches]


def peak_memory(n):
    """Return the most bytes of each of n devices since the last call; None without the stand-in for CUDA."""
    try:
        count = ctypes.CDLL('libcuda.so').cudaOnCpuPeakMemory
    except (OSError, AttributeError):
        return None
    peaks = [ctypes.c_size_t() for _ in range(n)]
    for i, each in enumerate(peaks):
        count(ctypes.byref(each), i)
    return [each.value for each in peaks]


def print_memory(names, arguments):
    """Print the bytes on each device for each model and side, in a line of JSON."""
    for name in arguments.models:
        for used, micro_batches in sides(names, arguments):
            gc.collect()
            peak_memory(len(names))
            before = peak_memory(len(names))
            run, step = step_on(name, used, micro_batches, arguments)
            for _ in range(2):
                run()
            peaks = peak_memory(len(names))  # counts anew from here
            print('memory %s' % json.dumps(peaks and [peak - b for peak, b in zip(peaks, before)]), flush=True)
            del run, step


def memory(names, arguments):
    """Return the bytes on each device, for each model and side; None where they cannot be counted."""
    n = len(arguments.models) * len(sides(names, arguments))
    if peak_memory(len(names)) is None:
        return [None] * n
    env = dict(os.environ, THEANO_FLAGS=os.environ['THEANO_FLAGS'] + ',gpuarray.preallocate=-1')
    done = subprocess.run([sys.executable] + sys.argv + ['--only-memory'], env=env, stdout=subprocess.PIPE, text=True,
                          check=True)
    return [json.loads(line[len('memory '):]) for line in done.stdout.splitlines() if line.startswith('memory ')]


def measure(name, names, arguments):
    """Return a row for each side of a model."""
    running = {}
    for used, m in sides(names, arguments):
        run, step = step_on(name, used, m, arguments)
        seconds(run, WARM_UP)
        running[len(used), m] = run, step
    slowest = max(seconds(run) for run, _ in running.values())
    repeats = max(1, int(arguments.block / slowest))
    for _, step in running.values():
        step.timings.reset()
    measured = take_turns({side: lambda run=run: seconds(run, repeats) for side, (run, _) in running.items()},
                       arguments.rounds, name)
    for n, m in running:
        per_call = running[n, m][1].timings.per_call()
        bubble = 0 if arguments.apart else (n - 1) / (m + n - 1)
        yield dict(model=name, devices=n, micro_batches=m, seconds=measured[n, m],
                   phases={title: sum(per_call.get(phase, 0) for phase in phases) for title, phases in
                           (('copies', COPIES), ('compute', COMPUTE), ('update', UPDATE))},
                   bubble=bubble, at_most=n * (1 - bubble), speed_up=list(ratio(measured[1, 1], measured[n, m])))


def line(row):
    """Return a row of the table as text."""
    used = row['memory'] and ' + '.join('%.1f' % (each / 2 ** 20) for each in row['memory'][:row['devices']])
    return [row['model'], str(row['devices']), str(row['micro_batches']), used or '-',
            '%.1f' % (1e3 * spread(row['seconds']).median)] + \
        ['%.1f' % (1e3 * value) for value in row['phases'].values()] + \
        ['%.2f' % row['bubble'], '%.2f' % row['at_most'], '%.2f (%.2f to %.2f)' % tuple(row['speed_up'])]


def main():
    arguments = parse_arguments()
    devices = discovery.discover('cuda')[0]
    if not arguments.contexts and len(devices) < arguments.devices:
        if 'CUDA_ON_CPU_DEVICES' in os.environ:
            sys.exit('the CUDA stand-in shows %d devices: %s' % (len(devices), discovery.discover('cuda')[1]))
        print('%d CUDA devices here: taking %d of tests/cuda_on_cpu' % (len(devices), arguments.devices), flush=True)
        os.execv(sys.executable, [sys.executable, STAND_IN, 'run', '--devices', str(arguments.devices), sys.executable]
                 + sys.argv)
    names = [context.name for context in mgpu.init(arguments.contexts or default_map(devices[:arguments.devices]))]
    if arguments.only_memory:
        print_memory(names, arguments)
        return 0
    bytes_of_sides = memory(names, arguments)
    print('batch %d, %d rounds%s, on %s' % (arguments.batch_size, arguments.rounds,
                                            ', with recomputation' if arguments.recompute else '', ', '.join(names)))
    rows = [row for name in arguments.models for row in measure(name, names, arguments)]
    for row, peaks in zip(rows, bytes_of_sides):
        row['memory'] = peaks
    print(table([HEADER] + [line(row) for row in rows], right=set(range(1, len(HEADER) - 1))))
    write_json(rows, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
