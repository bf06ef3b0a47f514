"""`multi_gpu_model`: Keras's own signature, for Theano's contexts."""
from __future__ import annotations

import copy
from typing import Any

from keras.models import Model, Sequential

from ...auto.divided_model import DividedModel, divided_model_of, set_divided_model
from ...compat import keras_versions
from ...devices.asked_contexts import chosen_contexts
from ...devices.context_map import Context
from ..hooks.methods import switch_methods_once
from ..models import check_compile, states_of
from .given_model import check_built


def multi_gpu_model(model: Model, gpus: Any = None, cpu_merge: bool = True,
                    cpu_relocation: bool = False) -> Model:
    """Replicate a Keras model on several contexts.

    The new model is trained, evaluated and used like any Keras model. It splits each batch into sub-batches, runs each
    on its context, adds the gradients, and applies one update to every replica, so that the results equal the
    results of one device on the whole batch.

    Parameters
    ----------
    model : keras.Model
        The template. It stays usable and owns the weights: both models always show the same ones.
        If it is compiled, the parallel model is compiled like it and continues with its optimizer, so that a model
        from `load_model` continues where it stopped.
    gpus : int, list of int or str, or None
        How many contexts to use, or which ones: their numbers or names; None for all. One is allowed,
        so that the same script runs on a machine with a single device. With several processes, each takes at most that
        many of its own contexts, or its own among the named ones.
    cpu_merge : bool
        Accepted for compatibility: outputs are always merged on the host.
    cpu_relocation : bool
        Accepted for compatibility: the template's weights are on the host already, unless Theano's flag ``device`` put
        them on a GPU; the replicas are elsewhere in both cases.

    Returns
    -------
    keras.Model
        With the methods of the template, also `predict_classes` and `predict_proba` if that is Sequential.

    Raises
    ------
    ValueError
        If `gpus` asks for contexts that do not exist, or the model is not built, or is not a graph of layers.

    Notes
    -----
    BatchNormalization normalises the whole batch, and dropout and noise draw the random numbers of one device.

    The signature is Keras's: ``keras.utils.multi_gpu_model`` (keras/utils/multi_gpu_utils.py, 2.3.1).
    """
    if hasattr(model, 'template'):
        raise ValueError('%s is already a parallel model: pass its template, model.template' % model.name)
    check_built(model, 'multi_gpu_model')
    if not getattr(model, '_is_graph_network', True):  # before Keras 2.2, all are graphs
        raise ValueError('the model %s is a subclass that defines call(): its layers are not a graph, and cannot be '
                         'replicated. Build it from inputs and outputs instead: keras.Model(inputs, outputs)'
                         % model.name)
    cls = ParallelSequential if isinstance(model, Sequential) else ParallelModel
    parallel = cls(model, chosen_contexts(gpus))
    if keras_versions.is_compiled(model):
        compile_like(parallel, model)
        divided_model_of(parallel).make_functions_again(states_of(model))
    return parallel


class ParallelModel(Model):
    """A model that trains, evaluates and predicts on several contexts; made by `multi_gpu_model`.

    It consists of the very layers of its template. It differs only in the functions that Keras calls for each batch:
    ``train_function``, ``test_function`` and ``predict_function`` run over sub-batches.

    Attributes
    ----------
    template : keras.Model
    """

    def __init__(self, template: Model, contexts: list[Context]) -> None:
        switch_methods_once()
        # Not by setattr: Keras takes a model that is set as an attribute for a further layer.
        self.__dict__['template'] = template
        inner = keras_versions.inner(template)
        super().__init__(inner.inputs, inner.outputs, name=template.name)
        set_divided_model(self, DividedModel(template.name, contexts))
        self._compiles_template = not keras_versions.is_compiled(template)
        # The same lists as the template's, so that later additions to these count, too.
        for shared in ('_losses', '_updates', '_per_input_losses', '_per_input_updates', '_metrics'):
            if shared in vars(inner):
                self.__dict__[shared] = vars(inner)[shared]

    @property
    def contexts(self) -> list[Context]:
        """The contexts that the model runs on."""
        return divided_model_of(self).contexts

    @property
    def trainable(self) -> bool:
        return self.template.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        # Keras's own constructor sets True, which is not meant for the template.
        if '_compiles_template' in self.__dict__:
            self.template.trainable = value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configure the model for training, as `keras.Model.compile` does.

        The template is compiled likewise, unless it was before, so that it can be evaluated and saved.
        """
        super().compile(*args, **kwargs)
        check_compile(self)
        set_divided_model(self, DividedModel(self.name, self.contexts, before=divided_model_of(self)))
        if self._compiles_template:
            compile_like(self.template, self)

    def __reduce__(self):
        # A pickle has the content of a file, and also loads as plain Keras.
        from keras.engine import saving  # before Keras 2.2, models cannot be pickled
        return saving.unpickle_model, (saving.pickle_model(self),)

    def get_config(self) -> Any:
        """Return the template's configuration."""
        return self.template.get_config()


class ParallelSequential(ParallelModel):
    """A ParallelModel over a Sequential."""

    predict_proba = Sequential.predict_proba
    predict_classes = Sequential.predict_classes
    flattened_layers = property(lambda self: self.layers)  # Keras 1.0 and 1.1 ask a class of this name for them
    if keras_versions.number() >= (2, 2):  # before, a Sequential has no InputLayer, and its Model has one
        layers = property(lambda self: self.template.layers)


# Keras's files record a model's class by name, and plain Keras must be able to open them.
ParallelModel.__name__, ParallelSequential.__name__ = 'Model', 'Sequential'


def compile_like(model: Model, other: Model) -> None:
    """Compile a model like another one, with its optimizer."""
    arguments = keras_versions.compile_arguments(other)
    model.compile(**{name: fresh_metrics(value) if name.endswith('metrics') else value
                     for name, value in arguments.items()})


def fresh_metrics(metrics: Any) -> Any:
    """Return the same metrics for another model: a Metric keeps state and updates, and belongs to one model.

    So does a Layer, which may be a metric in Keras 2.1 and 2.2.
    """
    if hasattr(metrics, 'get_config'):
        return type(metrics).from_config(metrics.get_config())
    if isinstance(metrics, dict):
        return {name: fresh_metrics(value) for name, value in metrics.items()}
    if isinstance(metrics, (list, tuple)):
        return [fresh_metrics(value) for value in metrics]
    return copy.copy(metrics)
