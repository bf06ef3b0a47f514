"""The notice that a process is to end: a scheduler sends it before it takes the machine away.

SIGTERM, and SIGUSR1 where Slurm's option --signal asks for it, end a process at once. With a checkpoint they end it
when the call that runs has ended, and the checkpoint is written. Each handshake tells the ranks whether one of them has
got a signal: so all end after the same call.
"""
from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

from ..utils import mpi_environment, rank_process

NUMBERS = signal.SIGTERM, signal.SIGUSR1
IDLE = 20.0  # seconds without a call after which the process ends all the same
AGAIN = 3.0  # seconds in which others may send the same signal again: a launcher, and what sends it to all processes


class Notices:
    """The signals that this process has got since some checkpoint began to watch for them."""

    def __init__(self) -> None:
        self.received, self.running = 0, 0  # the number of the first one; calls that run
        self._watching, self._process, self._first = 0, 0, 0.0

    def watch(self) -> None:
        """Have signals wait for the end of a call, unless the script handles them; only the main thread can do so."""
        self._watching += 1
        if self._watching == 1 and threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in NUMBERS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._receive)

    def leave(self) -> None:
        """End what `watch` began; a signal that has come ends the process."""
        self._watching -= 1
        if self._watching == 0 and os.getpid() == self._process:
            if self.received:
                end_by(self.received)
            if threading.current_thread() is threading.main_thread():
                for number in NUMBERS:
                    if signal.getsignal(number) == self._receive:
                        signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a fork, such as a worker that its pool ends
            end_by(number)
        if self.received:
            if time.monotonic() > self._first + AGAIN:
                end_by(number)
            return
        self.received, self._first = number, time.monotonic()
        # Not a Thread: the code that this handler interrupts may hold one of the locks of `threading`.
        _thread.start_new_thread(self._end_if_idle, (number,))

    def _end_if_idle(self, number):
        name, idle = signal.Signals(number).name, time.monotonic()
        rank_process.note('%s: the process ends, with a checkpoint, once the call that runs has ended; after %.0f s, '
                          'another one ends it at once' % (name, AGAIN))
        while time.monotonic() < idle + IDLE:
            time.sleep(IDLE / 100)
            if self.running:
                idle = time.monotonic()
        end_by(number)


notices = Notices()


def end_by(number: int) -> None:
    """End this process by a signal, from any thread, as if no handler were there."""
    for stream in sys.stdout, sys.stderr:
        try:
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):  # closed, or this code interrupts its writer
            continue
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
    time.sleep(IDLE)  # the signal is on its way


def end(number: int, checkpoint: str) -> None:
    """End this process once its checkpoint, which a text describes, is written; no launcher starts it again."""
    rank_process.note('%s: the process ends by %s' % (checkpoint, signal.Signals(number).name))
    rank_process.report(mpi_environment.END)
    end_by(number)
