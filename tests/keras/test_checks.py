"""Keras models with a ledger (`mgpu.ledger`), and with the flag `mgpu.check`."""

import theano_mgpu as mgpu
from theano_mgpu.checks import ledger, ledger_file
from theano_mgpu.keras import Checkpoint, disable, enable, multi_gpu_model

import keras
import numpy as np
import pytest
import theano
from keras import backend as K
from keras.layers import BatchNormalization, Dense, Dropout, Lambda
from keras.models import Sequential
from support.checkpoint_files import begin_again
from support.launch import INTERPRETED
from support.modes import PYTHON
from support.processes import python
from theano.configparser import change_flags

X = np.random.RandomState(0).rand(22, 3).astype('float32')
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture
def recording(tmp_path):
    """Return a function that begins a run with a ledger, as a new process would, and returns the file."""
    with change_flags(**{'mgpu.ledger': '', 'mgpu.ledger_every': 2}):
        def begin(name):
            ledger._open.clear()
            begin_again()
            theano.config.mgpu.ledger = str(tmp_path / name)
            return str(tmp_path / name)
        yield begin
    ledger._open.clear()


def fitted(several=True, callbacks=(), initial=1, **options):
    """Return a model after a fit of three epochs with four batches each."""
    np.random.seed(initial)
    K.reset_uids()
    model = Sequential([Dense(4, activation='tanh', input_shape=(3,)), BatchNormalization(), Dropout(.3), Dense(1)],
                       name='net')
    model = multi_gpu_model(model) if several else model
    model.compile('adam', 'mse', mode=PYTHON)
    model.fit(X, Y, **dict(dict(batch_size=6, epochs=3, verbose=0, callbacks=list(callbacks)), **options))
    return model


@pytest.mark.slow
def test_lines_of_a_fit(recording, cpu2):
    """They have each weight, frozen ones and running means included, and the state of the optimizer."""
    path = recording('a')
    model = fitted()
    read = ledger_file.read(path)
    assert list(read.steps) == [('train_function of net', step) for step in (0, 1, 2, 4, 6, 8, 10, 12)]
    values = read.steps['train_function of net', 12]['values']
    metrics = [weight for metric in model.metrics for weight in metric.weights]
    changed = [*model.weights, *(v for v in model.train_function.function.updates if v not in metrics)]
    assert {weight.name for weight in changed} == values.keys() and 'batch_normalization_1/moving_mean' in values
    for weight in changed:
        assert values[weight.name] == ledger.digest(K.get_value(weight))
    assert read.starts[0]['versions']['keras'] == '2.3.1'
    other = recording('b')
    fitted(initial=2)
    assert ledger_file.read(other).steps['train_function of net', 0] != read.steps['train_function of net', 0]


def test_the_ledger_of_a_checkpoint(recording, cpu2, tmp_path):
    """It has a line for each checkpoint; the ledger of the flag goes on after the fit."""
    path = recording('a')
    model = fitted(callbacks=[Checkpoint(str(tmp_path / 'fit.npz'), every=3, ledger=str(tmp_path / 'own'))])
    model.fit(X, Y, batch_size=22, epochs=2, verbose=0)
    assert [step for _, step in ledger_file.read(str(tmp_path / 'own')).steps] == [0, 1, 2, 3, 6, 9, 12]
    assert [step for _, step in ledger_file.read(path).steps] == [0, 1, 2]


def test_batches_of_plain_keras(recording, contexts):
    """A model that `enable` leaves to plain Keras has its lines, too."""
    path = recording('a')
    contexts('cpu', 1)
    enable(tell=str)
    try:
        model = fitted(several=False)
    finally:
        disable()
    assert type(model.train_function.function) is theano.compile.function_module.Function
    assert len(ledger_file.read(path).steps) == 8


