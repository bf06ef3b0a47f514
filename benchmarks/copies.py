#!/usr/bin/env python
"""Copies between the host and a CUDA device: gigabytes a second from and to page-locked memory, and other memory.

Each size is copied in the four ways in turns; the table has the medians. Examples:

  python benchmarks/copies.py
  python benchmarks/copies.py --device cuda1 --megabytes 7.4 --rounds 31
  python tests/cuda_on_cpu run --devices 1 python benchmarks/copies.py     on the stand-in: that it runs
"""
import functools
import statistics
import time

import theano_mgpu as mgpu
from theano_mgpu.devices import page_locked
from theano_mgpu.devices.transfers import DeviceMemory
from theano_mgpu.utils.tables import table

import numpy as np
from turns import make_parser, write_json


def seconds(copy, device):
    """Return the seconds of a copy, until the device has ended it."""
    device.sync()
    began = time.perf_counter()
    copy()
    device.sync()
    return time.perf_counter() - began


def main():
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument('--device', default='cuda0')
    parser.add_argument('--megabytes', nargs='+', type=float, default=[.01, .1, 1, 7.4, 64])
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    context, = mgpu.init('dev->' + args.device)
    rows, found = [['MB', 'TO THE DEVICE', 'PAGE-LOCKED', 'FROM THE DEVICE', 'PAGE-LOCKED']], []
    for size in args.megabytes:
        n = int(size * 1e6 / 4)
        device, here = DeviceMemory(context).zeros((n,), 'float32'), np.zeros(n, 'float32')
        locked = page_locked.zeros(n, 'float32', [context])
        ways = [functools.partial(copy, memory) for copy in (device.write, device.read) for memory in (here, locked)]
        times = [[seconds(way, device) for way in ways] for _ in range(args.rounds + 2)][2:]  # the first ones allocate
        rates = [n * 4 / statistics.median(each) / 1e9 for each in zip(*times)]
        rows.append(['%g' % size] + ['%.2f' % rate for rate in rates])
        found.append([size, rates])
    print(table(rows, set(range(5))))
    write_json({'gigabytes a second': found}, args.json)


if __name__ == '__main__':
    main()
