#!/usr/bin/env python
"""Predictions of the cost model for machines whose speeds others have published, against these speeds.

The model (benchmarks/cost_model.py) gets the published speed of one GPU, the bytes of all parameters, and the rate of
the links; no figure is fitted to the row that it is compared with. Rows from which a rate is taken are marked *.
docs/guide/predicted.md has this table, names the sources, and gives the reason of each error above 15 %.

Examples:

  benchmarks/published.py
"""
import argparse
import statistics
from typing import Dict, NamedTuple, Tuple

from theano_mgpu.plan import buckets

from cost_model import LINKS, CostModel, Link, Network, parse_network, ring_all_reduce

PARAMETERS = {'AlexNet': 60_965_224, 'GoogLeNet': 13_378_280, 'VGG-16': 138_357_544, 'ResNet-50': 25_557_032,
              'ResNet-152': 60_192_808, 'Inception-3': 23_834_568}  # in float32
ARRAYS = {'AlexNet': 16, 'GoogLeNet': 128, 'VGG-16': 32, 'ResNet-50': 161}  # that they are in
HOST_ADDS = 20e9    # bytes of gradients that the host adds a second, as in predicted.py
NVLINK_2 = '5:25'   # V100: one link, between two GPUs
NVLINK_1 = '5:53'   # P100: 4 links of 20 GB/s, and the share of them that cost_model.LINKS has for NVLink 2 and 3

# Theano-MPI: seconds for 5120 images on one K80; on 2, 4 and 8 of them seconds of training, exchange and waiting.
IMAGES = 5120
THEANO_MPI = {
    ('AlexNet', 128): (20.50, {2: (10.35, 0.78, 1.06), 4: (5.13, 0.54, 2.09), 8: (2.63, 0.61, 3.03)}),
    ('GoogLeNet', 32): (63.89, {2: (31.40, 1.00, 2.89), 4: (15.51, 0.71, 1.30), 8: (7.69, 0.80, 0.61)}),
    ('VGG-16', 16): (358.29, {2: (176.08, 13.90, 17.31), 4: (90.44, 9.28, 5.27), 8: (55.12, 12.59, 3.93)}),
    ('VGG-16', 32): (343.37, {2: (169.12, 7.14, 36.50), 4: (86.97, 4.80, 22.72), 8: (43.29, 5.41, 3.75)}),
    ('ResNet-50', 64): (163.15, {2: (80.09, 0.81, 7.66), 4: (40.25, 0.56, 3.36), 8: (20.12, 0.57, 1.90)})}

# TensorFlow's tf_cnn_benchmarks, synthetic data: images a second on 1, 2, 4 and 8 GPUs.
OF_TENSORFLOW = {
    'K80, through the host': {
        ('Inception-3', 64): (30.5, 57.8, 116, 227), ('ResNet-50', 64): (51.9, 99.0, 195, 387),
        ('ResNet-152', 32): (20.0, 38.2, 75.8, 148), ('AlexNet', 512): (656, 1209, 2328, 4640),
        ('VGG-16', 32): (35.4, 64.8, 120, 234)},
    'P100, through the host': {
        ('Inception-3', 64): (142, 284, 569, 1131), ('ResNet-50', 64): (219, 422, 852, 1734),
        ('ResNet-152', 64): (91.8, 181, 356, 716)},
    'P100, NCCL': {('AlexNet', 512): (2987, 5658, 10509, 17822), ('VGG-16', 64): (154, 295, 584, 1081)}}

# Keras 2.1.5 and tensorpack 0.8.3, on TensorFlow 1.6: images a second on 1, 2 and 8 V100 of one machine.
TENSORPACK = {('ResNet-50', 32): (318, 582, 2177), ('VGG-16', 32): (226, 438, 1471)}
MULTI_GPU_MODEL = {('ResNet-50', 32): (230, 291, 376), ('VGG-16', 32): (188, 320, 501)}
# Keras 2.1.3 on TensorFlow 1.6: ResNet-50 on 1, 4 and 8 V100, the eight in another machine; from files, and synthetic.
OF_AMAZON = {'ImageNet': (50, 162, 212), 'synthetic': (198, 448, 346)}


