"""The workers of predict.py: each is a process of its own that predicts all samples for each line ``go`` of its stdin.

All load the model from one file, and write their predictions to a file, which predict.py compares.
"""
import argparse
import contextlib
import multiprocessing
import time

import numpy as np
from scaling_workers import Alone, crew_of_ranks, data, layers_of, serve


def batches(x, size):
    """Return the batches of an array.

    Examples
    --------
    >>> list(batches('abcde', 2))
    ['ab', 'cd', 'e']
    """
    return (x[start:start + size] for start in range(0, len(x), size))


def compete(start, arguments, crew):
    """Measure the first result, save all results, and serve.

    Parameters
    ----------
    start : callable
        ``start(stack)`` returns the function that predicts, and one that warms up what the first batch does not
        reach. It puts objects that have to be closed on the ExitStack. Its time counts: import everything before.
    arguments : argparse.Namespace
    crew : Alone or Ranks
    """
    x, _ = data(arguments.model, arguments.samples)
    crew.barrier()  # else a rank would wait for the imports of another one
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        predict, warm = start(stack)
        predict(x[:arguments.batch_size])
        first = time.perf_counter() - began
        warm(x[:arguments.batch_size])
        outputs = predict(x)
        if crew.first:
            np.save(arguments.output, outputs)
        serve(lambda: predict(x), crew, first)


def work_save(arguments):
    """Save the model, and plain Keras's predictions, the reference for all contenders."""
    import theano_mgpu  # noqa: F401  Theano and Keras import on Python 3.11 thanks to it; nothing else is used

    import keras
    np.random.seed(0)
    model = layers_of(keras, arguments.model)
    model.save(arguments.file)
    x, _ = data(arguments.model, arguments.samples)
    np.save(arguments.output, model.predict(x, batch_size=arguments.batch_size))
    print('ready', flush=True)


def work_keras(arguments):
    """Run plain Keras on Theano."""
    import theano_mgpu  # noqa: F401  as above

    import keras

    def start(stack):
        model = keras.models.load_model(arguments.file, compile=False)
        return lambda x: model.predict(x, batch_size=arguments.batch_size), lambda batch: None

    compete(start, arguments, Alone())


def work_predictor(arguments):
    """Run this package on the contexts of this process, or of all ranks."""
    import theano_mgpu as mgpu
    from theano_mgpu.keras import Predictor

    import keras

    def start(stack):
        mgpu.init(arguments.contexts)
        model = keras.models.load_model(arguments.file, compile=False)
        predictor = stack.enter_context(Predictor(model))
        return lambda x: predictor.predict(x, batch_size=arguments.batch_size), lambda batch: None

    compete(start, arguments, crew_of_ranks())


def work_pool(arguments):
    """Run a multiprocessing.Pool with plain Keras, as in many scripts."""
    context, n = multiprocessing.get_context('spawn'), arguments.workers

    def start(stack):
        # Forked processes would share Theano's open files and devices: spawned ones import Theano themselves.
        pool = stack.enter_context(context.Pool(n, initializer=load, initargs=(arguments.file, context.Barrier(n))))
        return (lambda x: np.concatenate(list(pool.imap(predict_batch, batches(x, arguments.batch_size)))),
                lambda batch: pool.map(predict_and_wait, [batch] * n, chunksize=1))

    compete(start, arguments, Alone())


KEPT = {}  # by a process of the pool


def load(path, barrier):
    """Initialise a process of the pool."""
    import theano_mgpu  # noqa: F401  as above

    import keras
    KEPT.update(model=keras.models.load_model(path, compile=False), barrier=barrier)


def predict_batch(batch):
    """Predict a batch in a process of the pool."""
    return KEPT['model'].predict_on_batch(batch)


def predict_and_wait(batch):
    """Predict and wait for the other processes: else one of them would load its model when the first is timed."""
    predict_batch(batch)
    KEPT['barrier'].wait()


WORK = {'save': work_save, 'keras': work_keras, 'predictor': work_predictor, 'pool': work_pool}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kind', choices=sorted(WORK))
    for name in ('--model', '--contexts', '--file', '--output'):
        parser.add_argument(name, required=True)
    for name in ('--workers', '--batch-size', '--samples'):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    WORK[arguments.kind](arguments)


if __name__ == '__main__':
    main()
