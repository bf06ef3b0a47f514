"""Bugs that were found and fixed, each under its symptom: checkpoints of fits of Keras."""
import os
import re

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
from support.checkpoint_files import begin_again, earlier_file, rewrite
from support.comparison import assert_bitwise
from support.forks import in_a_fork
from support.modes import PYTHON

pytestmark = pytest.mark.verified


def keras_model(seed=1):
    """Return a compiled parallel model with dropout; its functions are interpreted where they can be."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense, Dropout
    from keras.models import Sequential
    np.random.seed(seed)
    model = multi_gpu_model(Sequential([Dense(4, activation='tanh', input_shape=(3,)), Dropout(0.3), Dense(1)]),
                            gpus=None)
    model.compile('adam', 'mse', metrics=['mae'], mode=keras_mode())
    return model


def keras_mode():
    """Return a mode that interprets the ops of the host."""
    interpreted = all(context.kind == 'cpu' for context in mgpu.contexts())
    return PYTHON if interpreted else theano.Mode(None, 'fast_compile')


def keras_state(model):
    return model.get_weights() + model.optimizer.get_weights()


KERAS_X = np.random.RandomState(0).randn(22, 3).astype('float32')
KERAS_Y = KERAS_X.sum(axis=1, keepdims=True)


class Interrupt:
    """A callback that ends a fit at a batch, as a kill would."""

    def __init__(self, at):
        self.left = at

    def __call__(self, batch, logs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def keras_fit(model, path, callbacks=(), interrupted_at=0, every=2, **options):
    """Fit with a Checkpoint; return the history."""
    from theano_mgpu.keras import Checkpoint

    from keras.callbacks import LambdaCallback
    given = dict(dict(x=KERAS_X, y=KERAS_Y, batch_size=6, epochs=3, validation_split=0.2, verbose=0), **options)
    callbacks = list(callbacks) + [Checkpoint(path, every=every)] * (path is not None)
    if interrupted_at:
        callbacks.append(LambdaCallback(on_batch_end=Interrupt(interrupted_at)))
    return model.fit(callbacks=callbacks, **given).history


def assert_same_history(ours, theirs):
    assert ours == theirs
    assert {name: list(map(str, values)) for name, values in ours.items()} == \
        {name: list(map(str, values)) for name, values in theirs.items()}, 'other dtypes: a CSVLogger shows it'


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])  # compiles in each script
def test_fits_with_the_same_checkpoint_are_all_trained_and_all_resumed(contexts, kind, tmp_path):
    """The second fit passed over all batches of the first one's file: its model stayed untrained."""
    contexts(kind, 2)
    path = str(tmp_path / 'run.npz')

    def script(path, second_interrupted_at=0):
        from theano_mgpu.keras import Checkpoint
        model, callback = keras_model(), Checkpoint(path, every=2) if path else None
        used = [callback] if path else []
        histories = [keras_fit(model, None, used)]
        between = keras_state(model)
        histories.append(keras_fit(model, None, used, second_interrupted_at, epochs=2, batch_size=9))
        model.compile('sgd', 'mse', mode=keras_mode())
        histories.append(keras_fit(model, None, used, epochs=1))
        return histories, between, keras_state(model), np.random.rand()

    expected = script(None)
    with pytest.raises(KeyboardInterrupt):
        script(path, 3)
    assert {'run.npz', 'run-fit2.npz'} <= set(os.listdir(str(tmp_path)))
    begin_again()
    for _ in range(2):  # going on within the second fit, and with nothing left to do
        found = script(path)
        for ours, theirs in zip(found[0], expected[0]):
            assert_same_history(ours, theirs)
        assert_bitwise(found[1] + found[2], expected[1] + expected[2])
        assert found[3] == expected[3], 'NumPy draws other numbers after the fits'
        begin_again()
    os.remove(path)
    with pytest.warns(mgpu.MgpuWarning, match='run-fit[23].npz is not of the run that .*run.npz is of: the tr'):
        found = script(path)
    assert_bitwise(found[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize('batches', [(3, 8), (4, 9)], ids=str)
def test_a_fit_that_is_killed_goes_on_bitwise_from_any_batch(batches, cpu2, tmp_path):
    """Resuming is exact also with callbacks that add to the logs (History had no lr for skipped batches), write a log,
    or run the model themselves (the losses got out of step)."""
    from keras.callbacks import CSVLogger, LambdaCallback, LearningRateScheduler

    def fit(name, model, **options):
        def evaluate(epoch, logs):
            model.train_on_batch(KERAS_X[:5], KERAS_Y[:5])
            logs['test_loss'] = model.evaluate(KERAS_X[:5], KERAS_Y[:5], verbose=0)[0]
        callbacks = [CSVLogger(str(tmp_path / 'first.csv')), LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
                     LambdaCallback(on_epoch_end=evaluate), CSVLogger(str(tmp_path / 'last.csv'))]
        history = keras_fit(model, name and str(tmp_path / name), callbacks, **options)
        return history, [(tmp_path / name).read_text() for name in ('first.csv', 'last.csv')]

    whole = keras_model()
    expected, logs = fit(None, whole)
    assert set(expected) == {'loss', 'mae', 'val_loss', 'val_mae', 'lr', 'test_loss'}
    for killed_at in batches:
        name = '%d.npz' % killed_at
        with pytest.raises(KeyboardInterrupt):
            fit(name, keras_model(), interrupted_at=killed_at, every=1 + killed_at % 3)
        model = keras_model()
        history, our_logs = fit(name, model)
        assert_same_history(history, expected)
        assert_bitwise(keras_state(model), keras_state(whole))
        assert our_logs == logs
        begin_again()


def small_model():
    """Return a compiled parallel model without a random stream."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    model = multi_gpu_model(Sequential([Dense(1, input_shape=(3,), kernel_initializer='ones')]), gpus=None)
    model.compile('adam', 'mse', metrics=['mae'], mode=keras_mode())
    np.random.seed(1)
    return model


def test_a_file_of_an_earlier_version(cpu2, tmp_path):
    from keras.callbacks import LambdaCallback
    whole, computed = small_model(), []
    expected, model = keras_fit(whole, None), small_model()
    history = keras_fit(model, earlier_file('fit.npz', tmp_path),
                        [LambdaCallback(on_batch_end=lambda batch, logs: computed.append(batch))])
    assert computed == [0, 1, 2, 0, 1, 2] and history.keys() == expected.keys()
    for found, other in zip([*keras_state(model), *history.values()], [*keras_state(whole), *expected.values()]):
        np.testing.assert_allclose(found, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('generator,stops', [
    (False, 'on_batch_end'), (False, 'on_epoch_end'), (True, 'on_batch_end')])
def test_a_stopped_fit_is_passed_over_as_it_was(generator, stops, cpu2, tmp_path):
    from keras.callbacks import LambdaCallback
    path = str(tmp_path / 'run.npz')

    def fit(model, stop_at):
        seen = []

        def stop(number, logs):
            seen.append(number)
            model.stop_training = len(seen) == stop_at
        callbacks = [checkpoint(path), LambdaCallback(**{stops: stop})]
        if not generator:
            return keras_fit(model, None, callbacks), 0
        batches = iter([(KERAS_X[i:i + 6], KERAS_Y[i:i + 6]) for i in range(16)])
        history = model.fit_generator(batches, steps_per_epoch=3, epochs=3, workers=0, verbose=0, callbacks=callbacks,
                                      validation_data=(KERAS_X[:4], KERAS_Y[:4]))
        return history.history, len(list(batches))
    first, again = keras_model(), keras_model()
    expected, left = fit(first, 5 if stops == 'on_batch_end' else 2)
    begin_again()
    history, left_again = fit(again, 0)
    assert len(expected['loss']) == 2 and left == left_again
    assert_same_history(history, expected)
    assert_bitwise(keras_state(again), keras_state(first))


def test_early_stopping_and_others_go_on_where_a_killed_fit_was(cpu2, tmp_path):
    """The callbacks forgot the best epoch: a restart trained longer, and ModelCheckpoint overwrote the best model."""
    from keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    best, path = str(tmp_path / 'best.h5'), str(tmp_path / 'run.npz')

    def fit(model, path, interrupted_at=0):
        # No epoch is better than the first one by so much.
        stopping = EarlyStopping('loss', patience=3, min_delta=1000, restore_best_weights=True)
        stopping.monitor_op = lambda a, b: np.isinf(b)
        writer = ModelCheckpoint(best, 'loss', save_best_only=True)
        writer.monitor_op = stopping.monitor_op
        callbacks = [stopping, ReduceLROnPlateau('loss', patience=2, min_delta=1000), writer]
        history = keras_fit(model, path, callbacks, interrupted_at, epochs=9)
        model.load_weights(best)
        return history, keras_state(model), stopping.wait, writer.best
    expected = fit(keras_model(), None)
    assert len(expected[0]['lr']) == 4
    with pytest.raises(KeyboardInterrupt):
        fit(keras_model(), path, 8)
    for _ in range(2):
        history, state, *others = fit(keras_model(), path)
        assert_same_history(history, expected[0])
        assert_bitwise(state, expected[1])
        assert others == list(expected[2:])
        begin_again()


def checkpoint(path, every=2):
    from theano_mgpu.keras import Checkpoint
    return Checkpoint(path, every=every)


@pytest.mark.slow
def test_a_fit_that_fails_while_it_passes_over_batches_has_the_state_of_its_checkpoint(cpu2, tmp_path):
    """The weights were as in an untrained model."""
    path, batch = str(tmp_path / 'run.npz'), (KERAS_X[:6], KERAS_Y[:6])

    def batches(n):
        yield from [batch] * n
        raise OSError('no more data')
    saved, model = keras_model(), keras_model(2)
    saved.fit_generator(batches(6), 3, 2, workers=0, verbose=0, callbacks=[checkpoint(path)])
    begin_again()
    with pytest.raises(OSError, match='no more data'):
        model.fit_generator(batches(4), 3, 2, workers=0, verbose=0, callbacks=[checkpoint(path)])
    assert_bitwise(keras_state(model), keras_state(saved))
    for each in (model, saved):  # no checkpoint takes part in the calls after the fit
        each.train_on_batch(*batch)
    assert_bitwise(keras_state(model), keras_state(saved))


@pytest.mark.slow_but_with('change4*')
@pytest.mark.parametrize('change,message', [
    ({'epochs': 2}, 'written by a fit with epochs=3, here 2. Pass'),
    ({'batch_size': 9}, 'written by a fit with batch_size=6, here 9. Pass'),
    ({'initial_epoch': 1}, 'written by a fit with initial_epoch=0, here 1. Pass'),
    ({'validation_split': 0.3, 'epochs': 4}, 'written by a fit with epochs=3, here 4; samples=17, here 15. Pass'),
    ({'x': KERAS_X + 1}, 'by a fit whose first batch has the checksum [0-9]+, but that of this one has [0-9]+')])
def test_a_fit_that_is_not_that_of_the_file_is_an_error(change, message, cpu2, tmp_path):
    """The fit returned an untrained model with the history of the file's fit."""
    path = str(tmp_path / 'run.npz')
    keras_fit(keras_model(), path)
    begin_again()
    model = keras_model()
    np.random.seed(7)
    before, state = model.get_weights(), np.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match=message + '.*remove the file or name another one'):
        keras_fit(model, path, **change)
    assert_bitwise(model.get_weights(), before)
    assert np.random.get_state()[1].tolist() == state
    assert len(keras_fit(keras_model(), path)['loss']) == 3


@pytest.mark.slow
@pytest.mark.parametrize('initial_epoch', [0, 1])
def test_a_fit_that_continues_says_so_once(initial_epoch, cpu2, tmp_path, capfd):
    """It printed the losses of the finished batches as if it trained."""
    path, total = str(tmp_path / 'run.npz'), 9 - 3 * initial_epoch
    options = {'validation_split': 0.2, 'initial_epoch': initial_epoch}
    with pytest.raises(KeyboardInterrupt):
        keras_fit(keras_model(), path, interrupted_at=5, **options)
    assert 'run.npz' not in capfd.readouterr().err
    for state in 'continues after batch 4 of %d' % total, 'all %d batches are done; remove it to train again' % total:
        begin_again()
        keras_fit(keras_model(), path, **options)
        assert capfd.readouterr().err.count('theano-mgpu: note: %s: %s\n' % (path, state)) == 1


def test_a_generator_of_keras_1_has_no_number_of_batches():
    """TypeError: such a fit could not be continued."""
    from theano_mgpu.keras.hooks.fit_record import FitRecord
    record = FitRecord({'epochs': 2, 'samples': 20})
    record.completed = 3
    assert record.progress('run.npz') == 'run.npz: continues after batch 3'
    record.lengths = [2, 1]
    assert record.progress('run.npz') == 'run.npz: all 3 batches are done; remove it to train again'


def test_a_generator_with_other_batches_than_before_is_warned_of(cpu2, tmp_path):
    """A generator may draw its batches at random, and has to be able to go on."""
    path = str(tmp_path / 'run.npz')

    def fit(shift):
        batches = ((KERAS_X[i:i + 6] + shift, KERAS_Y[i:i + 6]) for i in range(9))
        from keras.callbacks import LambdaCallback
        return keras_model().fit_generator(batches, 3, 3, workers=0, verbose=0, callbacks=[
            checkpoint(path), LambdaCallback(on_batch_end=Interrupt(8 if shift else 0))])
    with pytest.raises(KeyboardInterrupt):
        fit(1)
    with pytest.warns(mgpu.MgpuWarning, match='run.npz was written after other batches than those that were replayed'):
        fit(0)


@pytest.mark.slow
def test_weights_that_a_generator_reads_in_a_replay_are_named(cpu2, tmp_path):
    """The generator got the weights of the untrained model, without a word."""
    path = str(tmp_path / 'run.npz')

    def fit():
        model = keras_model()

        def batches():
            while model.get_weights():
                yield KERAS_X[:6], KERAS_Y[:6]
        model.fit_generator(batches(), 3, 1, workers=0, verbose=0, callbacks=[checkpoint(path)])
    fit()
    begin_again()
    with pytest.warns(mgpu.MgpuWarning, match='dense_.*/kernel is read while finished calls are replayed'):
        fit()


@pytest.mark.slow
def test_a_keras_checkpoint_does_not_grow_with_the_batches(cpu2, tmp_path):
    """The results of each batch since the beginning were written every time."""
    path, sizes = str(tmp_path / 'run.npz'), []

    def look(epoch, logs):
        with np.load(path) as file:
            sizes.append([file[name].size for name in file.files if name.startswith('extra/results/')])
    from keras.callbacks import LambdaCallback
    keras_fit(keras_model(), path, [LambdaCallback(on_epoch_end=look)], every=3)
    assert sizes == [[3, 3]] * 3


@pytest.mark.slow
def test_a_fit_continues_from_the_file_before_a_damaged_one(cpu2, tmp_path):
    path, whole = str(tmp_path / 'run.npz'), keras_model()
    expected = keras_fit(whole, None)
    with pytest.raises(KeyboardInterrupt):
        keras_fit(keras_model(), path, interrupted_at=8)
    begin_again()
    rewrite(path, {'extra/fit': np.array('[')})
    model = keras_model()
    with pytest.warns(mgpu.MgpuWarning, match='run.npz is damaged .*: the state before it is taken, from .*previous'):
        history = keras_fit(model, path, every=1000)
    assert_same_history(history, expected)
    assert_bitwise(keras_state(model), keras_state(whole))


def test_what_a_checkpoint_refuses(cpu2, tmp_path):
    path, model = str(tmp_path / 'run.npz'), keras_model()
    keras_fit(model, None, epochs=1)
    model.train_function.function.save(path)
    with pytest.raises(ValueError, match='not written by theano_mgpu.keras.Checkpoint'):
        keras_fit(model, path)
    with pytest.raises(ValueError, match='every=0'):
        checkpoint(path, every=0)
    with pytest.raises(ValueError, match='2 Checkpoints'):
        keras_fit(model, None, [checkpoint(path), checkpoint(path)])


def test_a_changed_folder_changes_no_checkpoint(cpu2, tmp_path, monkeypatch):
    """The file was in the folder of the fit, or of the last change, and not in that where it was named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'other').mkdir()
    used = checkpoint('run.npz')
    os.chdir('other')
    keras_fit(keras_model(), None, [used], epochs=1)
    assert os.listdir('.') == [] and (tmp_path / 'run.npz').exists()


@pytest.mark.slow
def test_a_fork_does_not_take_part_in_the_checkpoints_of_its_parent(cpu2, tmp_path):
    """The next fit of the parent went on from the state of the fork: the lock was free between two fits."""
    path, model = str(tmp_path / 'run.npz'), keras_model()

    def fits():
        with pytest.raises(mgpu.MgpuError, match='run.npz belongs to the process .*: name another file'):
            keras_fit(model, path)
        keras_fit(model, str(tmp_path / 'own.npz'), epochs=1)
    keras_fit(model, path, epochs=1)
    in_a_fork(fits)
    assert (tmp_path / 'own.npz').exists()


@pytest.mark.slow
@pytest.mark.parametrize('rate, loss, text', [(.1, 'mse', ''), (.2, 'mae', 'rate was 0.1 and is 0.2')])
def test_a_fit_of_a_changed_script_is_said(rate, loss, text, cpu2, tmp_path, recwarn):
    """The fit went on with the rate of the file, or with another loss, without a word."""
    def fit(rate, loss):
        from keras.optimizers import SGD
        model = keras_model()
        model.compile(SGD(rate), loss, metrics=['mae'], mode=keras_mode())
        keras_fit(model, str(tmp_path / 'run.npz'), epochs=1)
    fit(.1, 'mse')
    begin_again()
    fit(rate, loss)
    said = [str(each.message) for each in recwarn if 'another script' in str(each.message)]
    assert len(said) == bool(text) and all(re.search('by another script: .*' + text, each) for each in said), said
