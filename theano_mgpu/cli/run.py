"""`theano-mgpu run`: run a Keras or Theano script, unchanged, on several contexts.

Every Keras model that the script compiles trains, tests and predicts on the contexts, and so does every
theano.function that takes a batch, where the result is exact and it is faster. The contexts come from
--contexts, or from mgpu.init in the script, or from THEANO_FLAGS or .theanorc, or are every GPU, but for cards
that others use, or that are too small or too old; without one, every core of the CPU. The script needs no change.
Its arguments, its standard input, its exit code and its tracebacks are the same as under python. Options of run
stand before the script; the words behind it are its arguments.

The summary (on stderr, at exit) lists each model and each function: where it ran, for how many samples, and why.
The first calls of a function or model are measured, on one device and on the contexts; then it uses the faster of
the two, for each length of its batches. Processes compute for the cores of the CPU; the script runs once.
With --always all are divided from the first call; with mgpu.shares=equal, each run then rounds alike. A note names
each model or function that cannot be divided, and why. With --strict this is an error.
Functions whose calls take less than half a millisecond stay on one device. With --verify the first batch of each
model, and of each function that is divided, is computed on one device and on the contexts, and a table shows the
difference; the results stay the same. For functions, --strict and --verify are best used with --always.

Each process that the script starts, as multiprocessing, joblib and subprocess do, computes on one device: the
one that the fewest processes have. The summary counts their batches. With --one, so does the script itself:
several such runs, started by xargs, make or in terminals, share the devices of this machine.

examples:
  theano-mgpu run train.py --epochs 5
  theano-mgpu run --gpus 4 train.py
  theano-mgpu run --contexts 'dev0->cuda0;dev1->cuda2' --verify train.py
  theano-mgpu run -m package.train --epochs 5
  theano-mgpu run --one --wait train.py       on one device, when one is free
  theano-mgpu launch -n 2 run train.py        in two processes, each with half of the GPUs
"""
from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import random
import sys
from typing import Any, Callable

from .. import config
from ..compat import import_hooks, keras_names, keras_versions, old_flags
from ..devices import leases
from ..devices.context_map import Context, describe
from ..devices.contexts import OPTION, choose_contexts, chosen, configured, contexts, flagged
from ..errors import MgpuError, exit_code_of
from ..utils import mpi_environment, rank_process
from ..utils.files import whole_text
from ..utils.flag_text import environment_flags, own_flag, set_environment_flags
from ..utils.tables import table
from .output import note, tell
from .program import add_ledger, add_program, check_program, own_traceback, run_module, run_script
from .shared_arguments import add_contexts, devices

NO_PROCESSES = ('--processes is not needed: without a GPU, processes compute for the contexts. To have several run the '
                'script, use theano-mgpu launch -n 2 run SCRIPT')
ALL = 'all'  # of --explain-all
NO_PLAN = 'no function or model was divided, so there is no plan'
HINT = '--explain-all shows the instructions of a step, the memory, and the layers of each function'


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.usage = 'theano-mgpu run [options] SCRIPT|-m MODULE [ARGS]'
    parser.epilog = '%s%s' % (parser.epilog, keras_names.about())
    add_contexts(parser)
    parser.add_argument('--one', action='store_true', help='on one device: the one that the fewest processes have')
    parser.add_argument('--wait', action='store_true', help='with --one: wait until no process has this device')
    parser.add_argument('--strict', action='store_true', help='raise an error instead of printing a note')
    parser.add_argument('--verify', action='store_true',
                        help='compare one device and several on the first batch of each model and function')
    parser.add_argument('--always', action='store_true',
                        help='divide every model and function that can be divided, without measuring what is faster')
    parser.add_argument('-q', '--quiet', action='store_true',
                        help='no summary at exit, and no note if nothing is divided')
    parser.add_argument('--explain', action='store_true',
                        help='at exit, show how each function and model was divided, and why, and the time of each '
                        'layer of the longest function')
    parser.add_argument('--explain-all', dest='explain', action='store_const', const=ALL,
                        help='at exit, show each plan (instructions, exchanges, memory, and why), and the times of the '
                        'layers of each function')
    parser.add_argument('--processes', type=lambda text: None if text == 'auto' else devices(text), default=0,
                        help=argparse.SUPPRESS)  # of version 0.2
    parser.add_argument('--json', metavar='FILE', type=os.path.abspath, help='write the plans to a file, for programs')
    add_ledger(parser)
    add_program(parser, 'a Python script')


