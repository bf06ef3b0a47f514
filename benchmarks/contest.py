"""What the contests of scaling.py and predict.py share: workers, which take turns."""
import contextlib
import os
import sys
import time

from theano_mgpu.cli.bench.worker import Worker

import turns

SETTLE = 0.1      # seconds before each epoch: idle threads of OpenBLAS and OpenMP spin for some milliseconds
PATIENCE = 900    # seconds that an answer may take, compilation included


def launch(ranks, script, args):
    """The command that runs a script of this project as a number of MPI ranks."""
    return [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(ranks), script] + args


def environment_of(threads):
    """The environment of a worker: its threads, the CPU, float32."""
    environment = dict(os.environ, KERAS_BACKEND='theano', CUDA_VISIBLE_DEVICES='', TF_CPP_MIN_LOG_LEVEL='2')
    flags = [flag for flag in (os.environ.get('THEANO_FLAGS'), 'device=cpu,floatX=float32') if flag]
    environment['THEANO_FLAGS'] = ','.join(flags)  # the last value of a flag counts
    environment.setdefault('GLOO_SOCKET_IFNAME', 'lo')  # the host's own name may not resolve
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
        environment[name] = str(threads)
    return environment


def start_worker(contender, command):
    """Start a contender's Worker.

    It prints a line ``ready`` when it is, and then the seconds of an epoch for each line ``go`` of its stdin.

    Parameters
    ----------
    contender : Contender
        With a `label` and a number of `threads`.
    command : list of str

    Raises
    ------
    WorkerError
        If it ends, or takes longer than `PATIENCE`, before it is ready.
    """
    worker = Worker('the worker "%s"' % contender.label, command, environment_of(contender.threads), PATIENCE)
    try:
        worker.answer(lambda line: line == 'ready')
    except BaseException:
        worker.kill()
        raise
    return worker


def next_number(worker):
    """The next number that a worker prints."""
    return float(worker.answer(is_number))


def epoch(worker):
    """Have a worker compute an epoch; its seconds."""
    time.sleep(SETTLE)
    worker.send('go')
    return next_number(worker)


def is_number(text):
    """Whether a line is a number.

    Examples
    --------
    >>> is_number('0.25'), is_number('WARNING: 0.25')
    (True, False)
    """
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def started(stack, contenders, start, title):
    """Start the workers of all contenders; an ExitStack ends them.

    Parameters
    ----------
    stack : contextlib.ExitStack
    contenders : list
    start : callable
        Starts the Worker of a contender.
    title : str
        Of the progress bar.

    Returns
    -------
    dict of contender to Worker
    """
    # One after the other: together they would wait for each other at the lock of Theano's compilation folder.
    from tqdm import tqdm  # not at the top: contest_command.py says how to install it
    bar = tqdm(contenders, desc='%s: starting' % title, unit=' contenders', disable=None, leave=False)
    return {contender: stack.enter_context(start(contender)) for contender in bar}


def epochs_in_turns(workers, rounds, title):
    """Seconds of each contender's epochs, a list with one entry a round.

    Parameters
    ----------
    workers : dict of contender to Worker
    rounds : int
    title : str
        Of the progress bar.

    Returns
    -------
    dict of contender to list of float
    """
    return turns.take_turns({contender: lambda worker=worker: epoch(worker) for contender, worker in workers.items()},
                            rounds, title)
