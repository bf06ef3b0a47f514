"""The Keras model that `multi_gpu_model` returns."""
import copy
import functools
import os

import keras
from keras import backend as K
from keras.engine import saving

from .. import compat, launched
from ..files import whole_file
from . import functions
from .batch import members, separate_means
from .exactness import warn_of_inexact_parts, warn_of_weights
from .look_ahead import looking_ahead
from .loops import loop_of


def parallel_model(template, contexts, inherit=True):
    """A ParallelModel over a template; compiled like it, if it is and `inherit` is set.

    Its class bears the name of the template's, since Keras's files record a model's class by name, and
    plain Keras is to open them.
    """
    bases = (ParallelSequential,) if isinstance(template, keras.Sequential) else (ParallelModel,)
    name = 'Sequential' if isinstance(template, keras.Sequential) else 'Model'
    cls = type(name, bases, {'__module__': __name__, '__doc__': ParallelModel.__doc__})
    model = cls(template, contexts)
    if inherit and template._is_compiled:
        model.compile_like_template()
    return model


class ParallelModel(keras.Model):
    """A model that trains, evaluates and predicts on several contexts; made by `multi_gpu_model`.

    It consists of the very layers of its template. Only what Keras calls for each batch differs:
    ``train_function``, ``test_function`` and ``predict_function`` run over sub-batches.

    Attributes
    ----------
    template : keras.Model
    contexts : list of Context
    """

    def __init__(self, template, contexts):
        # Keras takes a model that is set as an attribute for a further layer.
        self.__dict__['template'] = template
        super().__init__(inputs=template.inputs, outputs=template.outputs, name=template.name)
        self.contexts = contexts
        self._continued = False
        self._compiles_template = not template._is_compiled
        self._inexact_if_weighted = []
        # What was added to the template itself: the same lists, so that what is added later counts, too.
        for shared in ('_losses', '_updates', '_per_input_losses', '_per_input_updates', '_metrics'):
            self.__dict__[shared] = getattr(template, shared)

    @property
    def trainable(self):
        return self.template.trainable

    @trainable.setter
    def trainable(self, value):
        # Keras's own constructor sets True: not for the template to hear.
        if '_is_compiled' in self.__dict__:
            self.template.trainable = value

    def compile(self, optimizer, loss=None, metrics=None, loss_weights=None, sample_weight_mode=None,
                weighted_metrics=None, target_tensors=None, **kwargs):
        """Configure the model for training, as `keras.Model.compile` does.

        The template is compiled likewise, unless it was before, so that it can be evaluated and saved.
        Warns of what cannot be exactly as on one device, by name. `kwargs` go to `theano.function`.
        """
        functions.check_options(kwargs)
        if target_tensors is not None and not all(map(K.is_placeholder, members(target_tensors))):
            raise ValueError('target_tensors=%r are no placeholders, and their data cannot be split into sub-batches: '
                             'give targets to fit as arrays' % (target_tensors,))
        super().compile(optimizer, loss, metrics, loss_weights, sample_weight_mode, weighted_metrics, target_tensors,
                        **kwargs)
        self._continued = False
        if self._compiles_template:
            self.template.compile(self.optimizer, loss, fresh_metrics(metrics), loss_weights, sample_weight_mode,
                                  fresh_metrics(weighted_metrics), **kwargs)
        self._inexact_if_weighted = warn_of_inexact_parts(self)

    def compile_like_template(self):
        """Compile as the template is, and go on with the state of its optimizer."""
        template = self.template
        self.compile(template.optimizer, template.loss, fresh_metrics(template._compile_metrics), template.loss_weights,
                     template.sample_weight_mode, fresh_metrics(template._compile_weighted_metrics),
                     **template._function_kwargs)
        self._continued = True

    def _make_train_function(self):
        if not hasattr(self, 'train_function'):
            raise RuntimeError('You must compile your model before using it.')
        self._check_trainable_weights_consistency()
        if self.train_function is None:
            self.train_function = functions.train_function(self, continued=self._continued)

    def _make_test_function(self):
        if not hasattr(self, 'test_function'):
            raise RuntimeError('You must compile your model before using it.')
        if self.test_function is None:
            self.test_function = functions.test_function(self)

    def _make_predict_function(self):
        if getattr(self, 'predict_function', None) is None:
            self.predict_function = functions.predict_function(self)

    def _standardize_user_data(self, x, y=None, *args, **kwargs):
        tensors = [value for value in members(x) + members(y) if K.is_tensor(value)]
        if tensors:
            raise ValueError('tensors (%s) cannot be split into sub-batches: give the data as arrays, or from a '
                             'generator or keras.utils.Sequence' % ', '.join(map(str, tensors)))
        if self._inexact_if_weighted and any(kwargs.get(w) is not None for w in ('sample_weight', 'class_weight')):
            warn_of_weights(self, self._inexact_if_weighted)
        standardize = super()._standardize_user_data
        if compat.keras_batches is None or args:
            return standardize(x, y, *args, **kwargs)
        return compat.keras_batches.standardize(standardize, x, y, **kwargs)

    def _prepare_total_loss(self, masks=None):
        return separate_means(super()._prepare_total_loss(masks))

    def __reduce__(self):
        # A pickle holds what a file would, and gives plain Keras, too.
        return saving.unpickle_model, (saving.pickle_model(self),)

    def get_config(self):
        """The template's configuration."""
        return self.template.get_config()

    def save(self, filepath, overwrite=True, include_optimizer=True):
        """As `keras.Model.save`; a file is replaced whole, and of several processes the first one writes."""
        save_whole(functools.partial(super().save, include_optimizer=include_optimizer), filepath, overwrite)

    def save_weights(self, filepath, overwrite=True):
        """As `keras.Model.save_weights`; a file is replaced whole, and of several processes the first one writes."""
        save_whole(super().save_weights, filepath, overwrite)

    fit = loop_of(looking_ahead(keras.Model.fit))
    fit_generator = loop_of(looking_ahead(keras.Model.fit_generator))
    evaluate = loop_of(keras.Model.evaluate)
    evaluate_generator = loop_of(keras.Model.evaluate_generator)
    predict = loop_of(keras.Model.predict)
    predict_generator = loop_of(keras.Model.predict_generator)


class ParallelSequential(ParallelModel):
    """A ParallelModel over a Sequential."""

    predict_proba = keras.Sequential.predict_proba
    predict_classes = keras.Sequential.predict_classes

    @property
    def layers(self):
        return self.template.layers


def save_whole(save, filepath, overwrite):
    """``save(path)`` such that who reads the file, or kills this process, finds a whole one."""
    if launched.trains_together() and launched.rank():
        return
    if not isinstance(filepath, str):  # an h5py group, or a stream
        save(filepath)
    elif overwrite or not os.path.isfile(filepath) or saving.ask_to_proceed_with_overwrite(filepath):
        with whole_file(filepath) as unfinished:
            save(unfinished)


def fresh_metrics(metrics):
    """The same metrics for another model: each Metric keeps state and updates, and is of one model only."""
    if isinstance(metrics, keras.metrics.Metric):
        return type(metrics).from_config(metrics.get_config())
    if isinstance(metrics, dict):
        return {name: fresh_metrics(value) for name, value in metrics.items()}
    if isinstance(metrics, (list, tuple)):
        return [fresh_metrics(value) for value in metrics]
    return copy.copy(metrics)
