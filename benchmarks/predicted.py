#!/usr/bin/env python
"""Predicted speedups of known models on 2, 4 and 8 GPUs, with sums through the host and by NCCL: not measured.

The cost model of predict_scaling.py (benchmarks/cost_model.py) predicts them from the samples a second of one
GPU, which are assumed, and the size of the gradients. Each GPU has a process (theano-mgpu launch), or one process
launches for all of them: then each GPU begins later than the one before, by the time of the launches of a step.

Examples:

  benchmarks/predicted.py
  benchmarks/predicted.py --batch 512 --launch 0.010
"""
import argparse

from theano_mgpu.utils.tables import table

from cost_model import CostModel, parse_network

# Samples a second of one GPU in training with float32, assumed: round numbers of the size that is commonly reported for
# them. Parameters: of Keras's models.
MODELS = {'ResNet-50, V100': (350, 25.6e6), 'VGG-16, V100': (230, 138.4e6), 'ResNet-50, K80': (50, 25.6e6)}
LINKS = ('pcie3', 'nvlink2')
SCHEMES = {'host': 'through the host', 'ring': 'NCCL'}
NUMBERS = (2, 4, 8)
HOST = 0.002     # seconds a step of Python, Keras and the update
ADDS = 20e9      # bytes of gradients that the host adds a second


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=256, help='samples of the whole batch (default: 256)')
    parser.add_argument('--launch', type=float, default=0.0, metavar='SECONDS',
                        help='of the launches for one GPU, where one process launches for all (default: 0, a process '
                             'for each GPU)')
    args = parser.parse_args()
    rows = [['predicted', 'link', 'sums', *('%d GPUs' % n for n in NUMBERS)]]
    for name, (rate, parameters) in MODELS.items():
        for link in LINKS[:1 if 'K80' in name else 2]:
            for scheme, title in SCHEMES.items():
                model = CostModel(HOST, 1 / rate, 0, 4 * parameters, launch_s=args.launch, reduce_bytes_per_s=ADDS,
                                  network=parse_network(link), scheme=scheme)
                rows.append([name, link, title, *('%.2f' % model.speedup(n, args.batch) for n in NUMBERS)])
    print(table(rows, {3, 4, 5}))


if __name__ == '__main__':
    main()
