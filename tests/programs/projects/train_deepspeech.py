"""ba-dls-deepspeech: its train.py and test.py with three smaller GRUs and CTC, on generated sounds.

Run in the checkout, with it, soundfile and theano-warp-ctc on PYTHONPATH.
"""
import json
import os
import random
import tempfile

import numpy as np
import soundfile
import test as of_tests
import train as of_training
from show import show, show_sums
from utils import load_model

compile_gru_model = of_training.compile_gru_model
of_training.compile_gru_model = lambda nodes, **options: compile_gru_model(nodes=12, **options)


def write(folder, name, number, r):
    """Write sounds, each letter a tone of its own, and the file that describes them; return its path."""
    path = os.path.join(folder, name + '.json')
    with open(path, 'w') as stream:
        for index in range(number):
            text = ''.join(r.choice(list('abcd '), r.randint(2, 6)))
            time = np.arange(2400) / 16000
            tones = [200 * (1 + ord(letter) % 32) for letter in 'e' + text + 'e']
            sound = np.concatenate([np.sin(2 * np.pi * tone * time) for tone in tones])
            key = os.path.join(folder, '%s%d.wav' % (name, index))
            soundfile.write(key, sound + .1 * r.randn(len(sound)), 16000)
            stream.write(json.dumps({'key': key, 'duration': len(sound) / 16000, 'text': text}) + '\n')
    return path


np.random.seed(1)
random.seed(1)
r = np.random.RandomState(0)
with tempfile.TemporaryDirectory() as folder:
    train, valid, saved = write(folder, 'train', 43, r), write(folder, 'valid', 21, r), os.path.join(folder, 'saved')
    of_training.main(train, valid, 2, saved, True)
    costs = np.load(os.path.join(saved, 'costs.npz'))
    show('costs', costs['train'])
    show('validation', costs['validation'])
    show_sums('weights', load_model(saved).get_weights())
    of_tests.main(valid, train, saved)
