"""The workers of scaling.py: each is a process of its own that trains an epoch for each line ``go`` of its stdin.

Their interpreter may have only NumPy and PyTorch: nothing else is imported at the top of this file.
"""
import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import time

import numpy as np

SAMPLES = 1280
SETTLED = 12      # epochs in which the way of a function does not change: it is not timed any more
WARM_UP = 2       # epochs of a worker before it says that it is ready
NAP = 0.005       # seconds between two polls of an idle MPI rank for a command
CALLS = 'fit', 'step', 'predict'
SHAPES = {'cnn': (28, 28, 1), 'mlp': (784,), 'lstm': (20, 32), 'autoencoder': (32, 32, 1), 'words': (10,)}
WORDS, EMBEDDED = 200000, 64  # of the table of words, which is trained by SGD; the others by Adam
UNITS = 64              # of the LSTM
FILTERS = (16, 32, 64)  # of the autoencoder's encoder


def data(model, samples=SAMPLES):
    """Return samples, and labels, or the images that an autoencoder has to reproduce; the same in every process."""
    rng = np.random.RandomState(0)
    x = rng.randint(0, WORDS, (samples, *SHAPES[model])) if model == 'words' else \
        rng.rand(samples, *SHAPES[model]).astype('float32')
    return x, x if model == 'autoencoder' else rng.randint(0, 10, (samples, 1))


class Alone:
    """A worker of one process. The classes below have the same methods for workers with several processes."""

    first = True  # whether this process reads the commands and answers

    def broadcast(self, go):
        """Return the first process's value, on each process."""
        return go

    def barrier(self):
        """Wait until each process is here."""


class Ranks:
    """The ranks of an MPI job."""

    def __init__(self):
        from mpi4py import MPI
        self._comm = MPI.COMM_WORLD.Dup()  # its messages do not mix with the messages of the measured steps
        self.first = self._comm.rank == 0

    def broadcast(self, go):
        flag = np.array([go], 'int32')
        request = self._comm.Ibcast(flag, 0)
        while not request.Test():  # bcast itself would spin, and take a core from the worker that is timed
            time.sleep(NAP)
        return bool(flag[0])

    def barrier(self):
        self._comm.Barrier()


class Gloo:
    """The processes of a torch.distributed group; gloo waits in the kernel."""

    def __init__(self, dist, tensor):
        self._dist, self._tensor = dist, tensor
        self.first = dist.get_rank() == 0

    def broadcast(self, go):
        flag = self._tensor([int(go)])
        self._dist.broadcast(flag, 0)
        return bool(flag.item())

    def barrier(self):
        self._dist.barrier()


def crew_of_ranks():
    """Return the ranks of this job; an Alone where there is one process."""
    return Ranks() if int(os.environ.get('OMPI_COMM_WORLD_SIZE', '1')) > 1 else Alone()


def serve(epoch, crew, *figures):
    """Warm up, print figures that are known by then, and compute an epoch for each line `go` until stdin ends."""
    for _ in range(WARM_UP):
        epoch()
    crew.barrier()
    if crew.first:
        print('ready', *figures, sep='\n', flush=True)
    while crew.broadcast(crew.first and sys.stdin.readline().strip() == 'go'):
        crew.barrier()
        start = time.perf_counter()
        epoch()
        crew.barrier()
        if crew.first:
            print('%.6f' % (time.perf_counter() - start), flush=True)


def layers_of(keras, model):
    """Return the model in Keras: 2.3.1's, or TensorFlow's."""
    layers = keras.layers
    if model == 'mlp':
        return keras.Sequential([layers.Dense(1024, activation='relu', input_shape=SHAPES[model]),
                                 layers.Dense(1024, activation='relu'), layers.Dense(10, activation='softmax')])
    if model == 'words':
        return keras.Sequential([layers.Embedding(WORDS, EMBEDDED, input_length=SHAPES[model][0]),
                                 layers.GlobalAveragePooling1D(), layers.Dense(10, activation='softmax')])
    if model == 'lstm':
        return keras.Sequential([layers.LSTM(UNITS, input_shape=SHAPES[model]), layers.Dense(10, activation='softmax')])
    if model == 'autoencoder':
        same = dict(strides=2, padding='same')
        return keras.Sequential(
            [layers.Conv2D(FILTERS[0], 3, activation='relu', input_shape=SHAPES[model], **same)] +
            [layers.Conv2D(n, 3, activation='relu', **same) for n in FILTERS[1:]] +
            [layers.Conv2DTranspose(n, 3, activation='relu', **same) for n in FILTERS[-2::-1]] +
            [layers.Conv2DTranspose(1, 3, activation='sigmoid', **same)])
    return keras.Sequential([layers.Conv2D(32, (3, 3), activation='relu', input_shape=SHAPES[model]),
                             layers.MaxPooling2D((2, 2)), layers.Flatten(), layers.Dense(10, activation='softmax')])


