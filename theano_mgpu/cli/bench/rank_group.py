"""The processes that `theano-mgpu bench` starts with `theano-mgpu launch` to measure ranks."""
import json
import os
import sys
import time
from pathlib import Path

from ...errors import MissingError
from ...jobs import mpi_library
from ...jobs.allocation import allocation
from ...utils.tables import counted
from ..job_command import THREADS, choose_start
from .measure import SETTLE, Block
from .worker import Worker

SCRIPT = Path(__file__).resolve().parent / 'rank.py'
PACKAGES = SCRIPT.parents[3]  # the folder that theano_mgpu is in


def check_mpi(n):
    """Raise a MissingError unless n ranks can be started."""
    choose_start(n, None, allocation())
    probe = mpi_library.probe()
    if probe.returncode:
        raise MissingError(mpi_library.missing(probe.stderr.strip().rpartition('\n')[2]))


def sizes_apart(batch_size, n):
    """Batch sizes of one of n ranks by itself: its share, and twice that."""
    share = -(-batch_size // n)
    return [share, 2 * share]


class RankGroup(Worker):
    """An MPI job that `bench` measures in turns with other contestants. As a context manager, it ends the job.

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
    WorkerError
        Here and in `turn`: if the job ends before it has answered.
    """

    def __init__(self, n, sizes, threads, recipe, batch_size, steps):
        command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n), '--gpus-per-process', '1', str(SCRIPT),
                   recipe.name, '--batch-size', str(batch_size), '--steps', str(steps),
                   '--optimizer', recipe.optimizer, '--sizes'] + list(map(str, sizes))
        if recipe.input_shape:
            command += ['--input-shape'] + list(map(str, recipe.input_shape))
        environment = dict({name: str(threads) for name in THREADS}, **os.environ)
        environment['PYTHONPATH'] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get('PYTHONPATH')]))
        super().__init__('a job of %s' % counted(n, 'rank'), command, environment)
        try:
            self.n_bytes = int(self.answer(lambda line: line.startswith('ready')).split()[1])
        except BaseException:
            self.kill()
            raise

    def turn(self):
        """Run each of its measurements once; a list of Blocks."""
        time.sleep(SETTLE)
        self.send('go')
        return [Block(**entries) for entries in json.loads(self.answer(lambda line: line.startswith('[')))]
