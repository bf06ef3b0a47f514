"""`theano-mgpu run --processes`: how many processes run a script, and whether a process for each device is faster.

One process launches for its n devices in turn, under Python's lock; n processes launch at the same time. Each function
that one process divides among GPUs shows by times that are taken anyway what that costs: L, the seconds of a step in
which the host launches for all devices, and W, the seconds in which it then waits for them. A device has all its work
after its own launches, L / n, and the last one ends W after the last launch. So none computes for more than L / n + W.

A function is launch-bound if L is longer than that: the launches keep the devices waiting. A step takes

    in one process     rest + L + W
    in n processes     rest + L / n + W + checks + exchange

where the second line is rest + max(L / n, compute) + checks + exchange: if a device computes for longer than its
launches take, it computes for L / n + W, else W is about 0. The cost model of `theano-mgpu bench` gives the exchange,
as for hosts with one device each: a ring, for gradients that the host adds. NCCL adds in n processes as it does in one.

`--processes auto` decides before the script begins, and no script can be run twice for a trial. So a run in one process
leaves its times, and this prediction, in a file; a run in processes adds the times that it has in fact. The file is
for one script as it is, with its arguments, flags and devices: after a change, a run in one process measures again.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import zlib
from typing import Any, Mapping, NamedTuple, Sequence

import theano_mgpu

from ..comm import mpi_library
from ..comm.allocation import allocation
from ..devices.context_map import Context, describe
from ..devices.contexts import choose_contexts, host_contexts
from ..errors import MgpuError, MissingError
from ..utils import mpi_environment
from ..utils.files import whole_text
from .bench.scaling import MEMORY, CostModel, Link, Network
from .config import devices
from .job_command import COMMAND, choose_start, find_mpirun, rank_environment
from .output import note
from .supervise import run_with_restarts

AUTO = 'auto'
GAIN = 1.1  # one process counts as slower if it takes longer by this factor; less is noise
CHECKS = 0.2e-3  # seconds of a step in which two processes compare their batches and their success, as measured
# Two processes on a host, as bench measures them: memory that is in no cache.
BETWEEN = Link('between processes', 2e-6, 4e9)
FILE = 'runs.json'
NOT_OF_SCRIPT = 'contexts', 'mgpu.executor', 'mgpu.ledger'  # flags that do not change the times of a script
MOST = 100  # scripts in the file
NOT_KNOWN = 'how long its launches take is not known yet. This run measures them for the next one'
SWITCHES = 'strict', 'verify', 'always', 'quiet', 'explain'  # options of run that take no value


def processes(text: str) -> int | str:
    """Return the value of the option ``--processes``: a number, or `AUTO`."""
    return AUTO if text == AUTO else devices(text)


class Measured(NamedTuple):
    """The measured steps of a function that one process divides among devices.

    Attributes
    ----------
    name : str
    n : int
        Devices.
    launches : float
        Seconds of a step in which the host launches for all devices (L above).
    waited : float
        Seconds of a step in which it waits for them (W).
    seconds : float
        Of a step over the devices.
    used : float
        Seconds of a step in the way that is used: over the devices or, where that was chosen, on one device.
    best : float
        Seconds of a step in the faster one of the ways that were timed.
    n_bytes : float
        Bytes of the gradients that the host adds.
    calls : int

    Examples
    --------
    >>> lstm = Measured('lstm', 2, launches=8e-3, waited=1e-3, seconds=10e-3, used=10e-3, best=10e-3,
    ...                 n_bytes=0, calls=100)
    >>> lstm.compute, lstm.is_launch_bound, round(lstm.in_processes, 6)
    (0.005, True, 0.006204)
    """

    name: str
    n: int
    launches: float
    waited: float
    seconds: float
    used: float
    best: float
    n_bytes: float
    calls: int

    @property
    def compute(self) -> float:
        """Seconds of a step for which each device computes, at most."""
        return self.launches / self.n + self.waited

    @property
    def is_launch_bound(self) -> bool:
        """True if launching for all devices takes longer than each of them computes."""
        return self.launches > self.compute

    @property
    def in_processes(self) -> float:
        """Predicted seconds of a step in n processes with a device each."""
        each = self.launches / self.n
        model = CostModel(fixed_s=0, sample_s=0, update_s=0, n_bytes=self.n_bytes, launch_s=each,
                          host_s=self.seconds - self.launches + each + CHECKS, network=Network(MEMORY, BETWEEN, 1))
        return sum(model.parts(self.n, 0).values())

    @property
    def gains(self) -> bool:
        """True if it is launch-bound, and processes are predicted to be faster."""
        return self.is_launch_bound and self.best > GAIN * self.in_processes

    def reason(self, command: str) -> str:
        """Return both numbers, and what processes would take, as a text for the user."""
        text = ('one process launches for %d devices in turn, %s a step, and each computes for %s at most. In %d '
                'processes a step is predicted to take %s; ' % (
                    self.n, _ms(self.launches), _ms(self.compute), self.n, _ms(self.in_processes)))
        if not self.gains:
            return text + 'the faster way in one takes ' + _ms(self.best)
        return text + 'in one it takes %s. To start them: %s' % (_ms(self.best), command)


def _ms(seconds: float) -> str:
    """Return seconds as milliseconds, for people."""
    return '%.3g ms' % (seconds * 1e3) if seconds < 1 else '%.0f ms' % (seconds * 1e3)


def measured(times: Any) -> Measured:
    """Return the Measured of a `runtime.step_times.StepTimes` that is known."""
    compared = times.timings.compared or [times.whole] * 3
    one, several, used = compared
    return Measured(times.name, times.replicas, times.launches, times.waited, several, used, min(one, several),
                    times.n_bytes, times.timings.calls)


def in_one_process(recorded: Sequence[Any]) -> list[Measured]:
    """Return the functions that were measured; none in one of several processes."""
    return [] if mpi_environment.trains_together() else [measured(each) for each in recorded if each.are_known]


# ------------------------------------------------------------------------------------------------- the file of a script

class Kept:
    """The times of a script on its devices that earlier runs have kept, in a file among Theano's compiled code.

    The file has the `MOST` scripts that ran last. Where two runs write at once, one of them is measured again.

    Parameters
    ----------
    args : argparse.Namespace
        Of `theano-mgpu run`.
    flags : dict of str to str
        THEANO_FLAGS before the script began.
    contexts : list of Context
        Of all processes.
    """

    def __init__(self, args: argparse.Namespace, flags: Mapping[str, str], contexts: Sequence[Context]) -> None:
        self._key, self._path = _key(args, flags, contexts), os.path.join(_folder(), FILE)
        self._times: dict[str, Any] = self._read().get(self._key, {})

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError), open(self._path) as file:
            content = json.load(file)
            if isinstance(content, dict):
                return content
        return {}

    def write(self, **times: Any) -> None:
        """Replace `one_process` or `several`, the times of the functions in a run; nothing where that is impossible."""
        self._times.update(times)
        every = self._read()
        every.pop(self._key, None)
        with contextlib.suppress(OSError), whole_text(self._path) as file:
            json.dump(dict([*every.items(), (self._key, self._times)][-MOST:]), file)

    def decision(self, n: int) -> Decision:
        """Return the faster one of one process and n of them, and the reason."""
        one = self._times.get('one_process')
        if not one:
            return Decision(1, NOT_KNOWN)
        names, calls, used, predicted = zip(*one)
        several = self._times.get('several', [])
        is_tried = [name for name, _ in several] == list(names)
        others = [seconds for _, seconds in several] if is_tried else predicted
        weights = [count * seconds for count, seconds in zip(calls, used)]
        total = sum(count * seconds for count, seconds in zip(calls, others))
        is_faster = sum(weights) > (1 if is_tried else GAIN) * total
        i = weights.index(max(weights))
        return Decision(n if is_faster else 1, 'a step of %s takes %s in one process, and %s %s in %d' % (
            names[i], _ms(used[i]), 'took' if is_tried else 'is predicted to take', _ms(others[i]), n))


def _folder() -> str:
    """Return the folder of Theano's compiled code."""
    import theano  # the command launch, which loads this module, too, does without it
    return theano.config.compiledir


