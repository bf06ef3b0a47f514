"""Whether one context would be faster than several, measured on the first batches of training."""
import statistics

WARM_UP = 3     # batches before the first that counts: kernels are built, buffers are allocated
ROUNDS = 5      # batches that count
SECONDS = 2.0   # the trial ends sooner if one context has taken this long
MARGIN = 1.1    # one context is faster if several take longer by this factor; less is noise


class Trial:
    """Compares the time of training steps with the time of one context for the same batches.

    Parameters
    ----------
    step : TrainingFunction

    Attributes
    ----------
    step : TrainingFunction
    open : bool
        Whether it is still measuring.
    error : Exception or None
        Why one context could not be measured: the whole batch may not fit on it.
    """

    def __init__(self, step):
        self.step = step
        self._calls = 0
        self._several, self._one = [], []
        self.error = None
        self.open = (len(step.mesh.replicas) > 1 == len(step.mesh.places) and step.ranks.size == 1 and
                     not step.inputs.rows)

    def after(self, args):
        """Measure a batch; call it after each step with the step's arguments.

        Returns
        -------
        (float, float) or None
            Seconds that a batch takes on one context and on several; returned once, if one context is faster.
        """
        self._calls += 1
        if not self.open or self._calls <= WARM_UP:
            return None
        try:
            self._one.append(seconds_alone(self.step, args))
        except Exception as error:  # GpuArrayException, MemoryError ...: kept for the caller
            self.open, self.error = False, error
            return None
        self._several.append(self.step.seconds)
        if len(self._one) < ROUNDS and sum(self._one) < SECONDS:
            return None
        self.open = False
        one, several = statistics.median(self._one), statistics.median(self._several)
        return (one, several) if several > MARGIN * one else None

    def text(self, one, several):
        """The message of a result for the user, without the name of the model."""
        contexts = self.step.contexts
        on_host = all(context.kind == 'cpu' for context in contexts)
        return ('trains on %d contexts, but one context is faster: %.3g ms a batch, not %.3g ms. Give larger batches, '
                'or use %s' % (len(contexts), one * 1e3, several * 1e3,
                            'the cores by processes (theano-mgpu launch)' if on_host else 'one context (gpus=1)'))


def seconds_alone(step, args):
    """Return the seconds that one context takes for a batch."""
    return step.seconds_alone(args)
