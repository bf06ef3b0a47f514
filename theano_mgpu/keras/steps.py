"""The steps that a batch of a Keras model goes through, from Keras's call on, until one of them computes it.

A step is a callable ``step(inputs, proceed)`` that returns a Computed. So does ``proceed(inputs)``, which goes on with
the next step. The last step, ``step(inputs)``, computes the batch.
"""
import functools
from time import perf_counter
from typing import Any, List, NamedTuple, Optional, Sequence

from ..devices.context_map import HOST, Context
from ..enabling.chooser import Way
from ..enabling.trial import Trial
from .variants import length_of


class Computed(NamedTuple):
    """What a batch has come to.

    Attributes
    ----------
    outputs : list of ndarray
    samples : int
        Those of the batch, on all ranks.
    contexts : list of Context
        What it ran on.
    step : DataParallel or None
        What ran it over contexts; None for plain Keras.
    """

    outputs: List[Any]
    samples: int
    contexts: Sequence[Context] = ()
    step: Optional[Any] = None


def chained(steps):
    """Return a callable that takes a batch through a list of steps."""
    return functools.reduce(lambda proceed, step: functools.partial(step, proceed=proceed), reversed(steps[:-1]),
                            steps[-1])


class Count:
    """A step that counts batches for the summary.

    Parameters
    ----------
    usage : Usage
    kind : {'train', 'test', 'predict'}
    """

    def __init__(self, usage, kind):
        self._usage, self._kind = usage, kind

    def __call__(self, inputs, proceed):
        began = perf_counter()
        computed = proceed(inputs)
        self._usage.add(self._kind, computed.samples, perf_counter() - began, computed.contexts)
        return computed


class Choice:
    """A step that leaves some batches to plain Keras, by what is faster for their length.

    Ranks have to choose alike. So they compare their inputs while calls are timed, and once the inputs have differed.

    Parameters
    ----------
    chooser : LengthChooser
    plain : PlainKeras
    contexts : list of Context
        Those of the model. Plain Keras computes on the host.
    """

    def __init__(self, chooser, plain, contexts):
        self._chooser, self._plain = chooser, plain
        self._host = [HOST] if on_devices(contexts) else contexts[:1]

    def __call__(self, inputs, proceed):
        samples, leading = length_of(inputs), self._plain.leading
        if leading.differ or self._chooser.is_open(samples):
            inputs = leading.agree(inputs, samples)
            samples = length_of(inputs)

        def compute(way):
            if way is Way.SEVERAL:
                return proceed(inputs), True
            return Computed(self._plain(inputs), samples, self._host), True
        return self._chooser.run(samples, compute)


class Advice:
    """A step that tells the user where one context would be faster than several.

    Parameters
    ----------
    tell : callable
        ``tell(text, noted)``: a sentence without the name of the model, and whether it belongs into the summary.
    """

    def __init__(self, tell):
        self._tell, self._trial = tell, None

    def __call__(self, inputs, proceed):
        computed = proceed(inputs)
        if computed.step is not None:
            if self._trial is None or self._trial.step is not computed.step:
                self._trial = Trial(computed.step)
            advice = self._trial.after(inputs)
            if advice is not None:
                self._tell(*advice)
        return computed


def on_devices(contexts):
    """Return whether any of the contexts is on a device other than the CPU."""
    return any(context.kind != 'cpu' for context in contexts)
