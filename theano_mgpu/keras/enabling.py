"""`enable` and `disable`: every Keras model of the process over several contexts."""
import functools
import re
import sys
import time
import weakref

from keras import backend as K

from ..errors import GraphError, warn
from ..patches import compat
from ..profiling.trial import Trial
from . import functions
from .methods import LOOPS, METHODS
from .multi_gpu import check_built, chosen_contexts, multi_gpu_model
from .parallel_state import ParallelState, parallel_state_of, set_parallel_state
from .report import Report
from .verification import check_alone, verify_batch, verify_prediction

_enabled = None  # the Enabled that counts now


def enable(gpus=None, strict=False, verify=False, tell=warn):
    """Have every Keras model that is compiled from now on run over several contexts.

    Its train, test and predict functions then divide each batch, as those of `multi_gpu_model` do; everything else of
    the model is Keras's own, so that a script needs no change. Models that are not compiled predict over contexts,
    too. Models that were compiled before stay as they are. ``theano-mgpu run`` enables it for a whole script.

    Parameters
    ----------
    gpus : int, list of int or str, or None
        How many contexts to use, or which ones, as for `multi_gpu_model`; None for all.
    strict : bool
        Raise a GraphError for what is else said once: a model that cannot be exactly as on one device, or cannot
        run over contexts, or for which one context is faster.
    verify : bool
        Compare one step on one device with one on the contexts, see `verify`, on the first batch of each model, and
        print the certificate to stderr. Of a model that predicts first the outputs are compared.
    tell : callable
        What is called with a text for the user; by default that is issued as an MgpuWarning.

    Returns
    -------
    Report
        What the models did so far, and what was said of them. Print it.

    Raises
    ------
    ContextError
        If `gpus` asks for what is not there.

    Notes
    -----
    A model is left to plain Keras, with a word, where it reads its data from a tensor, or is compiled with
    options that contexts do not take. A stateful model takes as many contexts as divide its batch. A model whose first
    batch fails when it is divided, and succeeds as a whole, runs on the first context; strict raises the error.

    Examples
    --------
    >>> import keras, numpy as np, theano_mgpu
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> report = enable()
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,))])
    >>> model.compile('sgd', 'mse')
    >>> history = model.fit(np.ones((20, 4)), np.ones((20, 3)), batch_size=8, verbose=0)
    >>> report.usages[-1].samples, [context.name for context in report.usages[-1].contexts]
    ({'train': 20}, ['dev0', 'dev1'])
    >>> disable()
    """
    global _enabled
    if verify:
        check_alone()
    chosen_contexts(gpus)
    _patch_keras_once()
    _enabled = Enabled(gpus, strict, verify, tell)
    return _enabled.report


def disable():
    """Leave models that are compiled from now on to plain Keras; those that were compiled before stay as they are."""
    global _enabled
    _enabled = None


@functools.lru_cache(maxsize=None)
def _patch_keras_once():
    compat.switch_keras_methods(METHODS, applies=parallel_state_of)
    # A model that is not built yet is compiled by its first batch, within the loop.
    compat.switch_keras_methods(LOOPS, applies=lambda model: parallel_state_of(model) or (_enabled and not model.built))
    compat.switch_keras_methods({'compile': _compile, '_make_predict_function': _make_predict_function},
                                applies=lambda model: not hasattr(model, 'template'))
    compat.replace_multi_gpu_model(multi_gpu_model, applies=lambda: _enabled)


def _compile(original):
    @functools.wraps(original)
    def compile(self, *args, **kwargs):
        before = parallel_state_of(self)
        set_parallel_state(self, None)
        original(self, *args, **kwargs)
        if _enabled and self.built:
            _enabled.attach(self, before)
    return compile


def _make_predict_function(original):
    @functools.wraps(original)
    def _make_predict_function(self):
        if _enabled and not self._is_compiled and not parallel_state_of(self):
            _enabled.attach(self)
        original(self)
    return _make_predict_function


class Enabled:
    """What `enable` was given, and what came of it.

    Attributes
    ----------
    report : Report
    """

    def __init__(self, gpus, strict, verify, tell):
        self.gpus, self.strict, self.verifies, self._tell = gpus, strict, verify, tell
        self.report = Report()
        self._said = set()

    def attach(self, model, before=None):
        """Have a model run over the contexts; `before` is its ParallelState from a former `compile`, if any."""
        obstacle = _obstacle(model)
        if obstacle:
            self.say(model.name, 'is left to plain Keras, on the host or the device of the flag "device": %s'
                     % obstacle)
            return
        usage = before.usage if isinstance(before, EnabledState) else self.report.usage(model.name)
        set_parallel_state(model, EnabledState(self, model, usage, chosen_contexts(self.gpus)))

    def say(self, name, text, noted=True):
        """Tell the user of the model of that name, once whatever the numbers in the text; an error if strict.

        It is in the report, too, if `noted`.
        """
        whole = '%s %s' % (name, text)
        if self.strict:
            raise GraphError(whole)
        key = name, re.sub(r'\d', '', text)
        if key not in self._said:
            self._said.add(key)
            if noted:
                self.report.notes.append(whole)
            self._tell(whole)


def _obstacle(model):
    """Why a model cannot run over contexts; None if it can."""
    try:
        functions.check_options(getattr(model, '_function_kwargs', {}))
        check_built(model, 'enable')
    except ValueError as error:
        return str(error)
    if model._is_compiled and not all(K.is_placeholder(target) for target in model.targets if target is not None):
        return 'its targets are tensors, which cannot be split into sub-batches'
    return None


class EnabledState(ParallelState):
    """How a model that `enable` found runs over contexts."""

    def __init__(self, enabled, model, usage, contexts):
        super().__init__(model.name, contexts)
        self.enabled, self.usage, self.strict = enabled, usage, enabled.strict
        self._model = weakref.ref(model)
        self._verified = set()
        self._trial = None

    def say(self, text):
        self.enabled.say(self.name, text)

    def observe(self, kind, function):
        function.observer = functools.partial(self._train if kind == 'train' else self._timed, kind)

    def _timed(self, kind, function, inputs, compute):
        if self.enabled.verifies:
            self._verify(verify_prediction if kind == 'predict' else verify_batch, inputs)
        began = time.perf_counter()
        results = compute()
        seconds = time.perf_counter() - began
        self.usage.add(kind, function.samples, seconds, function.function.contexts)
        return results

    def _train(self, kind, function, inputs, compute):
        results = self._timed(kind, function, inputs, compute)
        if self._trial is None or self._trial.step is not function.function:
            self._trial = Trial(function.function)
        trial = self._trial
        if trial.open:
            verdict = trial.after(inputs)
            if verdict:
                self.enabled.say(self.name, trial.text(*verdict), noted=False)
            if trial.error:
                self.enabled.report.notes.append('%s: whether one context is faster is not known, since it failed on a '
                                                 'whole batch: %s' % (self.usage.name, trial.error))
        return results

    def _verify(self, verify, inputs):
        # A step says more than its prediction.
        if self._verified & {verify, verify_batch}:
            return
        self._verified.add(verify)
        certificate = verify(self._model(), inputs, self.contexts)
        print('theano_mgpu: %s: %s' % (self.name, certificate), file=sys.stderr)
        if self.enabled.strict and not certificate.passed:
            raise GraphError('%s does not give the same answer on several contexts: see the certificate above'
                             % self.name)