class Line(NamedTuple):
    """A model on some machine: images a second on one GPU, and on n, predicted and published.

    Rows of `calibrating` gave a rate. Of Theano-MPI the milliseconds of an `exchange` are published, too, and the speed
    with `waiting`.
    """

    table: str
    model: str
    batch: int
    one: float
    predicted: Dict[int, float]
    published: Dict[int, float]
    calibrating: Tuple[int, ...] = ()
    exchange: Dict[int, Tuple[float, float]] = {}
    waiting: Dict[int, float] = {}

    def pairs(self, n, of='model'):
        """Return the predicted and the published speed of n GPUs, if the latter gave no rate: a list of none or one.

        `of` is the model, its exchange alone, or n times the speed of one GPU.
        """
        if n not in self.published or n in self.calibrating or of == 'exchange' and not self.exchange:
            return []
        return [{'model': (self.predicted[n], self.published[n]), 'n times one': (n * self.one, self.published[n]),
                 'exchange': self.exchange.get(n)}[of]]


def error(predicted, published):
    """Return predicted / published - 1."""
    return predicted / published - 1


def line(table, key, costs, published, calibrating=(), **others):
    """Return the Line of a model whose step has some costs."""
    name, batch = key
    predicted = {n: n * batch / sum(costs.parts(n, n * batch).values()) for n in published}
    one = 1 / (costs.input_s + costs.sample_s)
    return Line(table, name, batch, one, predicted, published, calibrating, **others)


def bytes_of(name):
    """Return the bytes of all parameters of a model."""
    return 4 * PARAMETERS[name]


def theano_mpi():
    """Yield the lines of Theano-MPI, which adds each array by a call of NCCL; AlexNet gives the rates of the bus."""
    latency = LINKS['pcie3'].latency_s

    def network(name, rates):
        inner, outer = (Link('bus', ARRAYS[name] * latency, rate) for rate in rates)
        return Network(inner, outer, 4)  # cards 5 to 8 are behind the second processor

    def bus_rate(n):
        seconds = THEANO_MPI['AlexNet', 128][1][n][1] * n * 128 / IMAGES
        empty = ring_all_reduce(n, 0, network('AlexNet', (1, 1)).inner)
        return 2 * (n - 1) / n * bytes_of('AlexNet') / (seconds - empty)

    rates = statistics.mean(map(bus_rate, (2, 4))), bus_rate(8)
    for key, (one, several) in THEANO_MPI.items():
        costs = CostModel(0, one / IMAGES, 0, bytes_of(key[0]), network=network(key[0], rates), scheme='ring')
        yield line('Theano-MPI, K80, NCCL', key, costs, {n: IMAGES / sum(each[:2]) for n, each in several.items()},
                   tuple(several) if key[0] == 'AlexNet' else (),
                   exchange={n: (1e3 * costs.all_reduce(n), 1e3 * each[1] * n * key[1] / IMAGES)
                             for n, each in several.items()},
                   waiting={n: IMAGES / sum(each) for n, each in several.items()})


def tensorflow():
    """Yield the lines of tf_cnn_benchmarks, which exchanges gradients while it computes others."""
    for table, models in OF_TENSORFLOW.items():
        network, scheme = (parse_network(NVLINK_1), 'ring') if 'NCCL' in table else (parse_network('pcie3'), 'host')
        for key, (one, *several) in models.items():
            costs = CostModel(0, 1 / one, 0, bytes_of(key[0]), reduce_bytes_per_s=HOST_ADDS, network=network,
                              scheme=scheme, pieces=buckets.MOST)
            yield line('TensorFlow, ' + table, key, costs, dict(zip((2, 4, 8), several)))


