"""Scripts for another Keras than the installed one: a note beside the error, or a warning, says what to do."""
import os
import subprocess
import sys
from pathlib import Path

from theano_mgpu.compat import keras_names

import keras
import pytest
from programs.keras_versions import names as names_of_packages
from test_versions import KERASES, QUICK, with_keras

# The installed Keras, the end of a script for another one, and the version and name in the note.
QUICK_CASES = [
    ('2.3.1', 'from keras.models import Graph', '1.0.8', 'Graph'),
    ('2.3.1', 'model.metrics = []', '2.2.4', 'metrics='),
    ('2.3.1', 'from keras.layers import merge; merge([1, 2], mode="sum")', '2.1.6', 'merge'),
    ('2.3.1', 'K.set_image_dim_ordering("th")', '2.2.4', 'set_image_dim_ordering'),
    ('2.3.1', 'model.fit(x, y, show_accuracy=True)', '0.3.3', 'show_accuracy'),
    ('1.2.2', 'from keras.layers import Conv2DTranspose', '2.3.1', 'Conv2DTranspose'),
    ('1.2.2', 'Dense(3, use_bias=False)', '2.3.1', 'use_bias'),
    ('0.3.3', 'from keras.layers import Input', '2.3.1', 'Input'),
]
CASES = [
    ('2.3.1', 'from keras.optimizers import SGD\nclass Mine(SGD):\n    def __init__(self): self.lr = 1\nMine()',
     '2.2.4', 'lr='),
    ('1.2.2', 'from keras.models import Graph', '1.0.8', 'Graph'),
    ('2.3.1', 'import keras.utils.visualize_util', '1.2.2', 'visualize_util'),
    ('2.3.1', 'from keras.layers.core import TimeDistributedDense', '1.2.2', 'TimeDistributedDense'),
    ('2.3.1', 'from keras.layers.core import MaxoutDense', '1.2.2', 'MaxoutDense'),
    ('2.3.1', 'from keras.layers.core import Highway', '1.2.2', 'Highway'),
    ('2.3.1', 'from keras.layers.core import Merge', '1.2.2', 'Merge'),
    ('2.3.1', 'from keras.layers import Merge', '2.1.6', 'Merge'),
    ('2.3.1', 'import keras.initializations', '1.2.2', 'initializations'),
    ('2.3.1', 'from keras.layers import containers', '0.3.3', 'containers'),
    ('2.3.1', 'from keras.regularizers import activity_l2', '1.2.2', 'activity_l2'),
    ('2.3.1', 'from keras.utils import np_utils; np_utils.to_categorical(y, nb_classes=2)', '1.2.2', 'nb_classes'),
    ('2.3.1', 'K.random_normal((2,), std=1.)', '1.2.2', 'std'),
    ('2.3.1', 'model.layers[0].W', '1.2.2', 'W'),
    ('2.2.4', 'from keras.optimizers import SGD; SGD(learning_rate=.1)', '2.3.1', 'learning_rate'),
    ('2.2.4', 'import keras.metrics; keras.metrics.AUC', '2.3.1', 'AUC'),
    ('2.0.9', 'from keras.layers import Softmax', '2.3.1', 'Softmax'),
    ('1.2.2', 'from keras.layers import add', '2.3.1', 'add'),
    ('1.2.2', 'from keras.utils import multi_gpu_model', '2.3.1', 'multi_gpu_model'),
    ('1.2.2', 'from keras.layers import MaxPooling2D; MaxPooling2D(padding="same")', '2.3.1', 'padding'),
    ('1.2.2', 'model.fit(x, y, epochs=1)', '2.3.1', 'epochs'),
    ('2.3.1', 'model.compile("sgd", "mse", class_mode="binary"); model.fit(x, y)', '0.3.3', 'class_mode'),
    ('1.2.2', 'model.get_output()', '0.3.3', 'get_output'),
    ('1.2.2', 'model.layers[0].get_output()', '0.3.3', 'get_output'),
    ('0.3.3', 'model.pop()', '2.3.1', 'pop'),
    ('0.3.3', 'Dense(2, kernel_initializer="zero")', '2.3.1', 'kernel_initializer'),
    ('0.3.3', 'from keras.models import load_model', '2.3.1', 'load_model'),
]
START = '''
import theano_mgpu
import numpy as np
from keras import backend as K
from keras.callbacks import EarlyStopping
from keras.layers.core import Dense
from keras.models import Sequential
x, y = np.zeros((4, 2)), np.zeros((4, 1))
model = Sequential()
model.add(Dense(1, input_dim=2))
model.compile(loss='binary_crossentropy', optimizer='sgd', **ACCURACY)
'''
ACCURACY = {'0.3.3': ('{}', 'show_accuracy=True, nb_epoch=3'), '1.2.2': ('{"metrics": ["accuracy"]}', 'nb_epoch=3')}


