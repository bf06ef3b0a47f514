"""The functions of a Keras model, its inputs, new values and metrics, and the arrays in a user's data."""
from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

from keras import backend as K
from keras.models import Model

from ..auto.dispatched import BatchSource, Dispatched
from ..auto.divided_model import divided_model_of
from ..auto.model_function import Hint, ModelFunction
from ..auto.rank_0_function import keep_alike
from ..compat import keras_versions
from ..graph import layers, theano_functions
from ..graph.traces import name_layer
from .hooks import keras_loops

OPTIONS = ('mode', 'givens')  # keywords of theano.function that compile() takes
KINDS = ('train', 'test', 'predict')


def make_function(kind: str, original: Callable[..., Any], self: Model) -> None:
    """Make a model's train, test or predict function, as the method `original` of `keras.models.Model` does."""
    name, divided = kind + '_function', divided_model_of(self)
    if getattr(self, name, None) is not None or kind != 'predict' and not hasattr(self, name):
        original(self)  # it checks the model
        if kind in divided.functions:
            divided.functions[kind].compile()  # now, if rank 0 has made it alone
        return
    made: list[ModelFunction] = []
    for layer in self.layers:  # those nearer to the inputs first
        for node in keras_versions.calls_of(layer):
            name_layer(node.output_tensors, node.input_tensors, layer.name)
    name_layer([self.total_loss] if layers.is_on and hasattr(self, 'total_loss') else [], (), 'loss')
    with theano_functions.replaced_functions(functools.partial(_replaced, self, kind, made)):
        original(self)
    if kind == 'train' and divided.continued:
        take_states(self, divided.continued)
        divided.continued = None
    if made:
        try:
            made[0].compile()
        except BaseException:  # Ctrl-C, too: as in plain Keras, there is no function then
            setattr(self, name, None)
            raise
        divided.functions[kind] = made[0]


def _replaced(model, kind, made, arguments, compile):
    """Return the function that Keras gets in place of one of Theano; a ModelFunction of batches goes into a list, too.
    """
    inputs = arguments['params']
    if made and not inputs:  # the values of Keras's metrics, after each batch
        made[0].read = compile()
        return made[0].values
    if made or not set(keras_versions.feed_inputs(model)).issubset(inputs):  # one that an optimizer asks for
        return compile()
    make_plain = functools.lru_cache(None)(lambda: keep_alike(compile(), kind + '_function'))
    function = ModelFunction(divided_model_of(model), hint_of(model, kind, inputs), arguments, make_plain)
    made.append(function)
    if not function.is_whole:
        return function
    plain = compile()
    plain.mgpu_divided = Dispatched(BatchSource(function), always=True)
    return plain


def hint_of(model: Model, kind: str, inputs: Iterable[Any]) -> Hint:
    """Return the Hint of a function that Keras makes for a model, with some inputs."""
    samples = [variable for variable in inputs if variable.ndim > 0]
    return Hint(kind, samples, samples[0]._keras_shape[0], keras_versions.trained_weights(model), model.weights,
                set(keras_versions.metric_weights(model)), following)


def following(function: ModelFunction, inputs: list[Any]) -> Callable[[], Any] | None:
    """Return a callable that returns the inputs of the next batch; None where the running loop does not know them."""
    loop = keras_loops.running.batches
    return functools.partial(loop.after, inputs) if loop is not None and loop.calls(function) else None


def take_states(model: Model, before: list[Any]) -> None:
    """Give the state variables that the optimizer of a model has made the values of those `before`, if they are alike.

    It makes new ones each time that Keras asks it for its updates.
    """
    after = states_of(model)
    if len(before) == len(after) and all(old.type == new.type and old.get_value().shape == new.get_value().shape
                                         for old, new in zip(before, after)):
        for old, new in zip(before, after):
            new.set_value(old.get_value())


def states_of(model: Model) -> list[Any]:
    """Return the state variables of the optimizer of a model, in the optimizer's order; none without a train function.

    They are in two lists that Keras's optimizers have: its `weights`, and the variables of its `updates`.
    """
    inner = keras_versions.inner(model)
    if getattr(inner, 'train_function', None) is None:
        return []
    optimizer = inner.optimizer
    updates = getattr(optimizer, 'updates', ())  # a class of the user's may have neither list
    named = [*getattr(optimizer, 'weights', ()), *(pair[0] for pair in updates if isinstance(pair, tuple))]
    return [variable for variable in named if variable not in model.weights]


def members(data: Any) -> list[Any]:
    """List the arrays in data as Keras takes it: one array, a list, a dict, or None."""
    if isinstance(data, dict):
        return list(data.values())
    if isinstance(data, (list, tuple)):
        return list(data)
    return [] if data is None else [data]


def check_compile(model: Model) -> None:
    """Raise a ValueError if a model was compiled with arguments that cannot be used over contexts."""
    unknown = [name for name in getattr(model, '_function_kwargs', None) or () if name not in OPTIONS]
    if unknown:
        raise ValueError('compile() of a parallel model does not take %s; besides the arguments of '
                         'keras.Model.compile it takes %s for theano.function'
                         % (', '.join(unknown), ' and '.join(OPTIONS)))
    targets = getattr(model, 'targets', None) or () if keras_versions.number() >= (2, 0) else ()
    tensors = [target for target in targets if target is not None and not K.is_placeholder(target)]
    if tensors:
        raise ValueError('the targets are tensors, and target_tensors=[%s] cannot be split into sub-batches: pass the '
                         'targets to fit, as arrays' % ', '.join(map(str, tensors)))
