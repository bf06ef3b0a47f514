#!/usr/bin/env python
r"""Time of a training step over the CUDA devices of a process with sums by NCCL, against sums through the host.

With `--overlap`, sums by NCCL beside the next gradients are timed against those once all gradients are computed.

The model is an MLP of four layers of 1024 units (4.0 million parameters), the optimizer gradient descent. A ratio below
1 means that NCCL saves time. The sides take turns; the exit code is 1 if their weights differ by more than rounding
after some steps. On the CUDA stand-in, the devices share the cores of the host: the ratio then shows the cost of the
host's part in the exchange, and nothing about the links between GPUs.

Examples:

  benchmarks/collectives.py
  python tests/cuda_on_cpu run --devices 4 python benchmarks/collectives.py --devices 2 4
  python tests/cuda_on_cpu run --set NCCL_RATE=200 python benchmarks/collectives.py --overlap     200 MB/s a device
  benchmarks/collectives.py --update-on sharded
  THEANO_FLAGS=mgpu.logical_shards=8,mgpu.shares=equal benchmarks/collectives.py     NCCL by blocks
"""
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices.context_map import default_map

import numpy as np
import theano
from models import mlp, sgd
from turns import compare, largest_difference, make_parser, show


def training(model, collectives, overlap, update_on):
    with theano.configparser.change_flags(**{'mgpu.collectives': collectives, 'mgpu.overlap': overlap}):
        return mgpu.training_function(model.inputs, model.loss, model.params, sgd, update_on=update_on)


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--devices', type=int, nargs='+', default=[2], help='numbers of devices (default: 2)')
    parser.add_argument('--units', type=int, default=1024, help='units of a layer (default: 1024)')
    parser.add_argument('--update-on', choices=('device', 'sharded', 'host'), default='device',
                        help='where new values are made (default: device)')
    parser.add_argument('--overlap', action='store_true', help='time NCCL with mgpu.overlap=True against False')
    parser.add_argument('--batch', type=int, default=64, help='samples of a batch (default: 64)')
    args = parser.parse_args()
    rng = np.random.RandomState(0)
    sizes = (784,) + 4 * (args.units,) + (10,)
    batch = rng.rand(args.batch, sizes[0]).astype('float32'), rng.randint(0, 10, args.batch).astype('int32')
    worst = 0.0
    for n in args.devices:
        mgpu.init(default_map('cuda%d' % i for i in range(n)))
        models = [mlp(sizes=sizes) for _ in range(2)]
        sides = (('nccl', 'False'), ('nccl', 'True')) if args.overlap else (('host', 'False'), ('nccl', 'False'))
        steps = [training(model, *side, args.update_on) for model, side in zip(models, sides)]
        before, after = [lambda step=step: step(*batch) for step in steps]
        for _ in range(3):
            before(), after()
        difference = largest_difference(*[model.params for model in models])
        print('%d devices: weights after 3 steps differ by %.1e of their largest' % (n, difference))
        show(compare(after, before, '%d devices: %s' % (n, 'overlap / none' if args.overlap else 'NCCL / host'),
                     args.rounds))
        worst = max(worst, difference)
    return worst > 1e-4


if __name__ == '__main__':
    sys.exit(main())
