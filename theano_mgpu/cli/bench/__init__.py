"""`theano-mgpu bench`: measure how a model scales.

A model trains on synthetic data on 1, 2, 4 ... and all contexts (see "theano-mgpu devices"), and
with --ranks on 1, 2, 4 ... and N processes; if contexts are CPUs, plain Keras takes part, too. All take
turns, a few steps at a time; figures are medians of the rounds. The whole batch has the same size for
all, as in a script that changes only the number of devices. The phases of a step: scatter (divide the
batch) and host_to_device, launch (on GPUs) and run (until devices have computed), device_to_host
(gradients), all_reduce (add them), exchange (other values that all contexts need, and all values
between processes) and wait (for other processes), update and broadcast; other is the time of Python and
Keras. On GPUs a sentence says which batch size fits in their memory.

In a clone of the repository benchmarks/predict_scaling.py does the same, says what limits a step and from which batch
size on more devices pay, and predicts 2 to 1024 devices.

examples:
  theano-mgpu bench --model mlp
  theano-mgpu bench --model cnn --gpus 4 --batch-size 512
  theano-mgpu bench --model mlp --ranks 2 --json mlp.json
  theano-mgpu bench --model my_model.h5 --batch-size 64
  theano-mgpu bench --model resnet50 --input-shape 96 96 3 --batch-size 32
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import sys
from typing import Any, Callable, Sequence

import numpy as np

from ...comm.allocation import allocation
from ...devices import discovery
from ...devices.context_map import Context, describe
from ...devices.contexts import init
from ...errors import MgpuError
from ...utils import mpi_environment, processor, progress
from ...utils.files import check_folder, check_writable, whole_text
from ...utils.tables import bytes_text, counted, table
from ..job_command import check_mpi
from ..output import note, quietly
from ..shared_arguments import add_contexts, devices, positive, use_contexts
from .measure import StepTimes, Trainee, combined, numbers_to, start_ranks, take_turns
from .synthetic_models import MODELS, Recipe

CORES = len(processor.usable())  # cores that this process may use


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement to a parser."""
    add = parser.add_argument
    add('--model', default='cnn', metavar='NAME|FILE', help='%s, or a file written by keras.Model.save '
        '(default: %%(default)s)' % ', '.join(MODELS))
    add_contexts(parser)
    add('--ranks', type=devices, metavar='N', help='measure 1, 2, 4 ... and N processes, too; needs MPI')
    add('--batch-size', type=positive, metavar='B', help='samples in the whole batch (default: 16 to 128, by model)')
    add('--input-shape', type=positive, nargs='+', metavar='D',
        help="of a sample (default: the model's; vgg16 and resnet50 on CPUs: 64 64 3)")
    add('--optimizer', default='adam', help='for a model that is not compiled (default: %(default)s)')
    add('--rounds', type=positive, default=15, help='turns of each (default: %(default)s)')
    add('--steps', type=positive, metavar='S', help='steps in a turn (default: as many as take 0.08 s, at least 3)')
    add('--json', metavar='FILE', help='write all figures there')


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return the exit code, 130 after Ctrl-C."""
    recipe, contexts = prepare(args)
    setting = describe_setting(args, recipe, contexts)
    try:
        blocks, fits = measure_all(args, recipe, contexts)
    except KeyboardInterrupt:  # the started processes end by themselves
        note('interrupted')
        return 130
    rows = {title: row_of(each, blocks['1 context'], args.batch_size) for title, each in blocks.items()}
    print('\nmedians of %s in turns; speedup over 1 context with the same whole batch: the median of the ratios in '
          'each round\n%s' % (counted(args.rounds, 'round'), as_table(rows)))
    if fits:
        print('\n' + fits)
    if args.json:
        with whole_text(args.json) as file:
            json.dump(dict(setting, rows=rows, fits=fits), file, indent=1)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise a MgpuError for arguments that cannot work, before anything that takes time."""
    if mpi_environment.size() > 1:
        raise MgpuError('bench starts its own processes: run it without launch, with --ranks %d'
                        % mpi_environment.size())
    if args.model not in MODELS and not os.path.isfile(args.model):
        raise MgpuError('--model %s: there is no such file, and no model of that name; give a file written by '
                        'keras.Model.save, or one of %s' % (args.model, ', '.join(MODELS)))
    if args.json:
        check_folder(args.json)
        if os.path.exists(args.json) and os.path.exists(args.model) and os.path.samefile(args.json, args.model):
            raise MgpuError('%s is the model itself: choose another name' % args.json)
        try:
            check_writable(args.json)
        except OSError as error:
            raise MgpuError('--json: %s' % error.strerror) from error
    if args.ranks and allocation() is None:
        check_mpi()