@pytest.mark.slow
def test_a_fit_that_goes_on_from_a_checkpoint(recording, cpu2, tmp_path):
    """Replayed batches are counted, and have no lines; the others have the lines of an uninterrupted fit."""
    whole, parts = recording('whole'), tmp_path / 'parts'
    fitted()

    def interrupt(batch, logs):
        interrupt.left -= 1
        if not interrupt.left:
            raise KeyboardInterrupt
    interrupt.left = 9
    for callbacks in ([keras.callbacks.LambdaCallback(on_batch_end=interrupt)], []):
        recording('parts')
        try:
            fitted(callbacks=[Checkpoint(str(tmp_path / 'fit.npz'), every=5), *callbacks])
        except KeyboardInterrupt:
            assert list(ledger_file.read(str(parts)).steps)[-1][1] == 8
    whole, parts = ledger_file.read(whole), ledger_file.read(str(parts))
    assert parts.steps.pop(('train_function of net', 5)) and parts.starts[1]  # the state of the checkpoint
    assert parts.steps == whole.steps and parts.repeated == [('train_function of net', [6, 8], [])]


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=[pytest.mark.slow, pytest.mark.opencl])])
@pytest.mark.parametrize('way', ['multi_gpu_model', 'enable'])
def test_a_log_of_zero(way, kind, contexts):
    """The error names the op and the sample; the weights stay. Short batches are not left to plain Keras."""
    contexts(kind, 2)
    batch = X[:11].copy()
    batch[5] = 0
    with change_flags(**{'mgpu.check': 3}):
        enable(tell=str)
        try:
            model = Sequential([Dense(4, use_bias=False, kernel_initializer='ones', input_shape=(3,), name='lower'),
                                Lambda(K.log, output_shape=(4,)), Dense(1, name='upper')])
            model = multi_gpu_model(model) if way == 'multi_gpu_model' else model
            model.compile('adam', 'mse', mode=PYTHON if kind == 'cpu' else None)
            for _ in range(4):
                model.train_on_batch(X[:11], Y[:11])
            before = model.get_weights()
            with pytest.raises(mgpu.NonFiniteError, match=r'the loss is (nan|inf) in step 5 of train_function: '
                               r'Log\(0.0\) = -inf in sample 5 of the batch.*near .*lower/kernel'):
                model.train_on_batch(batch, Y[:11])
        finally:
            disable()
    for ours, theirs in zip(model.get_weights(), before):
        np.testing.assert_array_equal(ours, theirs)


SCRIPT = '''
import keras, numpy as np
from keras import backend as K
from keras.layers import Dense, Lambda
x = np.random.RandomState(0).rand(33, 3).astype('float32')
x[26] = 0
model = keras.Sequential([Dense(4, use_bias=False, kernel_initializer='ones', input_shape=(3,), name='lower'),
                          Lambda(K.log, output_shape=(4,)), Dense(1)])
model.compile('adam', 'mse')
try:
    model.fit(x, x[:, :1], batch_size=11, epochs=1, shuffle=False, verbose=0)
except Exception as error:
    print(type(error).__name__, error)
    raise SystemExit(3)
'''


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('update_on', ['auto', 'sharded'])
def test_a_script_in_two_processes(update_on, tmp_path):
    """An unchanged script ends with the same error on each rank; its ledger has the steps before."""
    (tmp_path / 'train.py').write_text(SCRIPT)
    flags = INTERPRETED + ',contexts=a->cpu;b->cpu,mgpu.check=1,mgpu.ledger_every=1,mgpu.shares=equal,mgpu.update_on='
    done = python('-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--ledger', 'run.jsonl', 'train.py', folder=tmp_path,
                  flags=flags + update_on, expected=3)
    assert 'NonFiniteError the loss is ' in done.stdout and \
        'Log(0.0) = -inf in sample 4 of the batch, on rank 0, a->cpu, near' in done.stdout, done.stdout
    steps = ledger_file.read(str(tmp_path / 'run.jsonl')).steps
    assert [step for _, step in steps] == [0, 1, 2] and len(list(steps.values())[-1]['values']) == 10
