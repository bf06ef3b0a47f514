"""Warnings of Keras and Theano name the line of the script, whatever this package puts between the two."""
import re

import pytest
from support.launch import INTERPRETED, environment
from support.patches import WITHOUT_PATCH
from support.processes import python

SCRIPT = """
import theano_mgpu
import warnings
import numpy as np
import theano
import theano.tensor as T
from keras.layers import Dense
from keras.models import Sequential
from theano_mgpu.errors import warn
warnings.simplefilter('always')
x, y = np.ones((4, 2)), np.ones((4, 1))
model = Sequential([Dense(1, input_dim=2)])
model.compile('sgd', 'mse')
model.fit(x, y, nb_epoch=1, verbose=0)  # renamed
model.fit_generator(iter([(x, y)] * 9), samples_per_epoch=2, nb_epoch=1, verbose=0)  # Update your
model.predict_generator(iter([x] * 9), val_samples=1)  # Update your
a, b = T.vectors('a', 'b')
theano.function([a, b], a + 1, on_unused_input='warn')  # was asked to create
warn('a note')  # a note
def deprecated():
    warnings.warn('use another', stacklevel=2)
deprecated()  # use another
"""
RUN = '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu'


def named(script, folder, *command):
    """Return the lines of the script that its warnings name, by the comments at the lines' ends."""
    (folder / 'train.py').write_text(script)
    stderr = python(*command, str(folder / 'train.py'), **environment(INTERPRETED)).stderr
    lines = script.splitlines()
    return [lines[int(number) - 1].rpartition('# ')[2] in text for number, text in re.findall(
        r'train\.py:(\d+): \w+: (.*)', stderr) if 'semantics' not in text]


@pytest.mark.slow_with('command0')
@pytest.mark.parametrize('command', [
    (), RUN, pytest.param((*RUN, '--always'), marks=pytest.mark.slow), pytest.param(
        ('-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--always'), marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_warnings_name_the_line_of_the_script(command, tmp_path):
    """prefetch.py:101: UserWarning: Update your `fit_generator` call to the Keras 2 API"""
    assert named(SCRIPT, tmp_path, *command) == [True] * 6


@pytest.mark.slow
def test_without_the_patch_warnings_name_other_lines(tmp_path):
    enabled = 'import theano_mgpu.keras\ntheano_mgpu.keras.enable(always=True)\n'
    assert named(enabled + SCRIPT, tmp_path) == [True] * 6
    assert len(named(WITHOUT_PATCH % 'leave_out_own_frames' + enabled + SCRIPT, tmp_path)) < 6
