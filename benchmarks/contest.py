"""What the contests of scaling.py and predict.py share: workers, which take turns.

The workers import this file, too, and theirs may be an interpreter with numpy and torch alone: nothing else is imported
up here.
"""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

SETTLE = 0.1      # seconds before each epoch: idle threads of OpenBLAS and OpenMP spin for some milliseconds
PATIENCE = 900    # seconds that an answer may take, compilation included
TAIL = 3000       # characters of a failed worker's stderr that are shown


def counted(n, noun):
    """A number and its noun.

    Examples
    --------
    >>> counted(1, 'rank'), counted(2, 'rank')
    ('1 rank', '2 ranks')
    """
    return '%d %s%s' % (n, noun, 's' if n != 1 else '')


class WorkerError(Exception):
    """A worker ended, or did not answer."""


def launch(ranks, script, args):
    """The command that runs a script of this project as so many MPI ranks."""
    return [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(ranks), script] + args


def environment_of(threads):
    """The environment of a worker: its threads, the CPU, float32."""
    environment = dict(os.environ, KERAS_BACKEND='theano', CUDA_VISIBLE_DEVICES='', TF_CPP_MIN_LOG_LEVEL='2')
    flags = [flag for flag in (os.environ.get('THEANO_FLAGS'), 'device=cpu,floatX=float32') if flag]
    environment['THEANO_FLAGS'] = ','.join(flags)  # of two values the last one counts
    environment.setdefault('GLOO_SOCKET_IFNAME', 'lo')  # the host's own name need not resolve
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
        environment[name] = str(threads)
    return environment


class Worker:
    """A contender's process, or its processes; a context manager that ends them.

    Parameters
    ----------
    label : str
        What it is called if it fails.
    command : list of str
        It prints a line ``ready``, and the seconds of an epoch for each line ``go`` of its stdin.
    environment : dict

    Attributes
    ----------
    pid : int

    Raises
    ------
    WorkerError
        Here, in `epoch` and in `number`: if it ends, or takes longer than `PATIENCE`, before it has answered.
    """

    def __init__(self, label, command, environment):
        self._label = label
        self._stderr = tempfile.TemporaryFile('w+', errors='replace')
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._stderr, universal_newlines=True,
            start_new_session=True)  # Ctrl-C comes to this process alone, which ends them in order
        self.pid = self._process.pid
        try:
            self._answer(lambda line: line == 'ready')
        except BaseException:
            self.kill()
            raise

    def epoch(self):
        """Have an epoch done.

        Returns
        -------
        float
            Its seconds.
        """
        try:
            self._process.stdin.write('go\n')
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer tells why
        return self.number()

    def number(self):
        """The next number that it prints."""
        return float(self._answer(is_number))

    def _answer(self, expected):
        """The next line that is an answer: libraries print, too."""
        timer = threading.Timer(PATIENCE, self._process.terminate)
        timer.start()
        began = time.monotonic()
        try:
            for line in iter(self._process.stdout.readline, ''):
                if expected(line.strip()):
                    return line
        finally:
            timer.cancel()
        raise WorkerError(self._failure(time.monotonic() - began >= PATIENCE))

    def _failure(self, late):
        self.kill()
        self._stderr.seek(0)
        tail = self._stderr.read()[-TAIL:].strip()
        what = 'did not answer within %d s' % PATIENCE if late else 'ended with exit code %s' % self._process.returncode
        return ('the worker "%s" %s before an answer. The end of its stderr:\n%s'
                % (self._label, what, tail or '(nothing)'))

    def kill(self):
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
        self.kill()
        self._process.stdout.close()
        self._stderr.close()


def is_number(text):
    """Whether a line is one.

    Examples
    --------
    >>> is_number('0.25'), is_number('WARNING: 0.25')
    (True, False)
    """
    try:
        float(text)
    except ValueError:
        return False
    return True


def turns(found, number):
    """The order of a round.

    Examples
    --------
    >>> turns('abc', 0), turns('abc', 1), turns('abc', 2)
    ('abc', 'acb', 'cab')
    """
    start = number % len(found)
    return (found[start:] + found[:start])[::-1 if number % 2 else 1]


def started(stack, contenders, start, title):
    """Workers of all contenders, which end with an ExitStack.

    Parameters
    ----------
    stack : contextlib.ExitStack
    contenders : list
    start : callable
        Makes the Worker of one.
    title : str
        What the progress bar shows.

    Returns
    -------
    dict of contender to Worker
    """
    from tqdm import tqdm
    # One after the other: they would wait for each other at the lock of Theano's folder of compiled code.
    bar = tqdm(contenders, desc='%s: starting' % title, unit=' contenders', disable=None, leave=False)
    return {contender: stack.enter_context(start(contender)) for contender in bar}


def take_turns(workers, rounds, title):
    """Seconds of each contender, a list of one a round.

    Parameters
    ----------
    workers : dict of contender to Worker
    rounds : int
    title : str
        What the progress bar shows.

    Returns
    -------
    dict of contender to list of float
    """
    from tqdm import tqdm
    seconds = {contender: [] for contender in workers}
    for number in tqdm(range(rounds), desc=title, unit=' rounds', disable=None):
        for contender in turns(list(workers), number):
            time.sleep(SETTLE)
            seconds[contender].append(workers[contender].epoch())
    return seconds


def spread(values):
    """The columns median, lowest and highest of a row, and the values.

    Examples
    --------
    >>> spread([3., 1., 5.])
    {'median': 3.0, 'lowest': 1.0, 'highest': 5.0}
    """
    return {'median': float(np.median(values)), 'lowest': min(values), 'highest': max(values)}
