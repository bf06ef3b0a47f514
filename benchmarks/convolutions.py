#!/usr/bin/env python
"""Time of a training step of a CNN on one CUDA device with cuDNN, against Theano's own convolutions (GpuCorrMM).

Both sides train a model of their own from the same weights, in turns. A ratio below 1 means that cuDNN saves time. The
first steps are compared, too: the exit code is 1 if weights differ by more than rounding.

Examples:

  benchmarks/convolutions.py --batch 256
  python tests/cuda_on_cpu run --cudnn 9 python benchmarks/convolutions.py --batch 16 --filters 4
"""
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import default_map

import numpy as np
import theano
from models import cnn, sgd
from theano.gpuarray import dnn
from turns import compare, largest_difference, make_parser, show


def training(model, *excluded):
    mode = theano.compile.get_default_mode().excluding(*excluded)
    return mgpu.training_function(model.inputs, model.loss, model.params, sgd, mode=mode)


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--filters', type=int, default=32, help='filters of the layer (default: 32)')
    parser.add_argument('--batch', type=int, default=128, help='samples of a batch (default: 128)')
    args = parser.parse_args()
    devices = discovery.discover('cuda')[0]
    if not devices:
        sys.exit('no CUDA device here')
    mgpu.init(default_map(devices[:1]))
    if not dnn.dnn_available('dev0'):
        sys.exit('cuDNN cannot be used: %s' % dnn.dnn_available.msg)
    rng = np.random.RandomState(0)
    batch = rng.rand(args.batch, 1, 28, 28).astype('float32'), rng.randint(0, 10, args.batch).astype('int32')
    models = [cnn(filters=args.filters) for _ in range(2)]
    by_cudnn, by_theano = [lambda step=step: step(*batch) for step in (training(models[0]),
                                                                       training(models[1], 'cudnn'))]
    for _ in range(3):
        by_cudnn(), by_theano()
    difference = largest_difference(*[model.params for model in models])
    print('weights after 3 steps differ by %.1e of their largest' % difference)
    show(compare(by_cudnn, by_theano, 'cuDNN / GpuCorrMM', args.rounds))
    return difference > 1e-4


if __name__ == '__main__':
    sys.exit(main())
