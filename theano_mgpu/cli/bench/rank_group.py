"""The processes that `theano-mgpu bench` starts with `theano-mgpu launch` to measure ranks."""
import json
import os
import sys
from pathlib import Path

from ...errors import MissingError
from ...jobs import mpi_library
from ...jobs.allocation import allocation
from ...utils.tables import counted
from ..job_command import THREADS, choose_start
from .measure import Block
from .worker import Worker

SCRIPT = Path(__file__).resolve().parent / 'rank.py'
PACKAGES = SCRIPT.parents[3]  # the folder that theano_mgpu is in


def check_mpi(n):
    """Raise a MissingError unless n ranks can be started."""
    choose_start(n, None, allocation())
    probe = mpi_library.probe()
    if probe.returncode:
        raise MissingError(mpi_library.missing(probe.stderr.strip().rpartition('\n')[2]))


class RankGroup(Worker):
    """An MPI job that `bench` measures in turns with other contestants: a context manager, which ends the job.

    Parameters
    ----------
    n : int
        Ranks.
    threads : int
        Of each rank.
    recipe : Recipe
    **settings
        What is measured; see `rank_work.Settings`.
    """

    def __init__(self, n, threads, recipe, **settings):
        settings.update(model=recipe.name, input_shape=recipe.input_shape, optimizer=recipe.optimizer)
        environment = dict({name: str(threads) for name in THREADS}, **os.environ)
        environment['PYTHONPATH'] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get('PYTHONPATH')]))
        super().__init__('a job of %s' % counted(n, 'rank'), [
            sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n), '--gpus-per-process', '1', str(SCRIPT),
            json.dumps(settings)], environment)

    def wait(self):
        """Wait until all ranks have compiled; raise a WorkerError if the job ends before."""
        self.answer(lambda line: line == 'ready')

    def turn(self):
        """Run each of its measurements once; return a list of Blocks, or raise a WorkerError if the job ends before."""
        self.send('go')
        return [Block(**entries) for entries in json.loads(self.answer(lambda line: line.startswith('[')))]