def run(args: argparse.Namespace) -> Callable[[], None]:
    """Prepare the run; return a function that runs the script, so that `main` does not handle the script's errors."""
    if args.processes != 0:
        note(NO_PROCESSES)
        if args.processes and not args.contexts and configured()[0].kind == 'cpu':
            args.contexts = args.processes
    from ..auto.enabling import enable  # imports Theano, which commands such as doctor do without
    from ..checks.ledger import use_ledger
    os.environ['KERAS_BACKEND'] = 'theano'
    draw_alike()
    if args.ledger:
        set_environment_flags({**environment_flags(), 'mgpu.ledger': args.ledger})
        use_ledger(args.ledger)
    flags = environment_flags()
    if isinstance(args.contexts, str):
        flags['contexts'] = args.contexts
        set_environment_flags(flags)
    elif args.contexts and flagged():
        choose_contexts(args.contexts, OPTION)  # an error now
    leases.begin_run(args.one, args.wait, gpus=args.contexts, strict=args.strict, always=args.always)
    # Devices are opened when the script first needs them. It may choose others later; forks have contexts of their own.
    opened, process = functools.lru_cache(None)(functools.partial(open_contexts, args)), os.getpid()
    # Notes instead of warnings: scripts often silence warnings, and some turn them into errors.
    enable(lambda: (opened if os.getpid() == process else contexts)() and contexts(),
           args.strict, args.verify, args.always, note)
    if args.explain or args.json:
        from ..graph.patches import time_layers
        from ..plan.record import record
        time_layers()
        at_exit(explain, record(), args)
    if not args.quiet:
        at_exit(print_summary)
    import_hooks.at_next_import('theano', lambda: take_flags(flags))
    if args.module:
        return functools.partial(run_module, args.module[0], args.module[1:])
    return functools.partial(run_script, args.script, args.args)


def begin_child() -> None:
    """Have a process that the script has started run its functions and models on one device."""
    if leases.options():  # else a rank without `run` has started it
        from ..auto.enabling import enable
        enable(contexts, leases.options()['strict'], always=leases.options()['always'], tell=note)