def loss_of(model):
    """Return the loss of the model, by Keras's name."""
    return 'mse' if model == 'autoencoder' else 'sparse_categorical_crossentropy'


def optimizer_of(model):
    """Return the optimizer of the model, by Keras's name."""
    return 'sgd' if model == 'words' else 'adam'


def epoch_of(model, arguments):
    """Return one epoch of a Keras model on Theano, as a callable."""
    model.compile(optimizer_of(arguments.model), loss_of(arguments.model))
    x, y = data(arguments.model)
    size = arguments.batch_size
    slices = [slice(start, start + size) for start in range(0, SAMPLES, size)]
    return {'fit': lambda: model.fit(x, y, batch_size=size, epochs=1, verbose=0),
            'step': lambda: [model.train_on_batch(x[each], y[each]) for each in slices],
            'predict': lambda: model.predict(x, batch_size=size)}[arguments.call]


def work_keras(arguments):
    """Run plain Keras on Theano."""
    import theano_mgpu  # noqa: F401  Theano and Keras import on Python 3.11 thanks to it; nothing else is used

    import keras
    np.random.seed(0)
    serve(epoch_of(layers_of(keras, arguments.model), arguments), Alone())


def work_without(arguments):
    """Run Keras on Theano 1.0.5 without this package; they only find the names that NumPy and Python have removed."""
    import builtins
    import collections.abc

    import theano_mgpu_first
    sys.meta_path.remove(theano_mgpu_first.Finder)  # in a process that this package has started, it imports it
    for name in ('bool', 'int', 'float', 'complex', 'object', 'str'):
        setattr(np, name, getattr(builtins, name))
    for name in ('Iterable', 'Mapping', 'Sequence'):
        setattr(collections, name, getattr(collections.abc, name))
    os.environ['THEANO_FLAGS'] += ',blas.ldflags=-lopenblas,base_compiledir=' + os.path.expanduser('~/.theano/without')
    import keras
    assert 'theano_mgpu' not in sys.modules
    np.random.seed(0)
    serve(epoch_of(layers_of(keras, arguments.model), arguments), Alone())


def work_cores(arguments):
    """Run plain Keras as `theano-mgpu run` does, on as many cores as there are threads; begin once a way is chosen."""
    import theano_mgpu as mgpu

    import keras
    np.random.seed(0)
    report = mgpu.enable()
    epoch = epoch_of(layers_of(keras, arguments.model), arguments)
    reasons = []  # after each epoch
    while len(reasons) < SETTLED or len(set(reasons[-SETTLED:])) > 1 or ' ms' not in reasons[-1]:
        epoch()
        reasons.append(report.usages[0].why if report.usages else '')
    print(report, file=sys.stderr)
    serve(epoch, Alone())


def work_sharded(arguments):
    """Run this package, with the update divided among the ranks."""
    os.environ['THEANO_FLAGS'] += ',mgpu.update_on=sharded'
    work_mgpu(arguments)


def work_mgpu(arguments):
    """Run this package: the same call of fit on each rank."""
    import theano_mgpu as mgpu
    from theano_mgpu.keras import multi_gpu_model

    import keras
    mgpu.init('host->cpu')  # else each rank would take its share of this machine's GPUs
    np.random.seed(0)       # the ranks start from the same weights, and shuffle alike
    model = multi_gpu_model(layers_of(keras, arguments.model))
    serve(epoch_of(model, arguments), crew_of_ranks())


