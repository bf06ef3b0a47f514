"""Runs of a script or a module in this process, as ``python SCRIPT`` and ``python -m MODULE`` do them."""
from __future__ import annotations

import argparse
import importlib.machinery
import os
import runpy
import sys
import traceback
import types
import warnings
import zipfile
from contextlib import AbstractContextManager
from typing import Any

from ..errors import PACKAGE, PREFIX, MgpuError
from ..utils import rank_process
from ..utils.flag_text import OWN_FLAGS
from ..utils.python2 import hint


def add_program(parser: argparse.ArgumentParser, script_help: str) -> None:
    """Add ``SCRIPT|-m MODULE [ARGS]`` to a command's parser: `module`, a list, or `script` and `args`."""
    parser.add_argument('-m', dest='module', nargs=argparse.REMAINDER, metavar='MODULE [ARGS]',
                        help='run a module, as python -m does')
    parser.add_argument('script', nargs='?', metavar='SCRIPT', help=script_help)
    parser.add_argument('args', nargs=argparse.REMAINDER, metavar='ARGS', help='its arguments')


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--ledger``, the absolute path of a file."""
    parser.add_argument('--ledger', metavar='FILE', type=os.path.abspath,
                        help='write digests of weights and state every %d steps (flag mgpu.ledger_every), for '
                        '"theano-mgpu compare"' % OWN_FLAGS['mgpu.ledger_every'][0])


def check_program(args: argparse.Namespace) -> None:
    """End with a usage error unless a script or a module was given."""
    if args.module is not None and not args.module:
        args.parser.error('-m needs the name of a module')
    if args.module is None and args.script is None:
        args.parser.error('give the path of a Python script, then its arguments; or -m MODULE')


def check_syntax(path: str) -> None:
    """Print the error of a script that Python cannot parse, and end: each process would end with it."""
    source = os.path.join(path, '__main__.py') if os.path.isdir(path) else path
    if zipfile.is_zipfile(path) or not os.access(source, os.R_OK):
        return
    try:
        with open(source, 'rb') as file, warnings.catch_warnings():
            warnings.simplefilter('ignore')  # the script's own run shows them
            compile(file.read(), source, 'exec', dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        lines = [''.join(traceback.format_exception_only(type(error), error)).rstrip(), hint(error)]
        raise SystemExit(('\n' + PREFIX).join(filter(None, lines))) from None


def run_script(path: str, args: list[str]) -> None:
    """Run a script as ``python path args`` does: a file, or a directory or zip file with a ``__main__.py``."""
    sys.argv[:] = [path] + args
    main = new_main()
    file = path if sys.version_info < (3, 9) else os.path.abspath(path)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        set_first_path(file, always=True)
        with own_traceback():
            runpy._run_module_as_main('__main__', alter_argv=False)  # type: ignore[attr-defined]  # as python does
        return
    set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader('__main__', file)
    main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    with own_traceback():
        with open(path, 'rb') as f:
            code = compile(f.read(), file, 'exec', dont_inherit=True)
        exec(code, main.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as ``python -m name args`` does."""
    sys.argv[:] = ['-m'] + args
    new_main()
    set_first_path(os.getcwd())
    with own_traceback():
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def new_main() -> types.ModuleType:
    """Make a new module ``__main__``, as in a new interpreter."""
    main = types.ModuleType('__main__')
    main.__dict__.update(__builtins__=sys.modules['builtins'], __annotations__={})
    sys.modules['__main__'] = main
    return main


def set_first_path(folder: str, always: bool = False) -> None:
    """Set the first entry of sys.path as Python does for a script; with its option -P, only if `always`."""
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


class own_traceback(AbstractContextManager):
    """A context manager: exceptions that leave it are shown by the current sys.excepthook, without frames of ours.

    The exception itself is not caught: Python also sets the exit code, and sends a signal after a KeyboardInterrupt.
    """

    end: BaseException | None = None  # the exception with which the script has ended, but for an exit with code 0

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        own_traceback.end = error if getattr(error, 'code', 1) not in (None, 0) else None
        if error is None or isinstance(error, SystemExit):
            return
        hook = sys.excepthook

        def show(kind, error, traceback):
            hide_frames(error)
            hook(kind, error, error.__traceback__)
            rank_process.note_hints(error)  # also where the hook is the script's own
        sys.excepthook = show


def hide_frames(error: BaseException | None) -> None:
    """Remove frames of this package from the tracebacks of an exception and of its causes.

    Frames below the script's stay where the error arose in this package's own code and is not a MgpuError.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        starts = [number for number, frame in enumerate(frames) if frame.tb_frame.f_code in STARTS]
        if starts:
            del frames[:starts[0] + 1]
        if frames and (not is_ours(frames[-1]) or isinstance(error, MgpuError)):
            frames = [frame for frame in frames if not is_ours(frame)]
        trace = None
        for frame in reversed(frames):
            trace = types.TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = trace
        error = error.__cause__ or error.__context__


def is_ours(trace: types.TracebackType) -> bool:
    """Return whether an entry of a traceback is a frame of this package."""
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


STARTS = (run_script.__code__, run_module.__code__)  # frames up to these are not part of the script's traceback
