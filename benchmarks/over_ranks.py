#!/usr/bin/env python
r"""Time of a training step over processes with mgpu.overlap=True, and with mgpu.update_on=sharded, against neither.

The models are Keras's CNN for MNIST (1.2 million parameters, most of them in the last but one layer), and an MLP of
four layers of 1024 units (4.0 million). A ratio below 1 means that the flag saves time. The sides take turns.

To emulate a slow network on one machine, limit the loopback device as root (here to 1 Gb/s), and have MPI use it and
leave the core to others while it waits, as `launch` does where mgpu.overlap is set. The last three commands do so.
Examples:

  theano-mgpu launch -n 2 benchmarks/over_ranks.py
  tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms
  OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo \
    theano-mgpu launch -n 2 benchmarks/over_ranks.py
  tc qdisc del dev lo root
"""
import os

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.comm.mpi_library import import_mpi
from theano_mgpu.utils.tables import table

import numpy as np
import theano
import theano.tensor as T
from models import Classifier, adam, mlp, shared, uniform
from theano.tensor.signal.pool import pool_2d
from turns import WARM_UP, make_parser, ratio, seconds, spread, take_turns


def published_cnn():
    """Return Keras's examples/mnist_cnn.py, without dropout; input shape (batch, 1, 28, 28)."""
    rng = np.random.RandomState(0)
    shapes = [(32, 1, 3, 3), (64, 32, 3, 3), (9216, 128), (128, 10)]
    params = [shared(value, name) for i, shape in enumerate(shapes)
              for name, value in (('w%d' % i, uniform(rng, *shape)),
                                  ('b%d' % i, np.zeros(shape[0 if len(shape) == 4 else 1])))]
    x = T.tensor4('x')
    h = x
    for w, b in zip(params[0:4:2], params[1:4:2]):
        h = T.nnet.relu(T.nnet.conv2d(h, w) + b.dimshuffle('x', 0, 'x', 'x'))
    h = pool_2d(h, (2, 2), ignore_border=True).flatten(2)
    h = T.nnet.relu(T.dot(h, params[4]) + params[5])
    return Classifier(x, T.dot(h, params[6]) + params[7], params)


MODELS = {'cnn': (published_cnn, (1, 28, 28)), 'mlp': (lambda: mlp(sizes=(784,) + 4 * (1024,) + (10,)), (784,))}


SIDES = {'overlap': {'mgpu.overlap': 'True'}, 'sharded': {'mgpu.update_on': 'sharded'}}


def training(make, flags):
    model = make()
    with theano.configparser.change_flags(**flags):
        return mgpu.training_function(model.inputs, model.loss, model.params, adam)


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=list(MODELS))
    parser.add_argument('--batch-size', type=int, default=128, help='samples of all processes (default %(default)s)')
    parser.add_argument('--repeats', type=int, default=5, help='steps in a turn (default %(default)s)')
    arguments = parser.parse_args()
    mgpu.init('host->cpu')
    if mgpu.size() == 1:
        parser.error('start several processes: theano-mgpu launch -n 2 benchmarks/over_ranks.py')
    comm = import_mpi().COMM_WORLD
    rows = [['model', 'MB', 'pieces', 'neither, ms'] + ['%s / neither' % side for side in SIDES]]
    for name in arguments.models:
        make, shape = MODELS[name]
        rng = np.random.RandomState(0)
        batch = (rng.rand(arguments.batch_size, *shape).astype('float32'),
                 rng.randint(0, 10, arguments.batch_size).astype('int32'))
        steps = {name: training(make, flags) for name, flags in dict(SIDES, neither={}).items()}

        def turn(step, batch=batch):
            comm.Barrier()
            return seconds(lambda: step(*batch), arguments.repeats)
        sides = {side: lambda step=step: turn(step) for side, step in steps.items()}
        take_turns(sides, WARM_UP)
        measured = take_turns(sides, arguments.rounds)
        pieces, = [stage.parts for stage in steps['overlap'].plan.stages]
        megabytes = sum(param.get_value(borrow=True).nbytes for param in steps['overlap'].params) / 1e6
        rows.append([name, '%.1f' % megabytes, str(len(pieces))] +
                    ['%.1f' % (1e3 * spread(measured['neither']).median)] +
                    [str(ratio(measured[side], measured['neither'])) for side in SIDES])
    if mgpu.rank() == 0:
        print(table(rows, right={1, 2, 3, 4, 5}))


if __name__ == '__main__':
    main()
