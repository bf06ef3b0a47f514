"""deep_complex_networks: its residual networks, and its convolutions of MusicNet with fewer filters, on generated data.

Run in the checkout, with it and its folders scripts and musicnet on PYTHONPATH.
"""
import sys
import types
from argparse import Namespace

import numpy as np
from keras import backend as K
from keras.optimizers import SGD
from show import show, show_sums

kerosene = types.ModuleType('kerosene.datasets')  # reads SVHN; not installed
kerosene.svhn2 = None
sys.modules.update({'kerosene': kerosene, 'kerosene.datasets': kerosene})
import training  # noqa: E402
from musicnet.models import complex as of_music  # noqa: E402

ComplexConv1D = of_music.ComplexConv1D
of_music.ComplexConv1D = lambda filters, *args, **options: ComplexConv1D(filters // 8, *args, **options)


def train(model, x, y, **options):
    """Train a model for two rounds, and print its losses, weights and predictions."""
    np.random.seed(2)
    history = model.fit(x, y, batch_size=11, epochs=2, verbose=0, validation_split=.3, **options).history
    for name in sorted(history):
        show(name, history[name])
    show_sums('weights', model.get_weights())
    show('predictions', model.predict(x[:9])[:2])


def network(**options):
    """Return the small network of these options, with the optimizer of the script."""
    np.random.seed(1)
    of_script = dict(model='complex', num_blocks=2, start_filter=2, dataset='cifar10', act='relu', aact='modrelu',
                     dropout=0, spectral_param=False, spectral_pool_gamma=.5, spectral_pool_scheme='none',
                     comp_init='complex_independent')
    model = training.getResnetModel(Namespace(**{**of_script, **options}))
    optimizer = SGD(lr=.01, momentum=.9, nesterov=True, clipnorm=1.)
    model.compile(optimizer, 'categorical_crossentropy', metrics=['accuracy'])
    return model


sys.setrecursionlimit(10000)  # as its run.py
r = np.random.RandomState(0)
K.set_image_data_format('channels_first')
images, classes = r.rand(31, 3, 32, 32).astype('f'), np.eye(10)[r.randint(0, 10, 31)]
train(network(), images, classes)
train(network(spectral_param=True), images, classes)
train(network(spectral_pool_scheme='proj'), images, classes)
train(network(model='real'), images, classes)
np.random.seed(1)
K.set_image_data_format('channels_last')
waves, notes = r.randn(31, 256, 2).astype('f'), r.randint(0, 2, (31, 5))
train(of_music.get_deep_convnet(window_size=256, output_size=5), waves, notes)
