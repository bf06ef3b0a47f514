"""GroundedTranslation: descriptions of images, by its train.py, on generated features and sentences.

PYTHONPATH has the checkout.
"""
import glob
import os
import random
import runpy
import sys
import tempfile

import Callbacks
import data_generator
import h5py
import models
import numpy as np
from show import show, show_sums

os.chdir(tempfile.mkdtemp())
os.mkdir('checkpoints')
r = np.random.RandomState(0)
words = ['w%d' % number for number in range(20)]
with h5py.File('dataset.h5', 'w') as file:
    for split, count in (('train', 23), ('val', 7), ('test', 3)):
        for number in range(count):
            image = file.create_group('%s/%06d' % (split, number))
            image['img_feats'] = r.rand(4096).astype('f') / 64
            image.create_dataset('descriptions', data=[' '.join(r.choice(words, r.randint(3, 8))) for _ in range(2)],
                                 dtype=h5py.special_dtype(vlen=str))


class Seeded(random.Random):
    """Random numbers of the generator of batches, which seeds none."""

    def __init__(self):
        super().__init__(3)


data_generator.random.Random = Seeded
Callbacks.CompilationOfCallbacks.multeval_scores = lambda self, path: (0., 0., 0.)  # a program in Java; not installed
build, built = models.NIC.buildKerasModel, []
models.NIC.buildKerasModel = lambda self, **options: built.append(build(self, **options)) or built[-1]
for name, options in (('lstm', []), ('gru', ['--gru', '--clipnorm=1'])):
    sys.argv = ['train.py', '--dataset=.', '--fixed_seed', '--run_string=' + name, '--meteor_lang=en', '--num_sents=2',
                '--unk=0', '--batch_size=9', '--embed_size=12', '--hidden_size=12', '--max_epochs=2',
                '--generation_timesteps=9', *options]
    runpy.run_path(os.path.join(os.path.dirname(models.__file__), 'train.py'), run_name='__main__')
    history = built[-1].history.history
    for key in sorted(history):
        show(key, history[key])
    show_sums('weights', built[-1].get_weights())
    for path in sorted(glob.glob('checkpoints/%s/*/valGenerated' % name)):
        with open(path) as file:
            print(file.read())