def _key(args: argparse.Namespace, flags: Mapping[str, str], contexts: Sequence[Context]) -> str:
    """Return a text that is another one for another script, or other devices, flags or arguments."""
    if args.module:
        program = [os.getcwd(), '-m', *args.module]
    else:
        program = [os.path.realpath(args.script), str(_checksum(args.script)), *args.args]
    of_script = {name: value for name, value in sorted(flags.items()) if name not in NOT_OF_SCRIPT}
    return json.dumps([theano_mgpu.__version__, program, args.always, of_script, describe(contexts)])


def _checksum(script: str) -> int | None:
    """Return the checksum of a script; None for a folder."""
    with contextlib.suppress(OSError), open(script, 'rb') as file:
        return zlib.crc32(file.read())
    return None


def keep(args: argparse.Namespace, flags: Mapping[str, str], recorded: Sequence[Any]) -> Kept | None:
    """Keep the times of this run for later ones; return them, if it has some that tell of one process."""
    functions = [measured(each) for each in recorded if each.are_known]
    contexts, size = host_contexts() if functions else [], mpi_environment.size()
    is_alone = not mpi_environment.trains_together()
    if len(contexts) < 2 or any(context.kind == 'cpu' for context in contexts) or \
            not is_alone and (mpi_environment.rank() > 0 or not mpi_environment.local_size() == size == len(contexts)):
        return None
    kept = Kept(args, flags, contexts)
    if is_alone:
        kept.write(one_process=[[each.name, each.calls, each.used, each.in_processes] for each in functions])
        return kept
    kept.write(several=[[each.name, each.used] for each in functions])
    return None


