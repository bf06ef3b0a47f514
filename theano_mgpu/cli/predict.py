"""`theano-mgpu predict`: a Keras model's outputs for the samples in a file.

Input and output are .npy files, or .npz or .h5 files: their arrays are named like the model's inputs and outputs.
A model with several inputs or outputs needs these names. Files are read and written batch by batch, so their size does
not matter.

The output file appears when it is complete, and then replaces an existing file of that name. Until then its rows are
in the file OUTPUT.unfinished: after a kill or an error the same command resumes there.

The Keras that is installed, 1.0 to 2.3.1, loads the model. An error names the version that wrote a file which it cannot
load, and how to install that.

A model with Lambda layers has code of whoever wrote the file in it, and runs that when it is loaded. --safe refuses
such models, pickles, and models with classes that are not of Keras, before anything in them is run.

Each context computes another batch (see "theano-mgpu devices"). With launch, each process has a share of them.

examples:
  theano-mgpu predict model.h5 images.npy outputs.npy
  theano-mgpu predict model.h5 images.npy outputs.npy --gpus 2 --batch-size 256
  theano-mgpu predict model.h5 pairs.npz answers.h5 --gpus dev0,dev2
  theano-mgpu launch -n 4 predict model.h5 images.npy outputs.npy
"""
from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

from ..compat import keras_versions
from ..devices.context_map import brief, describe
from ..devices.contexts import host_contexts, init
from ..errors import MgpuError, PredictionError
from ..utils import mpi_environment, progress
from ..utils.tables import counted
from .array_input import KINDS, InputError, kind_of, open_inputs, reading
from .array_output import UnfinishedOutput, output_target, writing
from .model_file import load_model
from .output import note, quietly
from .shared_arguments import add_contexts, positive, use_contexts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('model', help='a file that keras.Model.save wrote, or a pickled model')
    parser.add_argument('input', help='samples: %s' % ', '.join(KINDS))
    parser.add_argument('output', help='file for the outputs: %s' % ', '.join(KINDS))
    parser.add_argument('--batch-size', type=positive, default=32, metavar='N',
                        help='samples that a device works on at a time (default: %(default)s)')
    add_contexts(parser)
    parser.add_argument('--replicas-per-gpu', type=positive, default=1, metavar='K',
                        help='deprecated, without effect')
    parser.add_argument('--safe', action='store_true', help='refuse a model that has code in its file (Lambda layers, '
                        'pickles), or custom classes')
    parser.add_argument('--quiet', action='store_true', help='no progress bar, and no summary')


def run(args: argparse.Namespace) -> int:
    """Predict; return the exit code, 130 after Ctrl-C."""
    began = time.monotonic()
    if args.replicas_per_gpu > 1:
        note('--replicas-per-gpu has no effect any more, since a device is sent the next batch while it computes. '
             'Leave it out: 0.4.0 removes it')
    with quietly():
        model, predictor = load(args)
    with predictor:
        if mpi_environment.trains_together() and mpi_environment.rank():
            list(predictor.map(()))  # computes the batches that rank 0 dispatches
            return 0
        job = {'model': identity(args.model), 'input': identity(args.input)}
        with open_inputs(args.input, model.input_names) as inputs, \
                UnfinishedOutput(args.output, model.output_names, inputs[0].shape[0], job) as output:
            check_shapes(model, inputs, output, args)
            first = output.rows
            if first:
                note('%s: resuming after %d of %d samples' % (args.output, first, output.length))
            if os.path.exists(args.output) and not args.quiet:
                note('%s exists: it will be replaced when all samples are done' % args.output)
            try:
                with writing(args.output, state=output.state):
                    compute(predictor, inputs, output, args)
            except PredictionError as error:
                raise failure(error, error.index, first, output, args) from error
            except InputError as error:
                raise MgpuError('%s. %s' % (error, output.state())) from error
            except KeyboardInterrupt:
                note('interrupted. ' + output.state())
                return 130
            if not args.quiet:
                note('%s: %s%s on %s%s (%s), in %.1f s with the loading of the model' % (
                    args.output, counted(output.length, 'sample'),
                    ', {:,} of them by an earlier call,'.format(first) if first else '',
                    counted(len(host_contexts()), 'context'), ' of this host' * mpi_environment.trains_together(),
                    brief(describe(host_contexts())), time.monotonic() - began))
    return 0


