"""The Keras model that `multi_gpu_model` returns."""
from __future__ import annotations

import copy
from typing import Any

import keras
from keras.engine import saving

from ..devices.context_map import Context
from .batch import members
from .functions import check_compile
from .methods import switch_methods_once
from .parallel_state import ParallelState, parallel_state_of, set_parallel_state


def parallel_model(template: keras.Model, contexts: list[Context]) -> ParallelModel:
    """Return a ParallelModel over a template; compiled like it, if it is.

    Its class has the name of the template's class: Keras's files record a model's class by name, and plain Keras must
    be able to open them.
    """
    name, base = ('Sequential', ParallelSequential) if isinstance(template, keras.Sequential) else (
        'Model', ParallelModel)
    model = type(name, (base,), {'__module__': __name__, '__doc__': ParallelModel.__doc__})(template, contexts)
    if template._is_compiled:
        compile_like(model, template)
        parallel_state_of(model).continued = True  # with the state of the template's optimizer
    return model


def compile_like(model: keras.Model, other: keras.Model) -> None:
    """Compile a model like another one, with its optimizer."""
    model.compile(other.optimizer, other.loss, fresh_metrics(other._compile_metrics), other.loss_weights,
                  other.sample_weight_mode, fresh_metrics(other._compile_weighted_metrics), **other._function_kwargs)


class ParallelModel(keras.Model):
    """A model that trains, evaluates and predicts on several contexts; made by `multi_gpu_model`.

    It consists of the very layers of its template. It differs only in the functions that Keras calls for each batch:
    ``train_function``, ``test_function`` and ``predict_function`` run over sub-batches.

    Attributes
    ----------
    template : keras.Model
    """

    def __init__(self, template: keras.Model, contexts: list[Context]) -> None:
        switch_methods_once()
        # Not by setattr: Keras takes a model that is set as an attribute for a further layer.
        self.__dict__['template'] = template
        super().__init__(inputs=template.inputs, outputs=template.outputs, name=template.name)
        set_parallel_state(self, ParallelState(template.name, contexts))
        self._compiles_template = not template._is_compiled
        # The same lists as the template's, so that later additions to these count, too.
        for shared in ('_losses', '_updates', '_per_input_losses', '_per_input_updates', '_metrics'):
            self.__dict__[shared] = getattr(template, shared)

    @property
    def contexts(self) -> list[Context]:
        """The contexts that the model runs on."""
        return parallel_state_of(self).contexts

    @property
    def trainable(self) -> bool:
        return self.template.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        # Keras's own constructor sets True, which is not meant for the template.
        if '_is_compiled' in self.__dict__:
            self.template.trainable = value

    def compile(self, optimizer: Any, loss: Any = None, metrics: Any = None, loss_weights: Any = None,
                sample_weight_mode: Any = None, weighted_metrics: Any = None, target_tensors: Any = None,
                **kwargs: Any) -> None:
        """Configure the model for training, as `keras.Model.compile` does.

        The template is compiled likewise, unless it was before, so that it can be evaluated and saved.
        `kwargs` go to `theano.function`.
        """
        check_compile(kwargs, members(target_tensors))
        super().compile(optimizer, loss, metrics, loss_weights, sample_weight_mode, weighted_metrics, target_tensors,
                        **kwargs)
        set_parallel_state(self, ParallelState(self.name, self.contexts))
        if self._compiles_template:
            compile_like(self.template, self)

    def __reduce__(self):
        # A pickle has the content of a file, and also loads as plain Keras.
        return saving.unpickle_model, (saving.pickle_model(self),)

    def get_config(self) -> Any:
        """Return the template's configuration."""
        return self.template.get_config()


class ParallelSequential(ParallelModel):
    """A ParallelModel over a Sequential."""

    predict_proba = keras.Sequential.predict_proba
    predict_classes = keras.Sequential.predict_classes

    @property
    def layers(self) -> list[keras.layers.Layer]:
        return self.template.layers


def fresh_metrics(metrics: Any) -> Any:
    """Return the same metrics for another model: a Metric keeps state and updates, and belongs to one model."""
    if isinstance(metrics, keras.metrics.Metric):
        return type(metrics).from_config(metrics.get_config())
    if isinstance(metrics, dict):
        return {name: fresh_metrics(value) for name, value in metrics.items()}
    if isinstance(metrics, (list, tuple)):
        return [fresh_metrics(value) for value in metrics]
    return copy.copy(metrics)