def at_exit(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function at the exit of this process, but not of processes that the script forks."""
    process = os.getpid()
    atexit.register(lambda: function(*arguments) if os.getpid() == process else None)


def draw_alike() -> None:
    """Seed the processes of a job alike, for a script that sets no seed, unless each process has its own data."""
    seed = os.environ.get(mpi_environment.SEED)
    if seed is not None and mpi_environment.trains_together() and own_flag('mgpu.data') != 'sharded':
        import numpy as np
        random.seed(int(seed))
        np.random.seed(int(seed))


def check(args: argparse.Namespace) -> None:
    """End with a usage error unless there is a script or a module to run, with flags that can be together."""
    check_program(args)
    if not args.module and not os.path.exists(args.script):
        args.parser.error("can't open file %r: no such file" % args.script)
    config.check_together()
    if args.wait and not args.one:
        args.parser.error('--wait goes with --one')
    if args.one and mpi_environment.trains_together():
        args.parser.error('--one is for a script in one process')
    if args.verify and mpi_environment.trains_together():
        raise MgpuError('--verify compares one device with the contexts of one process: leave it out, or run without '
                        'launch')


def open_contexts(args: argparse.Namespace) -> list[Context]:
    """Return the contexts that the script has chosen, or else open the ones of options and flags; an error ends it."""
    from ..auto.enabling import NOTHING_DIVIDED  # imports Theano, see `run`
    from ..auto.functions import has_one_cpu
    try:
        opened = contexts()
    except MgpuError as error:
        tell('error: %s' % error)
        rank_process.end_all(exit_code_of(error))
        sys.exit(exit_code_of(error))
    if args.one:  # processes that the script starts from now on share its device
        set_environment_flags({**environment_flags(), 'contexts': describe(opened)})
    elif has_one_cpu(opened) and not (args.quiet or args.contexts):
        note(NOTHING_DIVIDED)
    return opened


def take_flags(before: dict[str, str]) -> None:
    """Apply the flags that the script has set in THEANO_FLAGS, as many scripts do before they import Theano or Keras.

    Theano has been imported already, so some of them come too late; a note names these. Flags from outside (`before`)
    that the script does not set keep their values.
    """
    import theano
    own, said = old_flags.today(environment_flags())
    note(said)
    set_environment_flags(dict(before, **own))
    late = []
    for name, value in own.items():
        *sections, option = name.split('.')
        try:
            section: Any = functools.reduce(getattr, sections, theano.config)
            if before.get(name) == value or name == 'contexts' or str(getattr(section, option)) == value:
                continue
            if name == 'gpuarray.preallocate':  # which is read when a context is opened
                type(theano.config.gpuarray).preallocate.allow_override = True
            setattr(section, option, value)
        except Exception as error:  # Theano raises many kinds
            late.append('%s=%s (%s)' % (name, value, error))
    if late:
        note('the script sets Theano flags too late: %s. Set THEANO_FLAGS before theano-mgpu starts; devices are named '
             'by the flag contexts' % '; '.join(late))


def has_failed() -> bool:
    """Return whether the script has ended with an error, or an exit code, of its own, which are to be seen last."""
    return isinstance(own_traceback.end, (Exception, SystemExit))


def print_summary() -> None:
    """Print the reports of functions and models, also of an `enable` of the script's own, or that there were none.

    A script that has failed ends with its error. One that has chosen contexts uses this package itself.
    """
    if has_failed():
        return
    from ..auto.enabled import Enabled  # imports Theano, see `run`
    from ..auto.report import reports
    from ..plan.record import changes
    texts = [report.without_notes() for report in reports if report.usages]
    texts += ['in the course of the run: %s' % each for each in changes]  # notes, as they arose
    texts += filter(None, [children()])
    for text in texts:
        tell(text)
    is_foreign = 'keras' in sys.modules and keras_versions.backend() != 'theano'
    if not (texts or chosen() or own_traceback.end or is_foreign) and Enabled.in_force:
        note('no Keras model ran, and no Theano function was compiled: nothing was divided')
    elif Enabled.in_force and Enabled.in_force.verifies and not Enabled.in_force.compares:
        note('--verify has compared nothing, since no batch was divided by enable(): try --always; of a model of the '
             "script's own multi_gpu_model, theano_mgpu.keras.verify compares a batch")


def children() -> str:
    """Return a table of the devices of the processes that the script has started; '' if none has used one."""
    rows: dict[str, list[int]] = {}
    for lease in leases.work():
        device = describe([Context(*each) for each in lease.contexts])
        rows[device] = [sum(pair) for pair in zip(rows.get(device, [0, 0, 0]), lease.numbers)]
    lines = [[device, *map('{:,}'.format, rows[device])] for device in sorted(rows)]
    return rows and 'processes that the script started:\n' + table(
        [['DEVICE', 'PROCESSES', 'BATCHES', 'SAMPLES'], *lines], right={1, 2, 3}) or ''


def explain(recorded: list[Any], args: argparse.Namespace) -> None:
    """Show the plans that were recorded, or write them to a file; only rank 0 does."""
    if mpi_environment.rank() > 0:
        return
    from ..graph.layers import tables
    from ..plan.explain import as_text, explanation, in_brief  # imports Theano, which the command itself does without
    from ..plan.largest_batch import estimated
    explanations = [explanation(each.plan, each.changes(), estimated(each.plan, each.meter))
                    for each in recorded]
    if args.json:
        try:
            with whole_text(args.json) as file:
                json.dump(explanations, file, indent=1)
        except OSError as error:
            raise MgpuError('--json %s cannot be written: %s' % (args.json, error.strerror)) from error
    if args.explain and sys.stderr is not None and not has_failed():
        is_all = args.explain == ALL
        texts = list(map(as_text, explanations)) if is_all else [in_brief(explanations)] * bool(explanations)
        times = tables((each.plan.name, each.exchange_seconds()) for each in recorded)
        for text in [*(texts or [NO_PLAN]), *(times if is_all else [*times[:1], HINT])]:
            print('\n' + text, file=sys.stderr)
