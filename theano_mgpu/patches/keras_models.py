"""Methods of Keras's models, which use one device in Keras 2.3.1: theano_mgpu's own take their place."""
import functools


def switch_keras_methods(methods, applies):
    """Have Keras's models use other methods.

    Parameters
    ----------
    methods : dict of str to callable
        For each name, a function that takes Keras's own method and returns the one to use instead.
    applies : callable
        ``applies(model)``: whether a call on this model uses the other method.
    """
    import keras

    def switched(original, other):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            return (other if applies(self) else original)(self, *args, **kwargs)
        return method
    for name, wrap in methods.items():
        original = getattr(keras.Model, name)
        setattr(keras.Model, name, switched(original, wrap(original)))


def replace_multi_gpu_model(function, applies):
    """Have ``keras.utils.multi_gpu_model`` call another function while ``applies()`` is true.

    Keras 2.3.1's own ends with "`multi_gpu_model` is only available with the TensorFlow backend".
    """
    import keras.utils.multi_gpu_utils
    original = keras.utils.multi_gpu_utils.multi_gpu_model

    @functools.wraps(original)
    def multi_gpu_model(*args, **kwargs):
        return (function if applies() else original)(*args, **kwargs)
    keras.utils.multi_gpu_model = keras.utils.multi_gpu_utils.multi_gpu_model = multi_gpu_model