def end_of(version, tmp_path, end, *command):
    """Return the stderr of a script with a Keras of one version."""
    accuracy, fit = ACCURACY.get(version, ('{"metrics": ["accuracy"]}', 'epochs=3'))
    start = START if command != ('-m', 'theano_mgpu', 'run') else START.replace('import theano_mgpu\n', '')
    script = tmp_path / 'train.py'
    script.write_text(start.replace('ACCURACY', accuracy) + end.replace('FIT', 'verbose=0, ' + fit))
    return with_keras(version, *command, str(script), expected=None).stderr


def check_note(tmp_path, version, end, wanted, name, *command):
    stderr = end_of(version, tmp_path, end, *command)
    assert 'Traceback' in stderr, stderr
    notes = [line for line in stderr.splitlines() if line.startswith('theano-mgpu: note: this script')]
    has = "'%s' that can be set" % name[:-1] if name.endswith('=') else "'%s'" % name
    assert notes == ["theano-mgpu: note: this script is written for Keras %s, which has %s; Keras %s, which is "
                     "installed, has not: pip install 'Keras==%s'" % (wanted, has, version, wanted)], stderr


@pytest.mark.slow_but_with('2.3.1-metrics=', '2.3.1-merge')
@pytest.mark.parametrize('case', QUICK_CASES, ids=lambda case: '%s-%s' % (case[0], case[3]))
def test_a_note_names_the_version(case, tmp_path):
    if sys.version_info < (3, 10) and case[3].endswith('='):
        pytest.skip('before Python 3.10 the error does not name the attribute')
    check_note(tmp_path, *case)


@pytest.mark.slow
def test_a_note_under_run(tmp_path):
    check_note(tmp_path, *QUICK_CASES[0], '-m', 'theano_mgpu', 'run')


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES, ids=lambda case: '%s-%s' % (case[0], case[3]))
def test_all_kinds_of_names(case, tmp_path):
    if sys.version_info < (3, 10) and (case[1].startswith('model.layers') or case[3].endswith('=')):
        pytest.skip('before Python 3.10 an AttributeError does not have the object, nor the name')
    check_note(tmp_path, *case)


@pytest.mark.slow_but_with('K.no_such_name', 'y.nb_epoch')
@pytest.mark.parametrize('end', ['K.no_such_name', 'Dense(3, no_such_name=1)', 'model.no_such_name', '{}["acc"]',
                                 'y.nb_epoch', 'from theano import Merge', 'class Mine(Dense): pass\nMine(3).p',
                                 'class Graph: pass\nGraph().add_node', 'import keras_zoo\nkeras_zoo.Mine(2).W'])
def test_other_errors_have_no_note(end, tmp_path):
    """A class of a package called keras_zoo got the hints of Keras's own."""
    (tmp_path / 'keras_zoo.py').write_text('from keras.layers import Dense\nclass Mine(Dense): pass')
    stderr = end_of('2.3.1', tmp_path, end)
    assert 'Traceback' in stderr and 'theano-mgpu: note: this' not in stderr, stderr


