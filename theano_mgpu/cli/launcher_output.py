"""The output of a job, on its way from mpirun or srun to this process's own stdout and stderr.

All output of the ranks is passed on as it arrives. mpirun is given a pipe of its own for its own messages: only lines
from there may be left out.
"""
from __future__ import annotations

import os
import re
import select
import sys
import threading
from typing import Any

from ..errors import PREFIX, MgpuError

STDOUT, STDERR = 1, 2
# Open MPI up to version 4 writes its own messages to this descriptor instead of stderr; later ones ignore it.
OWN_DESCRIPTOR = 'OPAL_OUTPUT_STDERR_FD'
RULE = b'-' * 20  # Open MPI prints lines of dashes around its own messages
PART = re.compile(br'-{20}(?:.*\n)+?-{20}.*\n|(?!-{20}).*\n')  # a message with these lines, or a line without
NOISE = (b'MPI_ABORT was invoked', b'Primary job  terminated normally', b'ORTE_ERROR_LOG')
SIGNAL = re.compile(br'process rank (\d+) [^-]*? exited\s+on\s+signal (\d+(?: \(\w+\))?)')  # in such a message
LOOK = 50  # milliseconds until a thread that gets nothing looks whether the job has ended
CAPACITY = 1 << 20  # at least the bytes that a pipe holds


class OutputError(MgpuError, RuntimeError):
    """The output of a job cannot be written."""


class OwnMessages:
    """mpirun's own messages, except for repetitions of a report of a rank.

    `internal` has single lines that were left out: the only reason there is, if nothing else was printed. Once another
    job runs, `job` is a name of this one: of its messages, only the signal that has ended a rank is shown.
    `unfinished` has bytes that are held back until more arrive.

    Examples
    --------
    >>> noise = b'-' * 74 + b'\\nMPI_ABORT was invoked on rank 1\\n' + b'-' * 74 + b'\\n'
    >>> OwnMessages().passed(noise + b'mpirun: Forwarding signal 10 to job\\n')
    b'mpirun: Forwarding signal 10 to job\\n'
    """

    def __init__(self) -> None:
        self.internal, self.job, self.unfinished = b'', '', b''

    def passed(self, data: bytes) -> bytes:
        """Return the bytes to print after `data` has arrived."""
        shown, end, data = [], 0, self.unfinished + data
        while match := PART.match(data, end):  # by its place: to cut off each part would copy the rest each time
            end = match.end()
            shown.append(self._shown(match[0]))
        self.unfinished = data[end:]
        return b''.join(shown)

    def _shown(self, part):
        is_message = part.startswith(RULE)
        if is_message and self.job:
            signal = SIGNAL.search(part)
            if signal is None:
                return b''
            return ('%snote: in %s, rank %s ended by signal %s\n'
                    % (PREFIX, self.job, *[text.decode() for text in signal.groups()])).encode()
        if is_message:
            return b'' if any(noise in part for noise in NOISE) else part
        if NOISE[-1] in part:
            self.internal += part
            return b''
        return part


class JobOutput:
    """Threads that copy the output of a launcher and its ranks to stdout and stderr, unless `is_held` is true.

    `failures` tells why stdout or stderr cannot be written any more, such as a pipe whose reader has ended. The
    descriptor is to be passed on to mpirun, for its own messages.
    """

    def __init__(self, is_held: bool) -> None:
        self.is_held, self.messages = is_held, OwnMessages()
        self._is_silent, self._has_ended = True, False
        self.failures: list[OSError] = []
        self._of_messages, self.descriptor = os.pipe()

    def copy(self, process: Any) -> None:
        """Start to copy the output of the launcher, a Popen with pipes."""
        for stream in (sys.stdout, sys.stderr):  # the own output of this process comes first
            stream.flush()
        os.close(self.descriptor)  # the launcher has it
        sources = ((process.stdout.fileno(), STDOUT, None), (process.stderr.fileno(), STDERR, None),
                   (self._of_messages, STDERR, self.messages))
        self._threads = [threading.Thread(target=self._copy, args=source, daemon=True) for source in sources]
        for thread in self._threads:
            thread.start()

    def finish(self, status: int, seconds: float | None = None) -> None:
        """Wait until all is written that the launcher, which has ended with this status, printed.

        The seconds limit the wait for a reader that reads nothing. Raises an OutputError if the output could not be
        written, as on a full disk; not if the reader of a pipe has ended.
        """
        self._has_ended = True
        for thread in self._threads:
            thread.join(seconds)
        os.close(self._of_messages)
        for error in self.failures:
            if not isinstance(error, BrokenPipeError):
                raise OutputError('the output of the job cannot be written: %s. The job was ended' % error)
        if status and self._is_silent and not self.failures:
            write_all(STDERR, self.messages.internal)

    def _copy(self, source, target, messages):
        poll, data, is_last = select.poll(), bytearray(), False
        poll.register(source, select.POLLIN)
        while not is_last:
            # All that the launcher printed is in the pipe then. What outlives it, as ssh's master, may go on writing.
            is_last = self._has_ended
            if poll.poll(LOOK):
                new = os.read(source, CAPACITY)
                data += messages.passed(new) if messages else new
                if not new:
                    poll.unregister(source)
                    is_last = is_last or not self.is_held
            if is_last and messages:
                data += messages.unfinished
            if not self.is_held:
                self._write(target, data)
                data = bytearray()

    def _write(self, target, data):
        if data and target == STDERR:
            self._is_silent = False
        try:
            write_all(target, data)
        except OSError as error:  # go on reading, so that the launcher can end
            self.failures.append(error)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    """Write bytes to a descriptor, also where another program that shares it has made it non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view):]
        except BlockingIOError:
            select.select([], [descriptor], [])