# ----------------------------------------------------------------------------------------------------------- the choice

class Decision(NamedTuple):
    """The number of processes, and the reason."""

    processes: int
    reason: str

    def __str__(self) -> str:
        return '%s: %s' % ('one process' if self.processes == 1 else '%d processes' % self.processes, self.reason)


def decide(args: argparse.Namespace, flags: Mapping[str, str]) -> Decision:
    """Return the Decision for ``--processes auto``; no device is opened.

    Raises
    ------
    ContextError
        If there are not the contexts that the options ask for.
    """
    job = allocation()
    if job is not None:
        return Decision(1, 'this is a job of %s, whose processes launch starts' % job.scheduler)
    if args.verify:
        return Decision(1, '--verify compares one device with the contexts of one process')
    contexts = args.contexts or choose_contexts(args.gpus)
    wanted = _wanted(args, flags, contexts)
    if wanted.processes > 1:
        try:
            check_mpi()
        except MissingError as error:
            return Decision(1, '%d would be faster, but %s' % (wanted.processes, error))
        if args.gpus:  # so that the processes do not look for them again, and tell about it
            args.contexts, args.gpus = contexts, None
    return wanted


def _wanted(args, flags, contexts):
    """Return the Decision, where processes can be started."""
    if len(contexts) == 1:
        return Decision(1, 'there is one context')
    if all(context.kind == 'cpu' for context in contexts):
        n = min(len(contexts), len(os.sched_getaffinity(0)))
        return Decision(n, 'Python computes one context on the CPU at a time' if n > 1 else 'there is one core')
    if any(context.kind == 'cpu' for context in contexts):
        return Decision(1, 'some of the contexts are on the CPU')
    return Kept(args, flags, contexts).decision(len(contexts))


def check_mpi() -> None:
    """Raise a MissingError unless processes can be started."""
    find_mpirun()
    if importlib.util.find_spec('mpi4py') is None:
        raise MissingError(mpi_library.missing('mpi4py is not installed'))


def number_of(args: argparse.Namespace, flags: Mapping[str, str]) -> int:
    """Return the number of processes to start, and tell the user why; 1 for this one.

    Raises
    ------
    MgpuError
        For a number of processes where they cannot be started, or in one of several processes.
    """
    launcher, size = mpi_environment.launcher(), mpi_environment.size()
    if launcher and size > 1:
        if args.processes == AUTO:
            return 1
        raise MgpuError('this is one of %d processes that %s has started: leave --processes out'
                        % (size, launcher.name))
    if args.processes != AUTO:
        if args.processes > 1 and allocation() is None:
            check_mpi()
        return args.processes
    decision = decide(args, flags)
    if not args.quiet:
        note('--processes auto: %s' % (decision,))
    return decision.processes


def start(ranks: int, args: argparse.Namespace) -> int:
    """Run the script in several processes, as ``theano-mgpu launch -n N run SCRIPT`` does; return the exit code."""
    how = choose_start(ranks, None, allocation())
    return run_with_restarts(how, rank_environment(how), [COMMAND] + words_of(args), 0)


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the command line of `theano-mgpu run`, without ``--processes``."""
    words = ['run'] + ['--' + name for name in SWITCHES if getattr(args, name)]
    values = {'gpus': args.gpus, 'contexts': args.contexts and describe(args.contexts), 'json': args.json,
              'ledger': args.ledger}
    for name, value in values.items():
        words += ['--' + name, str(value)] if value else []
    return words + (['-m', *args.module] if args.module else [args.script, *args.args])


def command_of(ranks: int, args: argparse.Namespace) -> str:
    """Return the command that runs a script in several processes."""
    return 'theano-mgpu launch -n %d %s' % (ranks, shlex.join(words_of(args)))
