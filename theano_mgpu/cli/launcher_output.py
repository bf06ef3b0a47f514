"""Filter the stderr of mpirun or srun: drop messages that repeat what a rank has reported already."""
import os
import re
import sys

from ..jobs import mpi_environment

RULE = b'-' * 20  # Open MPI prints lines of dashes around its own messages
NOISE = (b'MPI_ABORT was invoked', b'Primary job  terminated normally', b'ORTE_ERROR_LOG')
# How Slurm ends the other tasks. It goes on after the time if there is a reason, such as DUE TO TIME LIMIT.
SLURM_NOISE = re.compile(
    rb'srun: (Job step aborted: Waiting|launch/slurm: _step_signal: Terminating|Force Terminated|forcing job term)|'
    rb'slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*')


class Filter:
    """Passes bytes on as they arrive, except for messages of Open MPI and Slurm that add no information.

    Attributes
    ----------
    stepped : bool
        Whether rank 0 has reported a step.
    internal : bytes
        Single lines that were dropped: the only reason there is, if nothing else was passed on.
    any_passed : bool

    Examples
    --------
    >>> noise = b'-' * 74 + b'\\nMPI_ABORT was invoked on rank 1\\n' + b'-' * 74 + b'\\n'
    >>> Filter().passed(b'rank 1 failed\\n' + noise + b'no line end')
    b'rank 1 failed\\nno line end'
    """

    def __init__(self):
        self.stepped = self.any_passed = False
        self.internal = b''
        self._tail = b''     # possibly the beginning of that report
        self._pending = b''  # possibly the beginning of a line of dashes
        self._block = None   # lines of an unfinished message

    def passed(self, data, last=False):
        """The bytes to print after `data` has arrived; with `last`, including all that were held back."""
        lines = (self._pending + self._less_report(data, last)).splitlines(keepends=True)
        self._pending = b''
        if lines and not lines[-1].endswith((b'\n', b'\r')) and not last \
                and (self._block is not None or RULE.startswith(lines[-1][:len(RULE)])):
            self._pending = lines.pop()
        shown = b''.join(map(self._line, lines))
        if last and self._block is not None:
            shown += b''.join(self._block)
        self.any_passed = self.any_passed or bool(shown)
        return shown

    def _less_report(self, data, last):
        data, self._tail = self._tail + data, b''
        self.stepped = self.stepped or mpi_environment.STEPPED in data
        data = data.replace(mpi_environment.STEPPED, b'')
        start = data.rfind(mpi_environment.STEPPED[:1])
        if start >= 0 and mpi_environment.STEPPED.startswith(data[start:]) and not last:
            data, self._tail = data[:start], data[start:]
        return data

    def _line(self, line):
        if line.startswith(RULE) and self._block is None:
            self._block = [line]
        elif self._block is not None:
            self._block.append(line)
            if line.startswith(RULE):
                block, self._block = b''.join(self._block), None
                return b'' if any(noise in block for noise in NOISE) else block
        elif NOISE[-1] in line or SLURM_NOISE.match(line):
            self.internal += line
        else:
            return line
        return b''


def forward(stream, messages):
    """Copy a pipe to stderr through a filter, until it ends.

    Parameters
    ----------
    stream : file
        The pipe; its descriptor is read.
    messages : Filter
    """
    while True:
        data = os.read(stream.fileno(), 1 << 16)
        sys.stderr.buffer.write(messages.passed(data, last=not data))
        sys.stderr.buffer.flush()
        if not data:
            return
