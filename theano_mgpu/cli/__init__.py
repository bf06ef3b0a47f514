"""The command line, ``theano-mgpu``: one module for each command.

A context is Theano's name for a device. THEANO_FLAGS or .theanorc map them:
  THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' theano-mgpu devices

examples:
  theano-mgpu                                show the devices here, and the next commands
  theano-mgpu devices                        list contexts and devices
  theano-mgpu doctor                         check the set-up, and print remedies
  theano-mgpu report                         measure this machine, in a file to send in
  theano-mgpu config -n 2 --write            use two devices from now on
  theano-mgpu flags                          list the package's flags, with their values
  theano-mgpu run train.py                   a Keras or Theano script, unchanged, on all devices
  theano-mgpu launch -n 2 run train.py       a Keras or Theano script in two processes
  theano-mgpu predict model.h5 x.npy y.npy   predict, from file to file
  theano-mgpu bench --model cnn              measure how a model scales
  theano-mgpu compare a.jsonl b.jsonl        where two runs part, by their ledgers
  theano-mgpu COMMAND --help                 more on a command
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import theano_mgpu

from ..compat import keras_names
from ..errors import MgpuError, MissingError, exit_code_of
from ..parsing import nearest
from ..utils import rank_process
from . import bench, compare, config, devices, doctor, flags, launch, overview, predict, report, run
from .output import add_command, tell

COMMANDS = (devices, doctor, report, config, flags, run, launch, predict, bench, compare)


def make_parser() -> argparse.ArgumentParser:
    """Build the argparse parser of all commands."""
    parser = argparse.ArgumentParser(
        prog='theano-mgpu', formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=str(__doc__).partition('\n\n')[2] + keras_names.about(),
        description='Run one Theano or Keras model on several devices: list them, check the set-up, configure it, run '
                    'a script,\nstart several processes, predict, measure how a model scales.')
    parser.add_argument('--version', action='version', version='theano-mgpu ' + theano_mgpu.__version__)
    sub = parser.add_subparsers(title='commands', metavar='COMMAND')
    for command in COMMANDS:
        add_command(sub, command)
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Parse arguments; a usage error names the nearest command or option for one that does not exist."""
    parser, names = make_parser(), [command.__name__.rpartition('.')[2] for command in COMMANDS]
    if words and words[0] not in names and not words[0].startswith('-'):
        parser.error('to run a script: theano-mgpu run ' + words[0] if os.path.exists(words[0]) else
                     'there is no command %s; %s' % (words[0], nearest(words[0], names)))
    args, unknown = parser.parse_known_args(words)
    option = next((word.partition('=')[0] for word in unknown if word.startswith('--')), None)
    if unknown:
        owner = args.parser if words[0] in names else parser
        owner.error('there is no option %s; %s' % (option, nearest(option, owner._option_string_actions)) if option else
                    'unrecognized arguments: ' + ' '.join(unknown))
    return args


def check_theano() -> None:
    """Import Theano, or raise the error that keeps it from being imported."""
    error = theano_mgpu.import_theano()
    if isinstance(error, MgpuError):
        raise error
    if error is not None:
        kind = MgpuError if 'configuration variable' in str(error) else MissingError  # a flag of the user's
        raise kind('Theano cannot be imported: %s. Run "theano-mgpu doctor"' % str(error).rstrip('.')) from error


def main(argv: list[str] | None = None) -> int:
    """Run the command line, by default of this process, and return the exit code.

    It is 0; 1 for a failure or a finding; 2 for bad input; 141 if the reader of the output has ended. Bad arguments
    exit with 2 (SystemExit).
    """
    streams = sys.stdin, sys.stdout, sys.stderr
    open_closed_streams()
    args = parse(sys.argv[1:] if argv is None else argv)
    code: Any = 0  # or a function that runs a script
    try:
        if not hasattr(args, 'run'):
            overview.show()
            return 0
        args.check(args)  # before Theano, whose import takes longer
        if not hasattr(args, 'works_without_theano') or getattr(args, 'old', None):  # `config --from` asks Theano
            check_theano()
        code = args.run(args)
        sys.stdout.flush()
    except MgpuError as error:
        sys.stdout.flush()
        tell('error: %s' % error)
        rank_process.end_all(exit_code_of(error))
        return exit_code_of(error)
    except OSError as error:
        # Python flushes stdout again when it exits, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has ended, e.g. `head`
            return 128 + signal.SIGPIPE
        tell('error: %s' % error)  # such as a full disk
        rank_process.end_all(1)
        return 1
    finally:
        if not callable(code):
            rank_process.note_joined()  # no script runs, which could exchange anything with other ranks
    if not callable(code):
        return code
    sys.stdin, sys.stdout, sys.stderr = streams  # a script's streams and errors are its own
    return code() or 0


def open_closed_streams() -> None:
    """Open the null device in place of stdin, stdout and stderr where they are closed, as by ``>&-`` of a shell.

    Else a file that is opened later would take the number of the stream, and all output would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, 'w')
    sys.stderr = sys.stderr or open(2, 'w')
