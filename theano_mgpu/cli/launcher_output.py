"""The output of a job, on its way from mpirun or srun to this process's own stdout and stderr.

All output of the ranks is passed on as it arrives. mpirun is given a pipe of its own for its own messages: only lines
from there may be left out.
"""
from __future__ import annotations

import array
import fcntl
import os
import re
import select
import sys
import termios
import threading
from typing import Any, Callable, Mapping

from ..errors import PREFIX, MgpuError

STDOUT, STDERR = 1, 2
# Open MPI up to version 4 writes its own messages to this descriptor instead of stderr; later ones ignore it.
OWN_DESCRIPTOR = 'OPAL_OUTPUT_STDERR_FD'
RULE = b'-' * 20  # Open MPI prints lines of dashes around its own messages
NOISE = (b'MPI_ABORT was invoked', b'Primary job  terminated normally', b'ORTE_ERROR_LOG')
SIGNAL = re.compile(br'process rank (\d+) [^-]*? exited\s+on\s+signal (\d+(?: \(\w+\))?)')  # in such a message
HELD = 50   # milliseconds in which the rest of the report of a step arrives


class OutputError(MgpuError, RuntimeError):
    """The output of a job cannot be written."""


class Output:
    """The output of a process, passed on as it arrives.

    Attributes
    ----------
    tail : bytes
        Bytes that are held back until `HELD` has passed.
    """

    def __init__(self) -> None:
        self.tail = b''

    def passed(self, data: bytes) -> bytes:
        """Return the bytes to print after `data` has arrived."""
        return data

    def rest(self) -> bytes:
        """Return the bytes that were held back."""
        tail, self.tail = self.tail, b''
        return tail


class RankOutput(Output):
    """The stdout or stderr of a job, without the reports of rank 0.

    Rank 0 writes its reports to stderr, which Open MPI 5.0.7 passes on to the stdout of mpirun. Only bytes that may be
    the beginning of a report are held back.

    Parameters
    ----------
    reports : dict of str to bytes
        The bytes of each report, by its name.

    Attributes
    ----------
    received : set of str
        The reports that have come.

    Examples
    --------
    >>> output = RankOutput({'step': b'<done>'})
    >>> output.passed(b'one<do') + output.passed(b'ne>two'), output.received
    (b'onetwo', {'step'})
    """

    def __init__(self, reports: Mapping[str, bytes]) -> None:
        super().__init__()
        self.received: set[str] = set()
        self._reports = reports

    def passed(self, data: bytes) -> bytes:
        data = self.rest() + data
        for name, report in self._reports.items():
            if report in data:
                self.received.add(name)
                data = data.replace(report, b'')
        start = max(data.rfind(report[:1]) for report in self._reports.values())
        if start >= 0 and any(report.startswith(data[start:]) for report in self._reports.values()):
            data, self.tail = data[:start], data[start:]
        return data


class OwnMessages(Output):
    """mpirun's own messages, except for repetitions of a report of a rank.

    Attributes
    ----------
    internal : bytes
        Single lines that were left out: the only reason there is, if nothing else was printed.
    job : str
        A name of the job, once another one runs: of its messages, only the signal that has ended a rank is shown.

    Examples
    --------
    >>> noise = b'-' * 74 + b'\\nMPI_ABORT was invoked on rank 1\\n' + b'-' * 74 + b'\\n'
    >>> OwnMessages().passed(noise + b'mpirun: Forwarding signal 10 to job\\n')
    b'mpirun: Forwarding signal 10 to job\\n'
    """

    def __init__(self) -> None:
        super().__init__()
        self.internal, self.job = b'', ''
        self._line = b''   # the beginning of a line
        self._block = b''  # lines of an unfinished message

    def passed(self, data: bytes) -> bytes:
        *lines, self._line = (self._line + data).split(b'\n')
        return b''.join(self._shown(line + b'\n') for line in lines)

    def rest(self) -> bytes:
        rest, self._block, self._line = self._block + self._line, b'', b''
        return rest

    def _shown(self, line):
        is_rule, is_in_block = line.startswith(RULE), bool(self._block)
        if is_rule or is_in_block:
            self._block += line
            if is_rule and is_in_block:
                block, self._block = self._block, b''
                return self._of_job(block) if self.job else b'' if any(noise in block for noise in NOISE) else block
        elif NOISE[-1] in line:
            self.internal += line
        else:
            return line
        return b''

    def _of_job(self, block):
        signal = SIGNAL.search(block)
        if signal is None:
            return b''
        return ('%snote: in %s, rank %s ended by signal %s\n'
                % (PREFIX, self.job, *[text.decode() for text in signal.groups()])).encode()


