"""How a function over a batch is compiled and run."""
from collections import namedtuple

import theano
from theano.gof.graph import ancestors
from theano.tensor.nnet.bn import AbstractBatchNormTrain

from .errors import GraphError

# Flags with which results are not those of one device.
INEXACT = {'batch_statistics': 'local', 'random': 'independent', 'exchange': 'float16'}
UPDATE_ON = 'device', 'sharded', 'host'  # where new values are computed

DEFAULTS = {
    'samples': None, 'broadcast': (), 'givens': None, 'no_default_updates': False, 'contexts': None, 'executor': None,
    'mode': None, 'name': None, 'allow_input_downcast': None, 'profile': None, 'micro_batches': None,
    'least_samples': 1, 'sharded': None, 'update_on': None, 'recompute': None,
    # Of a function whose first arguments are known: those arguments, the samples that they have, and whether it is an
    # error that it cannot be divided.
    'example': None, 'length': None, 'must_divide': False,
    # Whether every process takes the arguments of rank 0 where those of others differ; else that is an error.
    'led_by_first': False,
    # Whether it has no batch: one replica computes it as it is.
    'whole': False,
    # Trained parameters. Processes may exchange their gradients in half precision.
    'params': ()}


class Options(namedtuple('Options', list(DEFAULTS))):
    """The keywords that `mgpu.function` and `mgpu.training_function` share; they are documented there.

    `micro_batches` and `recompute` are those of the flags ``mgpu.micro_batches`` and ``mgpu.recompute`` if they are
    None.

    Examples
    --------
    >>> Options(micro_batches=2).micro_batches
    2
    """

    def __new__(cls, **given):
        options = super().__new__(cls, **dict(DEFAULTS, **given))
        if options.micro_batches is None:
            options = options._replace(micro_batches=theano.config.mgpu.micro_batches)
        if options.recompute is None:
            options = options._replace(recompute=theano.config.mgpu.recompute == 'True')
        if not isinstance(options.micro_batches, int) or options.micro_batches < 1:
            raise GraphError('micro_batches is a number of slices, at least 1, not %r' % (options.micro_batches,))
        if options.update_on not in (None, 'auto') + UPDATE_ON:
            raise GraphError("update_on is 'auto', 'device', 'sharded' or 'host', not %r" % (options.update_on,))
        return options

    def updates_on(self, contexts):
        """Where new values are computed, of `UPDATE_ON`."""
        where = self.update_on or theano.config.mgpu.update_on
        if where != 'auto':
            return where
        return 'host' if all(context.kind == 'cpu' for context in contexts) else 'device'

    def least(self, outputs):
        """Samples that a sub-batch has at least: at least two where each is normalised by itself."""
        normalised = theano.config.mgpu.batch_statistics == 'local' and any(
            v.owner and isinstance(v.owner.op, AbstractBatchNormTrain) for v in ancestors(outputs))
        return max(self.least_samples, 2 if normalised else 1)

    def is_sharded(self, ranks):
        """Whether there are several processes, each with samples of its own."""
        return ranks.size > 1 and (theano.config.mgpu.data == 'sharded' if self.sharded is None else self.sharded)


def check_exact_flags():
    """Raise a GraphError if a flag asks for other results than those of one device."""
    for name, value in INEXACT.items():
        if getattr(theano.config.mgpu, name) == value:
            raise GraphError('mgpu.%s=%s gives other results than one device, which strict does not allow: leave out '
                             'one of the two' % (name, value))
