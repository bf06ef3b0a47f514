"""The processes that `theano-mgpu bench` starts, by `theano-mgpu launch`, to measure ranks."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from ...errors import MgpuError
from ..launch import THREADS, find_mpirun
from .measure import SETTLE, Block

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'rank.py')
TAIL = 3000  # characters of a failed job's stderr that are shown


def check_mpi():
    """Raise a MgpuError unless ranks can be started."""
    from ...distributed.mpi import import_mpi
    find_mpirun()
    import_mpi()


def sizes_apart(batch_size, n):
    """Batch sizes of one of n ranks by itself: its share, and twice that."""
    share = -(-batch_size // n)
    return [share, 2 * share]


class RankGroup:
    """A job of several ranks, which takes its turn with others; a context manager that ends it.

    Parameters
    ----------
    n : int
        Ranks.
    sizes : list of int
        Batch sizes of one rank by itself.
    threads : int
        Of each rank.
    recipe : Recipe
    batch_size : int
        Samples in the whole batch.
    steps : int
        In a block.

    Raises
    ------
    MgpuError
        Here and in `turn`: if the job ends before it has answered.
    """

    def __init__(self, n, sizes, threads, recipe, batch_size, steps):
        self._n = n
        command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n), '--gpus-per-process', '1', SCRIPT,
                   recipe.name, '--batch-size', str(batch_size), '--steps', str(steps),
                   '--optimizer', recipe.optimizer, '--sizes'] + list(map(str, sizes))
        if recipe.input_shape:
            command += ['--input-shape'] + list(map(str, recipe.input_shape))
        environment = dict({name: str(threads) for name in THREADS}, **os.environ)
        environment['PYTHONPATH'] = os.pathsep.join(path for path in [
            os.path.dirname(os.path.dirname(os.path.dirname(SCRIPT))), os.environ.get('PYTHONPATH')] if path)
        self._stderr = tempfile.TemporaryFile('w+', errors='replace')
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._stderr, universal_newlines=True, start_new_session=True)
        try:
            self.n_bytes = int(self._answer('ready').split()[1])
        except BaseException:
            self._end()
            raise

    def turn(self):
        """Have each of its measurements done once; a list of Blocks."""
        time.sleep(SETTLE)
        with contextlib.suppress(BrokenPipeError):  # _answer tells why
            self._process.stdin.write('go\n')
            self._process.stdin.flush()
        return [Block(**entries) for entries in json.loads(self._answer('['))]

    def _answer(self, beginning):
        """The next line that begins like this: libraries print, too."""
        for line in iter(self._process.stdout.readline, ''):
            if line.startswith(beginning):
                return line
        self._end()
        self._stderr.seek(0)
        raise MgpuError('a job of %d rank%s ended without an answer, with exit code %s. The end of its stderr:\n%s'
                        % (self._n, 's' if self._n > 1 else '', self._process.returncode,
                           self._stderr.read()[-TAIL:].strip() or '(nothing)'))

    def _end(self):
        """End it and whatever it has started; mpirun ends its ranks when it is terminated."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its commands
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self._end()
        self._process.stdout.close()
        self._stderr.close()
