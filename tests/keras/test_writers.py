"""Callbacks that only write: rank 0 alone calls them; metrics, schedules and what calls the model run on each rank."""
import json

from theano_mgpu.keras.hooks.writers import only_writes

import pytest
from keras import callbacks
from keras.callbacks import Callback
from support.keras_equivalence import check  # noqa: F401  chooses Keras's backend first


def append(path, row):
    with open(path, 'a') as file:
        file.write(json.dumps(row))


class Through(Callback):
    def on_epoch_end(self, epoch, logs=None):
        append('log', dict(logs, epoch=epoch))


class Rows(Callback):
    def on_epoch_end(self, epoch, logs=None):
        row = {}
        row['loss'] = 1
        self.path.write_text(str(row))


class Stops(Callback):
    def on_batch_end(self, batch, logs=None):
        if logs['loss'] > 100:
            open('stopped', 'w').close()
            self.model.stop_training = True


class Reads(Callback):
    def on_train_end(self, logs=None):
        print(self.model.stop_training, file=open('log', 'w'))


class Metric(Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs['val_' + self.name] = self.compute()

    def compute(self):
        return self.model.predict(self.x).mean()


class Changes(Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs.update(epoch=epoch)
        append('log', logs)


class Rate(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.lr = .1


class Keeps(Callback):
    def on_batch_end(self, batch, logs=None):
        self.losses.append(logs['loss'])


class Schedule(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        with open('rates') as file:
            self.rate = float(file.readline())


class Said(Stops):
    mgpu_rank_0 = True


class SaidNot(Rows):
    mgpu_rank_0 = False


class OfTracker(Keeps):
    __module__ = 'wandb.keras'


class Far(Callback):
    def on_epoch_end(self, epoch, logs=None):
        pytest.record(logs)


WRITE = [Through(), Rows(), Reads(), Said(), OfTracker(), callbacks.CSVLogger('a'), callbacks.ModelCheckpoint('b'),
         callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: open('log', 'a').write(str(logs)))]
ON_EACH = [Schedule(), Metric(), Rate(), Keeps(), SaidNot(), callbacks.EarlyStopping(), callbacks.ReduceLROnPlateau(),
           callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(a=1)), callbacks.History()]


@pytest.mark.parametrize('callback', WRITE + ON_EACH, ids=lambda callback: type(callback).__name__)
def test_rank_0_alone_calls_what_only_writes(callback, capsys):
    assert only_writes(callback) == (callback in WRITE)
    assert not capsys.readouterr().err


@pytest.mark.parametrize('callback, reason', [
    (Stops(), 'writes, by open, and steers the training or calls the model, by stop_training =. Set mgpu_rank_0'),
    (Changes(), 'writes, by open and write, and steers the training or calls the model, by logs[...] ='),
    (Far(), 'uses pytest, which may write. Set mgpu_rank_0')], ids=['Stops', 'Changes', 'Far'])
def test_a_note_names_what_the_rule_does_not_know(callback, reason, capsys):
    assert not only_writes(callback)
    assert 'note: the callback %s runs on each rank, since it %s' % (type(callback).__name__, reason) in \
        capsys.readouterr().err