@pytest.mark.parametrize('version, end, name, back_end', [
    ('2.3.1', 'import tensorflow as tf', 'tensorflow', 'tensorflow'),
    pytest.param('1.2.2', 'K.ctc_decode(1, 2)', 'ctc_decode', 'tensorflow', marks=pytest.mark.slow),
    pytest.param('1.2.2', 'import cntk', 'cntk', 'cntk', marks=pytest.mark.slow)])
def test_a_note_on_another_back_end(version, end, name, back_end, tmp_path):
    if sys.version_info < (3, 10) and name == 'ctc_decode':
        pytest.skip('before Python 3.10 an AttributeError does not have the object')
    stderr = end_of(version, tmp_path, end)
    assert "theano-mgpu: note: this script uses %s, of another back end: Keras runs on Theano" % name in stderr, stderr
    assert "if keras.backend.backend() == '%s'" % back_end in stderr
    assert ('"with tf.device(...):" (or write "if True:" in its place)' in stderr) == (name == 'tensorflow')


@pytest.mark.slow_but_with('from tensorflow import keras')
@pytest.mark.parametrize('end', ['from tensorflow.keras.layers import Dense', 'from tensorflow import keras'])
def test_a_note_on_tf_keras(end, tmp_path):
    assert 'theano-mgpu: note: tf.keras is not Keras: write' in end_of('2.3.1', tmp_path, end)


OLD, NEW = ('2.3.1', 'val_acc', 'val_accuracy', '2.2.4'), ('2.2.4', 'val_accuracy', 'val_acc', '2.3.1')


@pytest.mark.slow_with('2.3.1-val_acc-val_accuracy-2.2.4')
@pytest.mark.parametrize('version, given, other, wanted', [
    OLD, NEW, *(pytest.param(version, *NEW[1:], marks=pytest.mark.slow) for version in ('0.3.3', '1.2.2', '2.0.9'))])
def test_a_warning_names_the_renamed_metric(version, given, other, wanted, tmp_path):
    """Training never stopped, with a RuntimeWarning each epoch; reading the history ended with a bare KeyError."""
    stderr = end_of(version, tmp_path, 'stop = EarlyStopping(monitor="%s")\n'
                    'h = model.fit(x, y, validation_data=(x, y), callbacks=[stop], FIT)\n'
                    'h.history["%s"]' % (given, given))
    text = "Keras %s calls the metric '%s': write that, or install the Keras that this script is written for: " \
        "pip install 'Keras==%s'" % (version, other, wanted)
    assert stderr.count('MgpuWarning: EarlyStopping(monitor=%r): %s' % (given, text)) == 1, stderr
    assert 'train.py:13: MgpuWarning' in stderr, stderr
    if version not in ('0.3.3', '1.2.2'):  # their EarlyStopping ends with an error of its own
        assert "KeyError: '%s'" % given in stderr and stderr.count('theano-mgpu: note: ' + text) == 1, stderr


@pytest.mark.slow
def test_doctor_and_help_name_the_installed_keras_and_the_tested_ones():
    for words in ['doctor'], ['--help'], ['run', '--help']:
        done = subprocess.run([sys.executable, '-m', 'theano_mgpu', *words], stdout=subprocess.PIPE,
                              universal_newlines=True, env=dict(os.environ, THEANO_FLAGS=QUICK))
        line = next(line for line in done.stdout.splitlines() if line.startswith('Keras'))
        assert keras.__version__ in line and line.count(', '.join(keras_names.VERSIONS)) == 1, line


@pytest.mark.slow
def test_a_metric_under_its_name_has_no_warning(tmp_path):
    assert 'MgpuWarning' not in end_of('2.3.1', tmp_path, 'model.fit(x, y, validation_data=(x, y), '
                                       'callbacks=[EarlyStopping(monitor="val_accuracy")], FIT)')


@pytest.mark.slow
def test_the_table_is_that_of_the_packages():
    if not all((KERASES / version).exists() for version in keras_names.VERSIONS[:-1]):
        pytest.skip('make setup installs the Kerases')
    assert Path(keras_names.TABLE).read_text() == names_of_packages.table()