def compute(predictor: Any, inputs: list[Any], output: UnfinishedOutput, args: argparse.Namespace) -> None:
    """Compute and write the remaining rows, and finish the file."""
    if output.length == 0:
        output.append(no_rows(predictor.model))
    batches = (rows_of(inputs, start, min(start + args.batch_size, output.length), args.input)
               for start in range(output.rows, output.length, args.batch_size))
    with progress.bar(output.length, sys.stderr.isatty() and not args.quiet, initial=output.rows) as bar:
        for outputs in predictor.map(batches):
            outputs = outputs if isinstance(outputs, list) else [outputs]
            output.append(outputs)
            bar.update(len(outputs[0]))
    output.finish()


def check_shapes(model: Any, inputs: list[Any], output: UnfinishedOutput, args: argparse.Namespace) -> None:
    """Raise a MgpuError if the model does not take samples of these shapes, before any is read."""
    # Arrays of one sample, which takes no memory however large a damaged header says that it is.
    samples = [np.broadcast_to(np.zeros((), array.dtype), (1,) + tuple(array.shape[1:])) for array in inputs]
    try:
        keras_versions.standardize(model, samples)
    except ValueError as error:
        # Not the cause: the file is wrong, not the code.
        raise failure('batch 0 failed: ValueError: %s' % error, 0, 0, output, args) from None


def failure(text: object, batch: int, first: int, output: UnfinishedOutput, args: argparse.Namespace) -> MgpuError:
    """Return the MgpuError for a batch, counted from 0 after the first samples."""
    start = first + batch * args.batch_size
    last = min(start + args.batch_size, output.length) - 1
    return MgpuError('samples %d to %d: %s, in %s. %s'
                     % (start, last, ' '.join(str(text).split()), args.input, output.state()))


def rows_of(inputs: list[Any], start: int, stop: int, path: str) -> list[np.ndarray]:
    """Read a batch: a list of arrays as Theano's C code requires them, aligned and in the machine's order of bytes."""
    with reading(path, ' at samples %d to %d' % (start, stop - 1)):
        return [np.require(array[start:stop], array.dtype.newbyteorder('='), 'A') for array in inputs]


def no_rows(model: Any) -> list[np.ndarray]:
    """Return the outputs for no samples."""
    return [np.empty((0,) + tuple(size or 0 for size in tensor._keras_shape[1:]), tensor.dtype)
            for tensor in model.outputs]


def check(args: argparse.Namespace) -> None:
    """Raise a MgpuError for files that cannot be used, before anything that takes time."""
    if args.model.endswith(('.npy', '.npz')):
        raise MgpuError('%s has arrays, and no model. The order is MODEL INPUT OUTPUT' % args.model)
    kind_of(args.input, 'input')
    kind_of(args.output, 'output')
    target = output_target(args.output)
    for path in (args.model, args.input):
        if not os.path.isfile(path):
            raise MgpuError('%s is no file' % path if os.path.exists(path) else 'there is no file %s' % path)
        if not os.access(path, os.R_OK):
            raise MgpuError('no permission to read %s' % path)
        if os.path.exists(target) and os.path.samefile(path, target):
            raise MgpuError('the output %s is the input or the model itself: choose another name' % args.output)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its Predictor."""
    os.environ['KERAS_BACKEND'] = 'theano'
    use_contexts(args)
    init()
    from ..keras import Predictor
    model = keras_versions.inner(load_model(args.model, args.safe))
    if len(model.outputs) > 1 and args.output.endswith('.npy'):
        raise MgpuError('%s is one array, but the model has the outputs %s: give a name that ends with .npz or .h5'
                        % (args.output, ', '.join(model.output_names)))
    try:
        return model, Predictor(model)
    except ValueError as error:
        raise MgpuError(str(error)) from error


def identity(path: str) -> list[int]:
    """Return the size and modification time of a file, which change with its content."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
