"""An MPI job of tests: train a placed model on several ranks."""
import theano_mgpu as mgpu

import numpy as np

from .placed_models import Training, made
from .rank_network import write


def placed(path, contexts, name, *sizes):
    """Train a model that is placed on the contexts a and b, of the first rank; writes all outputs,
    all state afterwards, and the number of replicas."""
    mgpu.init(contexts)
    training = Training(made(name, ['a', 'b']), 'training_function')
    outputs = training.run([int(size) for size in sizes])
    write(path, sum(outputs, []) + training.values() + [np.array(training.step.n_replicas)])
