"""Kill a training in the middle, start it again, and get the weights of an undisturbed run.

The callback `Checkpoint('run.npz', every=5)` of `fit` saves the weights, the state of the optimizer, the random streams
and the order of the samples every 5 batches. When the script starts again, `fit` continues from the checkpoint. The
script needs no other line for this.

Run:

    python examples/resume_after_kill.py
    python examples/resume_after_kill.py --contexts 'dev0->cuda0;dev1->cuda1' --kill-after 25

The script starts the same training of two epochs in three processes, each over two contexts: the first process is
undisturbed, SIGKILL ends the second one after some batches, and the third one continues the second. The script prints

    undisturbed: ... batches computed, weights ...
    killed:      by signal 9 after ... batches
    resumed:     ... batches computed, weights ...
    the weights differ by ... at most

and exits with code 1 if the weights differ by more than rounding. `theano-mgpu launch --restarts 3 train.py` restarts a
job of several processes by itself.
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile

BATCHES = 2 * 15  # two epochs of 15 batches: 1,500 images in batches of 100


def train(folder, contexts, kill_after):
    """Train as a script of a user would; only `Count` is added."""
    import theano_mgpu as mgpu  # before keras
    from theano_mgpu.keras import Checkpoint, multi_gpu_model

    import keras
    import numpy as np
    from keras.layers import Dense, Dropout
    from sklearn.datasets import load_digits

    class Count(keras.callbacks.Callback):
        """A count of the batches of this process, which kills the process after some, as if the machine were lost."""
        computed = 0

        def on_batch_begin(self, batch, logs=None):  # not called for batches before the restart
            self.computed += 1

        def on_batch_end(self, batch, logs=None):
            if kill_after and self.computed == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    mgpu.init(contexts or 2)
    np.random.seed(1)
    digits = load_digits()
    model = keras.Sequential([Dense(64, activation='relu', input_shape=(64,)), Dropout(0.3),
                              Dense(10, activation='softmax')])
    parallel = multi_gpu_model(model)
    parallel.compile('adam', 'sparse_categorical_crossentropy')
    count = Count()
    parallel.fit(digits.data[:1500] / 16, digits.target[:1500], batch_size=100, epochs=2, verbose=0,
                 callbacks=[Checkpoint(os.path.join(folder, 'run.npz'), every=5), count])
    np.savez(os.path.join(folder, 'weights.npz'), *model.get_weights(), computed=count.computed)


def start(folder, contexts, kill_after=0):
    """Run `train` in a process of its own; return its exit code."""
    command = [sys.executable, os.path.abspath(__file__), '--train', folder, '--kill-after', str(kill_after)]
    return subprocess.run(command + ['--contexts', contexts] * bool(contexts)).returncode


def result(name, folder):
    """Print a line about a finished run, and return its weights."""
    import numpy as np
    with np.load(os.path.join(folder, 'weights.npz')) as file:
        weights = [file[key] for key in file.files if key != 'computed']
        print('%-12s %d batches computed, weights %s ...'
              % (name + ':', file['computed'], ' '.join('%.7f' % value for value in weights[0].flat[-4:])), flush=True)
    return weights


def main(contexts, kill_after):
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
        if start(undisturbed, contexts):
            return 'the training failed: see above'
        expected = result('undisturbed', undisturbed)
        code = start(disturbed, contexts, kill_after)
        if code != -signal.SIGKILL:
            return 'the training was not killed: it ended with code %d' % code
        print('%-12s by signal %d after %d batches' % ('killed:', -code, kill_after), flush=True)
        if start(disturbed, contexts):
            return 'the training could not be resumed: see above'
        weights = result('resumed', disturbed)
    difference = max(abs(a - b).max() for a, b in zip(weights, expected))
    print('the weights differ by %.1e at most' % difference)
    return 0 if difference <= 1e-6 else 1


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='MAP', help="such as 'dev0->cuda0;dev1->cuda1' (default: the first two "
                        "of THEANO_FLAGS, .theanorc or this machine's devices)")
    parser.add_argument('--kill-after', type=int, default=17, metavar='N', help='batches before the kill, 1 to %d '
                        '(default: %%(default)s)' % (BATCHES - 1))
    parser.add_argument('--train', metavar='FOLDER', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        sys.exit(train(arguments.train, arguments.contexts, arguments.kill_after))
    if not 1 <= arguments.kill_after < BATCHES:
        parser.error('--kill-after must be 1 to %d: the training has %d batches' % (BATCHES - 1, BATCHES))
    sys.exit(main(arguments.contexts, arguments.kill_after))