def work_torch(arguments):
    """Run PyTorch; several workers are processes that the first one starts."""
    import torch
    torch.set_num_threads(arguments.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    model = torch_model(torch, arguments.model)
    workers, rank = arguments.workers, arguments.torch_rank
    if workers == 1:
        return serve(torch_epoch(torch, model, arguments), Alone())
    import torch.distributed as dist
    store = dist.TCPStore('127.0.0.1', arguments.torch_port, workers, is_master=rank == 0, wait_for_workers=False)
    started = [subprocess.Popen([sys.executable] + sys.argv + ['--torch-rank=%d' % other,
                                                               '--torch-port=%d' % store.port],
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
               for other in range(1, workers if rank == 0 else 1)]
    # The timeout also limits the wait for the next command, during the other contenders' turns.
    dist.init_process_group('gloo', store=store, rank=rank, world_size=workers, timeout=datetime.timedelta(days=1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    serve(torch_epoch(torch, model, arguments), Gloo(dist, torch.tensor))
    dist.destroy_process_group()
    for process in started:
        process.wait()


def torch_model(torch, model):
    """Return the model in PyTorch; the softmax is in the loss."""
    nn = torch.nn
    if model == 'words':
        class Mean(nn.Module):
            def forward(self, x):
                return x.mean(dim=1)
        return nn.Sequential(nn.Embedding(WORDS, EMBEDDED), Mean(), nn.Linear(EMBEDDED, 10))
    if model == 'lstm':
        class LastState(nn.LSTM):
            def forward(self, x):
                return super().forward(x)[0][:, -1]
        return nn.Sequential(LastState(SHAPES[model][1], UNITS, batch_first=True), nn.Linear(UNITS, 10))
    if model == 'autoencoder':
        halve, double = dict(stride=2, padding=1), dict(stride=2, padding=1, output_padding=1)
        down = zip((1,) + FILTERS, FILTERS)
        up = zip(FILTERS[::-1], FILTERS[-2::-1] + (1,))
        stack = [layer for a, b in down for layer in (nn.Conv2d(a, b, 3, **halve), nn.ReLU())]
        stack += [layer for a, b in up for layer in (nn.ConvTranspose2d(a, b, 3, **double), nn.ReLU())]
        return nn.Sequential(*stack[:-1], nn.Sigmoid())
    if model == 'mlp':
        return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))


def torch_epoch(torch, model, arguments):
    """Return one epoch of PyTorch over this worker's part of each batch, as a callable."""
    x, y = map(torch.from_numpy, data(arguments.model))
    x = x.movedim(-1, 1).contiguous() if x.ndim == 4 else x
    y = x if arguments.model == 'autoencoder' else y[:, 0]
    loss = torch.nn.MSELoss() if arguments.model == 'autoencoder' else torch.nn.CrossEntropyLoss()
    optimizers = {'adam': torch.optim.Adam, 'sgd': lambda params: torch.optim.SGD(params, lr=.01)}
    optimizer = optimizers[optimizer_of(arguments.model)](model.parameters())
    order = torch.Generator().manual_seed(0)  # the same on each worker

    def predict():
        with torch.no_grad():
            for batch in torch.arange(SAMPLES).split(arguments.batch_size):
                model(x[batch.tensor_split(arguments.workers)[arguments.torch_rank]])

    def epoch():
        for batch in torch.randperm(SAMPLES, generator=order).split(arguments.batch_size):
            rows = batch.tensor_split(arguments.workers)[arguments.torch_rank]
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return predict if arguments.call == 'predict' else epoch


def work_tensorflow(arguments):
    """Run TensorFlow's Keras; several workers are logical CPU devices of one process."""
    import tensorflow as tf
    workers, threads = arguments.workers, arguments.threads
    tf.config.set_visible_devices([], 'GPU')
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(workers, threads))  # a replica runs on one of these
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0],
                                               [tf.config.LogicalDeviceConfiguration()] * workers)
    tf.random.set_seed(0)
    strategy = contextlib.nullcontext()
    if workers > 1:
        strategy = tf.distribute.MirroredStrategy(['CPU:%d' % i for i in range(workers)]).scope()
    with strategy:
        model = layers_of(tf.keras, arguments.model)
        model.compile(optimizer_of(arguments.model), loss_of(arguments.model))
    # Not shuffled, since tf.data would do that sample by sample: to its advantage.
    batches = tf.data.Dataset.from_tensor_slices(data(arguments.model)).batch(arguments.batch_size).prefetch(2)
    serve(lambda: model.fit(batches, epochs=1, verbose=0), Alone())


WORK = {'without': work_without, 'keras': work_keras, 'cores': work_cores, 'mgpu': work_mgpu, 'sharded': work_sharded,
        'torch': work_torch, 'tensorflow': work_tensorflow}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kind', choices=sorted(WORK))
    parser.add_argument('--model', choices=sorted(SHAPES), required=True)
    for name in ('--workers', '--threads', '--batch-size'):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument('--call', choices=CALLS, required=True)
    parser.add_argument('--torch-rank', type=int, default=0, help="number of a process that PyTorch's first one starts")
    parser.add_argument('--torch-port', type=int, default=0, help='of the first one; 0: any free port')
    arguments = parser.parse_args()
    WORK[arguments.kind](arguments)


if __name__ == '__main__':
    main()
