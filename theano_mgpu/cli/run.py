"""`theano-mgpu run`: a Keras script, unchanged, over several contexts."""
import argparse
import atexit
import functools
import os
import sys

from .. import compat, config, launched
from ..context_map import describe
from ..contexts import init
from ..errors import MgpuError
from .config import positive
from .devices import context_map
from .output import note
from .program import add_program, check_program, run_module, run_script

EPILOG = """\
Every model that the script compiles trains, tests and predicts over the contexts: those of THEANO_FLAGS or
.theanorc, or of --contexts, or every GPU. The script needs no change, and sees what it would see under python:
its arguments, its standard input, its exit code; errors have their own traceback. A script that does not import
Keras is run as it is, and a line at exit says so.

Said once, and again in the summary (on stderr, at exit): a model that runs on one context, or elsewhere, and why.
Said once: a model for which one context is faster, measured on its first batches. With --strict each of these is an
error. With --verify the first batch of each model is trained on one device and on the contexts, and a table shows the
difference; the model is left as it was.

examples:
  theano-mgpu run train.py --epochs 5
  theano-mgpu run --gpus 4 train.py
  theano-mgpu run --contexts 'dev0->cuda0;dev1->cuda2' --verify train.py
  theano-mgpu run -m package.train --epochs 5
  theano-mgpu launch -n 2 run train.py      in two processes
"""


def add_parser(sub):
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('run', help='run a Keras script, unchanged, over several contexts', epilog=EPILOG,
                            usage='theano-mgpu run [options] SCRIPT|-m MODULE [ARGS]',
                            description='Run a script whose Keras models train and predict on several devices.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--gpus', type=positive, metavar='N', help='use the first N contexts (default: all); '
                       'without a GPU and a map, N contexts on the CPU')
    which.add_argument('--contexts', metavar='MAP', type=context_map,
                       help="contexts and their devices, e.g. 'dev0->cuda0;dev1->cuda1'")
    parser.add_argument('--strict', action='store_true', help='an error for what is else only said')
    parser.add_argument('--verify', action='store_true',
                        help='compare one device and several on the first batch of each model')
    parser.add_argument('-q', '--quiet', action='store_true', help='no summary at exit')
    add_program(parser, 'a Python script')
    parser.set_defaults(run=run)


def run(args):
    """Prepare the run; what is returned runs the script, outside of what `main` makes of errors."""
    check_program(args)
    if not args.module and not os.path.exists(args.script):
        args.parser.error("can't open file %r: no such file" % args.script)
    if args.verify and launched.trains_together():
        raise MgpuError('--verify compares one device with the contexts of one process: leave it out, or run without '
                        'launch')
    os.environ['KERAS_BACKEND'] = 'theano'
    flags = config.parse_flags(os.environ.get('THEANO_FLAGS', ''))
    if args.contexts:
        flags['contexts'] = describe(args.contexts)
        os.environ['THEANO_FLAGS'] = config.join_flags(flags)
    reports = []
    if not args.quiet:
        atexit.register(print_summary, reports, os.getpid())
    # Not before the script imports Keras: one that never does is to find no device open, and no Keras.
    compat.after_import('keras', lambda keras: reports.append(enable_in(keras, args, flags)))
    if args.module:
        return functools.partial(run_module, args.module[0], args.module[1:])
    return functools.partial(run_script, args.script, args.args)


def enable_in(keras, args, flags):
    """Have the models of the Keras that was just imported run over the contexts; `flags` is a dict from the start.

    Returns
    -------
    Report or None
        None for a Keras that is left alone.
    """
    if keras.backend.backend() != 'theano':
        note('this script uses Keras on %s: its models are left alone' % keras.backend.backend())
        return None
    take_flags(flags)
    try:
        init(describe(args.contexts) if args.contexts else args.gpus)
        from ..keras import enable
        # Not as warnings, which scripts tend to silence, and some turn into errors.
        return enable(strict=args.strict, verify=args.verify, tell=note)
    except MgpuError as error:
        print('theano-mgpu: error: %s' % error, file=sys.stderr)
        sys.exit(1)


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
    """Print what the models did, or that there were none; not in a process that was forked from the script's.

    Parameters
    ----------
    reports : list of (Report or None)
        One if Keras was imported.
    process : int
        The number of the script's.
    """
    if os.getpid() != process or sys.stderr is None or reports == [None]:
        return
    if reports and reports[0]:
        print('theano-mgpu: %s' % reports[0], file=sys.stderr)
    else:
        note('no Keras model ran: this command divides the work of Keras models, and leaves all else to the script')