def v100():
    """Yield the lines of tensorpack, by NCCL, and of `multi_gpu_model`, whose weights are on one GPU.

    Keras's own work for each sample, which GPUs do not share, is the difference of both on one GPU.
    """
    for key, (one, *several) in TENSORPACK.items():
        costs = CostModel(0, 1 / one, 0, bytes_of(key[0]), network=parse_network('nvlink2'), scheme='ring',
                          pieces=buckets.MOST)
        yield line('tensorpack, V100, NCCL', key, costs, dict(zip((2, 8), several)))
    for key, (one, *several) in MULTI_GPU_MODEL.items():
        alone = TENSORPACK[key][0]
        yield launching('multi_gpu_model, V100', key, alone, 1 / one - 1 / alone, dict(zip((2, 8), several)))
    for data, (one, *several) in OF_AMAZON.items():
        yield launching('multi_gpu_model, V100, %s' % data, ('ResNet-50', 32), one, 0, dict(zip((4, 8), several)))


def launching(table, key, alone, input_s, published):
    """Return the Line of a program whose first published number of GPUs gives the time of a further launch."""
    costs = CostModel(0, 1 / alone, 0, bytes_of(key[0]), input_s, network=parse_network(NVLINK_2), scheme='host',
                      pieces=buckets.MOST)
    n = min(published)
    launch_s = max(0.0, n * key[1] / published[n] - sum(costs.parts(n, n * key[1]).values())) / (n - 1)
    return line(table, key, costs._replace(launch_s=launch_s), published, (n,))


def lines():
    """Return all lines."""
    return [*theano_mpi(), *tensorflow(), *v100()]


def cell(predicted, published, mark=''):
    """Return the text of a prediction."""
    figures = ['{:,.{}f}'.format(each, 0 if each >= 100 else 1) for each in (predicted, published)]
    return '%s%s / %s (%+.0f %%)' % (mark, *figures, 100 * round(error(predicted, published), 9) + 0.)  # no -0.0


def as_markdown(rows, of_row):
    """Return a table of predicted / published, and the error, for 2, 4 and 8 GPUs."""
    text = ['| program, GPUs | model, batch of a GPU | 2 GPUs | 4 GPUs | 8 GPUs |', '|---|---|---|---|---|']
    for row in rows:
        pairs = of_row(row)
        cells = [cell(*pairs[n], '*' * (n in row.calibrating)) if n in pairs else '' for n in (2, 4, 8)]
        text.append('| %s | %s, %d | %s |' % (row.table, row.model, row.batch, ' | '.join(cells)))
    return '\n'.join(text)


def tables():
    """Return the tables: images a second; the exchange alone, in milliseconds; images a second with waiting."""
    rows = lines()
    of_theano = [row for row in rows if row.exchange]
    return (as_markdown(rows, lambda row: {n: (row.predicted[n], rate) for n, rate in row.published.items()}),
            as_markdown(of_theano, lambda row: row.exchange),
            as_markdown(of_theano, lambda row: {n: (row.predicted[n], rate) for n, rate in row.waiting.items()}))


def summary():
    """Return a table of the errors of the predictions: of all, of those for 8 GPUs, and of the exchange alone."""
    text = ['| predictions | number | median error | within 15 % | largest error |', '|---|---|---|---|---|']
    for title, errors in [('the model', errors_of('model')), ('the model, 8 GPUs', errors_of('model', (8,))),
                          ('its exchange alone', errors_of('exchange')), ('n times one GPU', errors_of('n times one')),
                          ('8 times one GPU', errors_of('n times one', (8,)))]:
        text.append('| %s | %d | %.0f %% | %d | %.0f %% |' % (
            title, len(errors), 100 * statistics.median(errors), sum(each <= 0.15 for each in errors),
            100 * max(errors)))
    return '\n'.join(text)


def errors_of(of, numbers=(2, 4, 8)):
    """Return the errors of all predictions for some numbers of GPUs, without signs; for `of` see `Line.pairs`."""
    return [abs(error(*pair)) for row in lines() for n in numbers for pair in row.pairs(n, of)]


if __name__ == '__main__':
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(summary(), *tables(), sep='\n\n')
