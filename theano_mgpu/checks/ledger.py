"""The ledger of a run: a file with digests of the weights and the state after every k-th step.

`theano-mgpu compare` reads two of them, and names the first step at which the runs part.
"""
from __future__ import annotations

import errno
import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable

from ..comm.communicator import Communicator
from ..comm.rank_0 import on_rank_0
from ..comm.rank_errors import failing_together
from ..devices.contexts import chosen, gpu_context
from ..devices.discovery import status
from ..errors import MgpuError
from ..options import Flags
from ..utils import mpi_environment
from ..utils.owned import LEDGER, is_at, lock_file
from ..utils.values import digest, is_due
from . import ledger_file, settings

_open: dict[str, Ledger] = {}  # by path


def ledger(ranks: Communicator) -> Ledger | None:
    """Return the ledger of the flag ``mgpu.ledger``; None where it has no value. Every rank makes the call."""
    flags = Flags.now()
    return ledger_at(flags.ledger, int(flags.ledger_every), ranks) if flags.ledger else None


def ledger_at(path: str, every: int, ranks: Communicator) -> Ledger:
    """Return the ledger of a file, with a line every few steps; raise an MgpuError if it has them at other steps."""
    path = os.path.abspath(path)
    if path not in _open:
        book = Ledger(path, every)
        on_rank_0(ranks, book.open)
        _open[path] = book
    if _open[path].every != every:
        raise MgpuError('the ledger %s has a line every %d steps in this process, not every %d: give the same number, '
                        'or name another file' % (path, _open[path].every, every))
    return _open[path]


def use_ledger(path: str) -> None:
    """Set the flag ``mgpu.ledger``, and open the file now: an error comes before the script begins."""
    flags = theano.config.mgpu
    flags.ledger = path
    ledger(Communicator())


def account_of(step: Any, variables: Iterable[Any]) -> Account | None:
    """Return the account of a DividedFunction with some Replicated; None without a ledger."""
    book = ledger(step.ranks)
    return book.account(step.options.name, [each.variable for each in variables], step.ranks) if book else None


class Ledger:
    """A ledger, which rank 0 writes. A file that an earlier start of the run has left is continued."""

    def __init__(self, path: str, every: int) -> None:
        self.path, self.every = path, every
        self._names: Counter[str] = Counter()
        self._process = os.getpid() if mpi_environment.rank() == 0 else None
        self._writing, self._has_begun = threading.Lock(), False

    def open(self) -> None:
        """Open the file, unless another rank does; raise an MgpuError if it cannot be written, or is no ledger."""
        if self._process:
            try:
                self._lock, self._file = lock_file(self.path, LEDGER), ledger_file.open_to_continue(self.path)
                self._status = os.fstat(self._file.fileno())
            except OSError as error:
                raise MgpuError('the ledger %s cannot be written: %s. Name another file, or leave out --ledger '
                                '(mgpu.ledger)' % (self.path, error.strerror)) from error

    def account(self, name: str | None, variables: Sequence[SharedVariable], ranks: Communicator,
                together: bool = True) -> Account:
        """Return the account of one more function; a name that was there before gets a number."""
        name = name or 'a function'
        self._names[name] += 1
        return Account(self, name + ' (%d)' % self._names[name] * (self._names[name] > 1), variables, ranks, together)

    def write(self, of: str, step: int, variables: Mapping[str, SharedVariable]) -> None:
        """Write the line of a step, unless another rank does, or this process is a fork."""
        if self._process != os.getpid():
            return
        values = {name: digest(variable.get_value(borrow=True)) for name, variable in variables.items()}
        with self._writing:
            if not self._has_begun:
                self._add(_start(self.every))
                self._has_begun = True
            self._add({'of': of, 'step': step, 'digest': digest(list(values.items())), 'values': values})

    def _add(self, line):
        try:
            if not is_at(self._file.fileno(), self._status):  # another file may have its descriptor
                raise FileNotFoundError(errno.ENOENT, 'the program has closed it')
            if os.fstat(self._file.fileno()).st_nlink == 0:  # the system would write it all the same
                raise FileNotFoundError(errno.ENOENT, 'the file was removed')
            self._file.write(json.dumps(line).encode() + b'\n')
            self._file.flush()
        except OSError as error:
            remedy = 'Leave it in its place' if error.errno == errno.ENOENT else 'Make room for it'
            raise MgpuError('the ledger %s cannot be written any more: %s. %s, or run without a ledger (mgpu.ledger, '
                            '--ledger or ledger=)' % (self._file.name, error.strerror, remedy)) from error


class Account:
    """The lines of one function in a ledger; its `steps` are completed ones, of earlier starts of the run, too.

    Every rank makes the same calls: a state of which each has a part is consolidated. With `together`, an error of rank
    0 is raised at once on every rank. Otherwise the others raise it at their next handshake, and a function that is not
    divided may run on some ranks only.
    """

    def __init__(self, ledger: Ledger, name: str, variables: Sequence[SharedVariable], ranks: Communicator,
                 together: bool) -> None:
        self._ledger, self._name, self._ranks, self._together = ledger, name, ranks, together
        self._variables: dict[str, SharedVariable] = {}
        for i, variable in enumerate(dict.fromkeys(variables)):
            known = variable.name or '#%d of %s' % (i, name)
            self._variables['%s (#%d)' % (known, i) if known in self._variables else known] = variable
        self.steps, self._has_begun = 0, False

    def of_copy(self, name: str, swap: Mapping[Any, Any]) -> Account:
        """Return the account of a copy of the function, which may update other variables in place of some."""
        variables = [swap.get(variable, variable) for variable in self._variables.values()]
        return self._ledger.account(name, variables, self._ranks, self._together)

    def begin(self) -> None:
        """Write a line of the values before the first step, once."""
        if not self._has_begun:
            self._has_begun = True
            self._write()

    def note(self) -> None:
        """Count a step, and write its line if it is due: each k-th one, and 1, 2, 4, 8 before the first."""
        self.steps += 1
        if is_due(self.steps, self._ledger.every):
            self._write()

    def _write(self):
        write = functools.partial(self._ledger.write, self._name, self.steps, self._variables)
        if self._together:
            on_rank_0(self._ranks, write)
            return
        self._ranks.consolidate()
        with failing_together(self._ranks):
            write()


def _start(every):
    """Return the line of a start of the run."""
    devices = {context.name: '%s (%s)' % (context.device, status(context.device, gpu_context(context)).name)
               for context in chosen()}
    return {'ledger': ledger_file.VERSION, 'every': every, 'begun': time.strftime('%Y-%m-%d %H:%M:%S'),
            'program': sys.argv, 'ranks': mpi_environment.size(), 'devices': devices, **settings.of_process()}
