#!/usr/bin/env python
"""Time to add gradients over processes that exchange float32, and float16 (mgpu.exchange), in turns.

To emulate a slow network on one machine, limit the loopback device as root (here to 1 Gb/s), and have MPI use it, as
the last three commands do. Examples:

  theano-mgpu launch -n 2 benchmarks/half_precision.py
  tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms
  OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo theano-mgpu launch -n 2 benchmarks/half_precision.py
  tc qdisc del dev lo root
"""
import functools

import theano_mgpu as mgpu
from theano_mgpu.comm.half_precision import all_reduce_in_half
from theano_mgpu.comm.mpi import mpi_communicator
from theano_mgpu.comm.mpi_library import import_mpi
from theano_mgpu.utils.tables import table

import numpy as np
from turns import WARM_UP, make_parser, ratio, seconds, spread, take_turns


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--mb', type=float, nargs='+', default=[0.1, 1, 7.6, 50], metavar='N',
                        help='sizes of the gradients in float32 (default: 0.1 1 7.6 50)')
    parser.add_argument('--arrays', type=int, default=6, help='that they are divided into (default %(default)s)')
    parser.add_argument('--repeats', type=int, default=3, help='calls in a turn (default %(default)s)')
    arguments = parser.parse_args()
    mgpu.init('host->cpu')
    if mgpu.size() == 1:
        parser.error('start several processes: theano-mgpu launch -n 2 benchmarks/half_precision.py')
    ranks, comm = mpi_communicator(), import_mpi().COMM_WORLD
    rows = [['MB', 'float32, ms', 'float16, ms', 'float16 / float32']]
    for size in arguments.mb:
        arrays = np.array_split(np.random.RandomState(mgpu.rank()).randn(int(size * 2 ** 18)).astype('float32'),
                                arguments.arrays)

        def turn(add, arrays=arrays):
            comm.Barrier()
            return seconds(lambda: add(arrays), arguments.repeats)
        sides = {'float32': functools.partial(turn, ranks.all_reduce),
                 'float16': functools.partial(turn, functools.partial(all_reduce_in_half, ranks))}
        take_turns(sides, WARM_UP)
        measured = take_turns(sides, arguments.rounds)
        rows.append(['%g' % size] + ['%.2f' % (1e3 * spread(measured[name]).median) for name in sides] +
                    [str(ratio(measured['float16'], measured['float32']))])
    if mgpu.rank() == 0:
        print(table(rows, right={0, 1, 2, 3}))


if __name__ == '__main__':
    main()