class JobOutput:
    """Threads that copy the output of a launcher and its ranks to stdout and stderr.

    Parameters
    ----------
    reports : dict of str to bytes
        Of rank 0; see `RankOutput`.
    by_mpirun : bool
        Whether the launcher is mpirun.
    held : bool
        Whether to keep all output back until `release` is called.
    failed : callable
        Called if stdout or stderr cannot be written any more, such as a pipe whose reader has ended.

    Attributes
    ----------
    environment : dict of str to str
        Variables for the launcher.
    descriptors : list of int
        Descriptors to pass on to the launcher.
    """

    def __init__(self, reports: Mapping[str, bytes], by_mpirun: bool, held: bool,
                 failed: Callable[[], object]) -> None:
        self._outputs = {STDOUT: RankOutput(reports), STDERR: RankOutput(reports)}
        self._messages = OwnMessages()
        self._held: dict[int, list[bytes]] = {STDOUT: [], STDERR: []} if held else {}
        self._locks = {STDOUT: threading.Lock(), STDERR: threading.Lock()}
        self._failed, self._is_silent = failed, True
        self._failures: list[OSError] = []
        self._threads: list[threading.Thread] = []
        self._ended, self._still_runs = os.pipe()  # the first one is readable as soon as the other one is closed
        self.environment: dict[str, str] = {}
        self.descriptors: list[int] = []
        if by_mpirun:
            self._of_messages, descriptor = os.pipe()
            self.environment, self.descriptors = {OWN_DESCRIPTOR: str(descriptor)}, [descriptor]

    def has(self, *reports: str) -> bool:
        """Return whether rank 0 has made all these reports."""
        return self._outputs[STDOUT].received | self._outputs[STDERR].received >= set(reports)

    def name_job(self, name: str) -> None:
        """Tell what mpirun says from now on from the messages of the job that runs."""
        self._messages.job = name

    def release(self) -> None:
        """Write the output that was held back, and from now on all at once."""
        for target in list(self._held):
            self._start(self._release, target)

    def _release(self, target):
        with self._locks[target]:
            for data in self._held.pop(target):
                self._write_now(target, data)

    def _start(self, act, *arguments):
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def copy(self, process: Any) -> None:
        """Start to copy the output of the launcher, a Popen with pipes."""
        for stream in (sys.stdout, sys.stderr):  # the own output of this process comes first
            stream.flush()
        sources: list[tuple[int, int, Output]] = [(process.stdout.fileno(), STDOUT, self._outputs[STDOUT]),
                                                  (process.stderr.fileno(), STDERR, self._outputs[STDERR])]
        if self.descriptors:
            os.close(self.descriptors[0])  # the launcher has it
            sources.append((self._of_messages, STDERR, self._messages))
        for source in sources:
            self._start(self._copy, *source)

    def finish(self, status: int, seconds: float | None = None) -> None:
        """Wait until all is written that the launcher printed.

        Parameters
        ----------
        status : int
            With which the launcher has ended.
        seconds : float, optional
            How long to wait for a reader that reads nothing.

        Raises
        ------
        OutputError
            If the output could not be written, as on a full disk; not if the reader of a pipe has ended.
        """
        os.close(self._still_runs)
        for thread in self._threads:
            thread.join(seconds)
        os.close(self._ended)
        if self.descriptors:
            os.close(self._of_messages)
        for error in self._failures:
            if not isinstance(error, BrokenPipeError):
                raise OutputError('the output of the job cannot be written: %s. The job was ended' % error)
        if status and self._is_silent and not self._failures:
            write_all(STDERR, self._messages.internal)

    def _copy(self, source, target, output):
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(HELD if output.tail else None)]
            if self._ended in ready:
                # All that the launcher printed is in the pipe. What outlives it, as ssh's master, may go on writing.
                left = array.array('i', [0])
                fcntl.ioctl(source, termios.FIONREAD, left)
                self._write(target, output.passed(os.read(source, left[0])))
                break
            if source in ready:
                data = os.read(source, 1 << 16)
                if not data:
                    break
                self._write(target, output.passed(data))
            else:
                self._write(target, output.rest())
        self._write(target, output.rest())

    def _write(self, target, data):
        with self._locks[target]:
            if target in self._held:
                self._held[target].append(data)
            else:
                self._write_now(target, data)

    def _write_now(self, target, data):
        if data and target == STDERR:
            self._is_silent = False
        try:
            write_all(target, data)
        except OSError as error:  # go on reading, so that the launcher can end
            self._failures.append(error)
            self._failed()


def write_all(descriptor: int, data: bytes) -> None:
    """Write bytes to a descriptor, also where another program that shares it has made it non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view):]
        except BlockingIOError:
            select.select([], [descriptor], [])