def prepare(args: argparse.Namespace) -> tuple[Recipe, Sequence[Context]]:
    """Open the contexts, and set the size of the batch; return the recipe of the model, and the contexts."""
    os.environ['KERAS_BACKEND'] = 'theano'
    with quietly():
        use_contexts(args)
        contexts = init()
    on_cpu = any(discovery.type_of(context.device) == 'CPU' for context in contexts)  # also by OpenCL (PoCL)
    recipe = Recipe(args.model, args.input_shape, args.optimizer, gpu=not on_cpu)
    args.batch_size = args.batch_size or recipe.batch_size
    check_batch(args.batch_size, max(len(contexts), args.ranks or 1), recipe.input_shape)
    return recipe, contexts


def check_batch(batch_size: int, most: int, shape: Sequence[int] | None) -> None:
    """Raise a MgpuError for a batch with too few samples for `most` devices, or with too many for the memory here."""
    if batch_size < most:
        raise MgpuError('--batch-size %d: each of %d devices needs a sample; give %d or more'
                        % (batch_size, most, most))
    n_bytes, free = 8 * batch_size * math.prod(shape or ()), discovery.status('cpu', None).free_bytes
    if free is not None and n_bytes > free:
        raise MgpuError('--batch-size %d with samples of shape %s takes %s, and %s of memory are free: give less'
                        % (batch_size, tuple(shape or ()), bytes_text(n_bytes), bytes_text(free)))


def describe_setting(args: argparse.Namespace, recipe: Recipe, contexts: Sequence[Context]) -> dict[str, str]:
    """Print the machine, the versions, the model and the contexts; return the same for --json."""
    import keras
    import theano
    setting = dict(
        machine='%s, %s, load %.1f before the start' % (discovery.status('cpu', None).name, counted(CORES, 'core'),
                                                        os.getloadavg()[0]),
        versions='Python %s, NumPy %s, Theano %s, Keras %s' % (platform.python_version(), np.__version__,
                                                               theano.__version__, keras.__version__),
        model='%s on inputs of %s, batch %d, %s' % (recipe.name, recipe.input_shape or 'its own shape', args.batch_size,
                                                    theano.config.floatX),
        contexts=describe(contexts))
    print('\n'.join(map('%s: %s'.__mod__, setting.items())), flush=True)
    return setting


def measure_all(args: argparse.Namespace, recipe: Recipe, contexts: Sequence[Context]
                ) -> tuple[dict[str, list[StepTimes]], str]:
    """Measure plain Keras, contexts and ranks in turns; return the Blocks of each by its title, one a round.

    A sentence follows on the batches that fit in the memory of the devices, or nothing.
    """
    names, steps, fits = [context.name for context in contexts], args.steps, ''
    contestants: dict[str, Callable[[], StepTimes]] = {}
    for n in [0] * (contexts[0].kind == 'cpu') + numbers_to(len(names)):
        title = counted(n, 'context') if n else 'plain Keras'
        note('compiling for %s' % title)
        trainee = Trainee(recipe.replicate(names[:n]) if n else recipe.build(), recipe, args.batch_size)
        steps, fits = steps or trainee.steps_in_block(), trainee.fits
        contestants[title] = functools.partial(trainee.block, steps)
    with contextlib.ExitStack() as stack:
        for n in numbers_to(args.ranks or 0):
            note('starting %s' % counted(n, 'rank'))
            contestants[counted(n, 'rank')] = stack.enter_context(start_ranks(n, dict(
                model=recipe.name, input_shape=recipe.input_shape, optimizer=recipe.optimizer,
                batch_size=args.batch_size, steps=steps)))
        with progress.bar(args.rounds * len(contestants), sys.stderr.isatty()) as bar:
            return take_turns(contestants, args.rounds, bar), fits


def row_of(blocks: Sequence[StepTimes], of_one: Sequence[StepTimes], batch_size: int) -> dict[str, Any]:
    """Return the figures of one contestant; its speedup is the median of those within the rounds."""
    seconds, median = [block.seconds for block in blocks], combined(blocks, np.median)
    ratios = [one.seconds / each for one, each in zip(of_one, seconds)]
    return dict(samples_per_s=batch_size / median.seconds, seconds=median.seconds, lowest=min(seconds),
                highest=max(seconds), speedup=float(np.median(ratios)), phases=median.phases, rounds=seconds)


def as_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the figures as text: a column for each contestant, a line for each figure and each phase."""
    lines = [['', *rows], ['samples/s', *('{samples_per_s:,.0f}'.format(**row) for row in rows.values())],
             ['speedup', *('{speedup:.2f}'.format(**row) for row in rows.values())]]
    for title, name in ('ms a step', 'seconds'), ('lowest', 'lowest'), ('highest', 'highest'):
        lines.append([title, *('%.2f' % (1e3 * row[name]) for row in rows.values())])
    phases = [row['phases'] for row in rows.values()]
    for phase in max(phases, key=len):  # ranks have all phases of contexts, and more
        lines.append([phase, *('%.2f' % (1e3 * each[phase]) if phase in each else '-' for each in phases)])
    return table(lines, set(range(1, len(rows) + 1)))
