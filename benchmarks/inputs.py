#!/usr/bin/env python
r"""Steps with large inputs on CUDA devices: copied beside the computation, and on the stream that computes.

Both ways train equal models in turns; each step asks for the next batch, as a Keras loop does. The numbers are the
ratios of their times, with the look-ahead and without it. Examples:

  python benchmarks/inputs.py --contexts 'dev0->cuda0;dev1->cuda1' --samples 256 --features 150528 --units 512
  python tests/cuda_on_cpu run --set PAGEABLE_RATE=200 --set COPY_RATE=1000 \
      python benchmarks/inputs.py --features 20000 --units 64
"""
import itertools

import theano_mgpu as mgpu
from theano_mgpu.devices import transfers
from theano_mgpu.runtime.batches.prefetch import PeekableBatches
from theano_mgpu.utils.attributes import temporarily

import numpy as np
import theano
import theano.tensor as T
from turns import compare, make_parser, show, write_json

BATCHES = 4  # in a block


def training(args, looks_ahead, least):
    """Return a function that trains on some batches; values of fewer bytes than `least` are copied in order."""
    rng, x = np.random.RandomState(0), T.fmatrix('x')
    params = [theano.shared((rng.randn(args.features, args.units) / args.features ** .5).astype('float32')),
              theano.shared(np.zeros(args.units, 'float32'))]
    loss = T.sqr(T.tanh(T.dot(x, params[0]) + params[1])).mean()
    step = mgpu.training_function([x], loss, params, lambda gradients, params: [
        (param, param - np.float32(.01) * gradient) for param, gradient in zip(params, gradients)])
    batches = PeekableBatches(itertools.cycle(rng.randn(3, args.samples, args.features).astype('float32')))

    def train():
        with temporarily(transfers, 'LEAST', least):
            for batch in itertools.islice(batches, BATCHES):
                with step.look_ahead.asking(batches.peek if looks_ahead else None):
                    step(*batch)
    return train


def main():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--contexts', default='dev0->cuda0;dev1->cuda1')
    parser.add_argument('--samples', type=int, default=64, help='of a batch (default %(default)s)')
    parser.add_argument('--features', type=int, default=150528, help='of a sample (default %(default)s)')
    parser.add_argument('--units', type=int, default=256, help='of the layer that reads them (default %(default)s)')
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    mgpu.init(args.contexts)
    found = {}
    for looks_ahead in (True, False):
        title = 'beside / in order, %s the next batch known' % ('with' if looks_ahead else 'without')
        found[title] = compare(*[training(args, looks_ahead, least) for least in (transfers.LEAST, 1 << 60)], title,
                               args.rounds, .2)
        show(found[title])
    write_json(found, args.json)


if __name__ == '__main__':
    main()
