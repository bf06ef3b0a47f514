#!/usr/bin/env python
"""Copies between the host and a CUDA device: gigabytes a second from and to page-locked memory, and other memory.

Each size is copied in the four ways in turns; the table has the medians. Then sums of 7.4 MB from two contexts on the
device go through the host, in turns with the same copies alone. Examples:

  python benchmarks/copies.py
  python benchmarks/copies.py --device cuda1 --megabytes 7.4 --rounds 31
  python tests/cuda_on_cpu run --devices 1 --set COPY_RATE=6000 python benchmarks/copies.py --megabytes 7.4
"""
import functools
import statistics
import time

import theano_mgpu as mgpu
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.comm.host_sum import describe
from theano_mgpu.devices import page_locked
from theano_mgpu.devices.launcher import Launcher, Shard
from theano_mgpu.devices.transfers import DeviceMemory
from theano_mgpu.exchange.host import HostChannel
from theano_mgpu.exchange.memory import Memories
from theano_mgpu.exchange.orders import AnyOrder, Parts
from theano_mgpu.utils.executors import Executor
from theano_mgpu.utils.tables import table
from theano_mgpu.utils.timeline import Timings

import numpy as np
from turns import compare, make_parser, show, write_json

SHAPES = (784, 1024), (1024, 1000), (1000, 10)  # 7.4 MB in float32, as of an MLP for MNIST


def seconds(copy, device):
    """Return the seconds of a copy, until the device has ended it."""
    device.sync()
    began = time.perf_counter()
    copy()
    device.sync()
    return time.perf_counter() - began


def exchange_of(contexts):
    """Return functions without arguments: an exchange of sums between contexts, and its copies alone."""
    timings, memories = Timings(), Memories()
    launcher, arrays = Launcher(Executor(), timings), [[DeviceMemory(context).zeros(shape, 'float32')
                                                              for shape in SHAPES] for context in contexts]
    read_on = {context: range(len(SHAPES)) for context in contexts}
    channel = HostChannel(AnyOrder(memories, launcher), (), read_on, memories, launcher, timings, Communicator())
    parts = Parts(describe(arrays[0]), arrays, [Shard(i, (i, i + 1)) for i in range(len(contexts))], contexts)
    here = [[page_locked.zeros(shape, 'float32', contexts) for shape in SHAPES] for _ in contexts]
    pairs = [pair for each in zip(arrays, here) for pair in zip(*each)]

    def exchange():
        channel.prepare(parts)
        sums = channel.taken()
        for context in contexts:
            sums[-1].on(context).sync()

    def copies():
        for names in ('read', 'write'):
            for there, memory in pairs:
                getattr(there, names)(memory)
            for there, _ in pairs:
                there.sync()
    return exchange, copies


def main():
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument('--device', default='cuda0')
    parser.add_argument('--megabytes', nargs='+', type=float, default=[.01, .1, 1, 7.4, 64])
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    contexts = mgpu.init('dev->%s;other->%s' % (args.device, args.device))
    rows, found = [['MB', 'TO THE DEVICE', 'PAGE-LOCKED', 'FROM THE DEVICE', 'PAGE-LOCKED']], []
    for size in args.megabytes:
        n = int(size * 1e6 / 4)
        device, here = DeviceMemory(contexts[0]).zeros((n,), 'float32'), np.zeros(n, 'float32')
        locked = page_locked.zeros(n, 'float32', contexts[:1])
        ways = [functools.partial(copy, memory) for copy in (device.write, device.read) for memory in (here, locked)]
        times = [[seconds(way, device) for way in ways] for _ in range(args.rounds + 2)][2:]  # the first ones allocate
        rates = [n * 4 / statistics.median(each) / 1e9 for each in zip(*times)]
        rows.append(['%g' % size] + ['%.2f' % rate for rate in rates])
        found.append([size, rates])
    print(table(rows, set(range(5))))
    ratio = compare(*exchange_of(contexts), 'sums of 7.4 MB from two contexts / their copies alone', args.rounds, .2)
    show(ratio)
    write_json({'gigabytes a second': found, 'exchange': ratio}, args.json)


if __name__ == '__main__':
    main()
