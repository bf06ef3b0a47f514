"""Hooks on Keras's loops over batches."""
import functools

keras_batches = None  # who is told of the batches of Keras's loops: theano_mgpu.keras.prefetch


def mend_keras_slicing(training_arrays):
    """Tell of each slice that Keras 2.3.1's loops take: they take a batch only once the one before is done."""
    original = training_arrays.slice_arrays

    @functools.wraps(original)
    def slice_arrays(arrays, start=None, stop=None):
        if keras_batches is None or stop is not None:
            return original(arrays, start, stop)
        return keras_batches.slice(original, arrays, start)

    training_arrays.slice_arrays = slice_arrays


def mend_keras_queues(data_utils):
    """Tell of the queues that Keras 2.3.1's loops take batches from."""
    for enqueuer in (data_utils.OrderedEnqueuer, data_utils.GeneratorEnqueuer):
        enqueuer.get = _telling(enqueuer.get)


def _telling(original):
    @functools.wraps(original)
    def get(self):
        if keras_batches is not None:
            keras_batches.queue(self)
        return original(self)
    return get
