"""`theano-mgpu predict`: a Keras model's outputs for the samples in a file."""
import argparse
import os
import sys
import time

import numpy as np

from ..errors import MgpuError, PredictionError
from ..jobs import mpi_environment
from ..utils import progress
from .array_input import KINDS, kind_of, open_inputs
from .array_output import UnfinishedOutput
from .config import positive
from .output import note, quietly

EPILOG = """\
Input and output are .npy files, or .npz or .h5 files: their arrays are named like the model's inputs and outputs.
A model with several inputs or outputs needs these names. Files are read and written batch by batch, so their size does
not matter.

The output file appears when it is complete, and then replaces an existing file of that name. Until then its rows are
in the folder OUTPUT.unfinished: after a kill or an error the same command resumes there.

Batches go to all contexts of THEANO_FLAGS or .theanorc (see "theano-mgpu devices"); the first free
context takes the next one.

examples:
  theano-mgpu predict model.h5 images.npy classes.npy
  theano-mgpu predict model.h5 images.npy classes.npy --gpus 2 --batch-size 256
  theano-mgpu predict model.h5 pairs.npz answers.h5 --gpus dev0,dev2
  theano-mgpu launch -n 4 "$(command -v theano-mgpu)" predict model.h5 images.npy classes.npy
"""


def add_parser(sub):
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('predict', help="a Keras model's outputs for the samples in a file", epilog=EPILOG,
                            description='Predict with a Keras model, over all contexts, from file to file.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', help='a file that keras.Model.save wrote')
    parser.add_argument('input', help='samples: %s' % ', '.join(KINDS))
    parser.add_argument('output', help='file for the outputs: %s' % ', '.join(KINDS))
    parser.add_argument('--batch-size', type=positive, default=32, metavar='N',
                        help='samples that a replica works on at a time (default: %(default)s)')
    parser.add_argument('--gpus', type=gpus, metavar='N|A,B', help='how many contexts, or the names or numbers of '
                        'those to use (default: all)')
    parser.add_argument('--replicas-per-gpu', type=positive, default=1, metavar='K',
                        help='copies of the model on each (default: %(default)s)')
    parser.add_argument('--quiet', action='store_true', help='no progress bar, and no summary')
    parser.set_defaults(run=run)


def gpus(text):
    """The argument of --gpus: a number, or a list of numbers and names.

    Examples
    --------
    >>> gpus('2'), gpus('0,3'), gpus('dev1,dev0'), gpus('dev1')
    (2, [0, 3], ['dev1', 'dev0'], ['dev1'])
    """
    if text.isdecimal():
        return int(text)
    return [int(part) if part.isdecimal() else part for part in text.split(',')]


def run(args):
    """Predict; return the exit code, 130 after Ctrl-C."""
    check_paths(args)
    began = time.monotonic()
    with quietly():
        model, predictor = load(args)
    with predictor:
        if mpi_environment.trains_together() and mpi_environment.rank():
            list(predictor.map(()))  # computes the batches that rank 0 dispatches
            return 0
        with open_inputs(args.input, model.input_names) as inputs, \
                UnfinishedOutput(args.output, model.output_names, inputs[0].shape[0], job_of(args)) as output:
            first = output.rows
            if first:
                note('%s: resuming after %d of %d samples' % (args.output, first, output.length))
            if os.path.exists(args.output) and not args.quiet:
                note('%s exists: it will be replaced when all samples are done' % args.output)
            try:
                compute(predictor, inputs, output, args)
            except PredictionError as error:
                start = first + error.index * args.batch_size
                raise MgpuError('samples %d to %d: %s. %s' % (start, min(start + args.batch_size, output.length) - 1,
                                                              error, output.state())) from error
            except OSError as error:
                raise MgpuError('%s. %s' % (error, output.state())) from error
            except KeyboardInterrupt:
                note('interrupted. ' + output.state())
                return 130
            if not args.quiet:
                seconds = time.monotonic() - began
                note('%s: %d samples, %d of them computed now, in %.1f s including the loading of the model'
                     % (args.output, output.length, output.length - first, seconds))
    return 0


def compute(predictor, inputs, output, args):
    """Compute and write the remaining rows, and finish the file."""
    if output.length == 0:
        output.append(no_rows(predictor.model))
    # Arrays within an .npz file may not be aligned as Theano's C code requires: those are copied.
    batches = ([np.require(array[start:min(start + args.batch_size, output.length)], requirements='A')
                for array in inputs] for start in range(output.rows, output.length, args.batch_size))
    with progress.bar(output.length, sys.stderr.isatty() and not args.quiet, initial=output.rows) as bar:
        for outputs in predictor.map(batches):
            outputs = outputs if isinstance(outputs, list) else [outputs]
            output.append(outputs)
            bar.update(len(outputs[0]))
    output.finish()


def no_rows(model):
    """The outputs for no samples."""
    shapes = [tensor._keras_shape for tensor in model.outputs]
    return [np.empty((0,) + tuple(size or 0 for size in shape[1:]), tensor.dtype)
            for shape, tensor in zip(shapes, model.outputs)]


def check_paths(args):
    """Raise a MgpuError for files that cannot be used, before anything that takes time."""
    kind_of(args.input, 'input')
    kind_of(args.output, 'output')
    for path in (args.model, args.input):
        if not os.path.isfile(path):
            raise MgpuError('there is no file %s' % path)
        if os.path.realpath(path) == os.path.realpath(args.output):
            raise MgpuError('the output %s is the input or the model itself: choose another name' % args.output)
    folder = os.path.dirname(os.path.abspath(args.output))
    if not os.access(folder, os.W_OK):
        raise MgpuError('the output %s cannot be written: there is no folder %s, or no permission to write there'
                        % (args.output, folder))


def load(args):
    """The model and its Predictor."""
    os.environ['KERAS_BACKEND'] = 'theano'
    import keras

    from ..keras import Predictor
    try:
        model = keras.models.load_model(args.model, compile=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise MgpuError('Keras cannot load the model %s: %s: %s. If the model has custom layers, load it in a script '
                        'and use theano_mgpu.keras.Predictor(model)'
                        % (args.model, type(error).__name__, error)) from error
    if len(model.outputs) > 1 and args.output.endswith('.npy'):
        raise MgpuError('%s is one array, but the model has the outputs %s: give a name that ends with .npz or .h5'
                        % (args.output, ', '.join(model.output_names)))
    try:
        return model, Predictor(model, args.gpus, args.replicas_per_gpu)
    except ValueError as error:
        raise MgpuError(str(error)) from error


def job_of(args):
    """What the output depends on: a changed model or input makes a new job."""
    return {'model': identity(args.model), 'input': identity(args.input)}


def identity(path):
    """Size and modification time of a file, which change with its content."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
