"""`theano-mgpu run`: a Keras or Theano script, unchanged, over several contexts."""
import argparse
import atexit
import functools
import os
import sys

from .. import config
from ..devices.context_map import describe
from ..devices.contexts import init
from ..enabling.functions import enable
from ..errors import MgpuError
from ..jobs import mpi_environment
from ..patches import import_hooks
from .config import positive
from .devices import context_map
from .output import note
from .program import add_program, check_program, run_module, run_script

EPILOG = """\
Every Keras model that the script compiles trains, tests and predicts over the contexts, and so does every
theano.function that a batch enters, where that is exact and faster. The contexts are those of THEANO_FLAGS or
.theanorc, or of --contexts, or every GPU. The script needs no change, and sees what it would see under python:
its arguments, its standard input, its exit code; errors have their own traceback.

The summary (on stderr, at exit) lists each model and each function: where it ran, how many samples, and why there.
A function is measured on its first calls, on one device and on the contexts, and goes on with what is faster;
--always divides it at once, so that each run rounds alike. Said once, too: a model or a function that cannot be
divided, and why; a model for which one context is faster. With --strict each of these is an error. With --verify
the first batch of each model and function is computed on one device and on the contexts, and a table shows the
difference; nothing is changed by it.

examples:
  theano-mgpu run train.py --epochs 5
  theano-mgpu run --gpus 4 train.py
  theano-mgpu run --contexts 'dev0->cuda0;dev1->cuda2' --verify train.py
  theano-mgpu run -m package.train --epochs 5
  theano-mgpu launch -n 2 run train.py      in two processes
"""


def add_parser(sub):
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('run', help='run a Keras or Theano script, unchanged, over several contexts', epilog=EPILOG,
                            usage='theano-mgpu run [options] SCRIPT|-m MODULE [ARGS]',
                            description='Run a script whose Keras models and Theano functions run on several devices.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--gpus', type=positive, metavar='N', help='use the first N contexts (default: all); '
                       'without a GPU and a map, N contexts on the CPU')
    which.add_argument('--contexts', metavar='MAP', type=context_map,
                       help="contexts and their devices, e.g. 'dev0->cuda0;dev1->cuda1'")
    parser.add_argument('--strict', action='store_true', help='an error for what is else only said')
    parser.add_argument('--verify', action='store_true',
                        help='compare one device and several on the first batch of each model and function')
    parser.add_argument('--always', action='store_true',
                        help='divide every function that can be, without measuring whether that is faster')
    parser.add_argument('-q', '--quiet', action='store_true', help='no summary at exit')
    add_program(parser, 'a Python script')
    parser.set_defaults(run=run)


def run(args):
    """Prepare the run; what is returned runs the script, outside of what `main` makes of errors."""
    check_program(args)
    if not args.module and not os.path.exists(args.script):
        args.parser.error("can't open file %r: no such file" % args.script)
    if args.verify and mpi_environment.trains_together():
        raise MgpuError('--verify compares one device with the contexts of one process: leave it out, or run without '
                        'launch')
    os.environ['KERAS_BACKEND'] = 'theano'
    flags = config.parse_flags(os.environ.get('THEANO_FLAGS', ''))
    if args.contexts:
        flags['contexts'] = describe(args.contexts)
        os.environ['THEANO_FLAGS'] = config.join_flags(flags)
    # Not before the script needs them: one that uses neither Theano nor Keras is to find no device open, and no Keras.
    opened = functools.lru_cache(None)(functools.partial(open_contexts, args, flags))
    reports = [enable(opened, args.strict, args.verify, args.always, note)]
    if not args.quiet:
        atexit.register(print_summary, reports, os.getpid())
    import_hooks.after_import('keras', lambda keras: reports.append(enable_in(keras, args, opened)))
    if args.module:
        return functools.partial(run_module, args.module[0], args.module[1:])
    return functools.partial(run_script, args.script, args.args)


def open_contexts(args, flags):
    """Open the contexts that options and flags name; `flags` is a dict from the start. An error ends the script."""
    take_flags(flags)
    try:
        return init(describe(args.contexts) if args.contexts else args.gpus)
    except MgpuError as error:
        print('theano-mgpu: error: %s' % error, file=sys.stderr)
        sys.exit(1)


def enable_in(keras, args, opened):
    """Have the models of the Keras that was just imported run over the contexts.

    Returns
    -------
    Report or None
        None for a Keras that is left alone.
    """
    if keras.backend.backend() != 'theano':
        note('this script uses Keras on %s: its models are left alone' % keras.backend.backend())
        return None
    opened()
    from ..keras import enable as enable_keras
    # Not as warnings, which scripts tend to silence, and some turn into errors.
    return enable_keras(strict=args.strict, verify=args.verify, tell=note)


def take_flags(before):
    """Take Theano's flags that the script has set in the environment, as scripts do before they import Keras.

    Theano runs already, so that some come too late; they are named. Flags that were given from outside, and that the
    script says nothing of, stay.
    """
    import theano
    own = config.parse_flags(os.environ.get('THEANO_FLAGS', ''))
    os.environ['THEANO_FLAGS'] = config.join_flags(dict(before, **own))
    late = []
    for name, value in own.items():
        if before.get(name) == value or name in ('contexts', 'floatX'):  # ours, and Keras's
            continue
        *sections, option = name.split('.')
        try:
            section = functools.reduce(getattr, sections, theano.config)
            getattr(section, option)  # there is such a flag
            setattr(section, option, value)
        except Exception as error:  # Theano raises plain ones
            late.append('%s=%s (%s)' % (name, value, error))
    if late:
        note('the script sets flags of Theano that come too late: %s. Set THEANO_FLAGS before theano-mgpu; devices are '
             'named by contexts' % '; '.join(late))


def print_summary(reports, process):
    """Print what models and functions did, or that there were none; not in a process forked from the script's.

    Parameters
    ----------
    reports : list of (Report, FunctionReport or None)
    process : int
        The number of the script's.
    """
    if os.getpid() != process or sys.stderr is None or None in reports:
        return
    found = [report for report in reversed(reports) if report]  # models first
    for report in found:
        print('theano-mgpu: %s' % report, file=sys.stderr)
    if not found:
        note('no Keras model ran, and no Theano function was made: all else is left to the script')
