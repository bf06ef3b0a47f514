"""`mgpu.Summary`: a writer of the reports of a training loop to a file for TensorBoard."""
from __future__ import annotations

import itertools
import os
import time
import weakref
from typing import Any, Sequence

import numpy as np

from ...errors import MgpuError
from .. import progress

FLUSH_SECONDS = 10
_POSITIVE = 1e-12 * 1.1 ** np.arange(776)
BUCKETS = np.concatenate([-_POSITIVE[::-1], [0], _POSITIVE])  # TensorFlow's buckets of histograms, up to 1.2e20

_numbers = itertools.count()  # numbers for the files of this process
_open: weakref.WeakSet[Any] = weakref.WeakSet()  # the writers of files
os.register_at_fork(before=lambda: [writer.flush() for writer in _open])  # a fork would write the same events again


class Summary:
    """A writer of scalars, histograms, images and graphs to a folder, for TensorBoard.

    With several processes only rank 0 writes. On other ranks every method does nothing, so that a script may call them
    on each rank. A context manager, which closes the file.

    Parameters
    ----------
    folder : str
        Or a path. It is made if it does not exist. Each Summary adds a file of its own; TensorBoard shows the files
        of a folder as one run.

    Raises
    ------
    MgpuError
        If tensorboardX is not installed.
    OSError
        If a file cannot be made, or written.

    Notes
    -----
    Names may have slashes: TensorBoard puts names with the same first part into one group. Other characters than
    letters, digits and ``-_./`` are replaced by ``_``.

    Examples
    --------
    ``with Summary('logs/run1') as summary: summary.scalar('loss', 0.5, step=1)``, then
    ``tensorboard --logdir logs``.
    """

    def __init__(self, folder: Any):
        self.folder = os.fspath(folder)
        self._closed, self._process = False, os.getpid()
        self._flushed = time.monotonic()
        self._file: Any = None  # on ranks that do not write
        if progress.is_first():
            # tensorboardX's SummaryWriter loses errors of the disk in its thread, and its flush() leaves events queued.
            events_writer = _events_writer()
            os.makedirs(self.folder, exist_ok=True)
            # The file's name has the time in whole seconds: a second file of that second would replace the first one.
            self._file = events_writer(os.path.join(self.folder, 'events'), '.%d.%d' % (os.getpid(), next(_numbers)))
            _open.add(self._file)

    def scalar(self, name: str, value: Any, step: int) -> None:
        """Write a number.

        Parameters
        ----------
        name : str
        value : float or ndarray
            One number.
        step : int
            Where it is drawn: a count of batches, samples or epochs.

        Raises
        ------
        MgpuError
            If it is not one number.
        """
        if self._writes():
            value = np.asarray(value)
            if value.size != 1:
                raise MgpuError('scalar %s: an array of shape %s was given; give one number, for example its mean, or '
                                'call histogram' % (name, value.shape))
            from tensorboardX import summary
            self._write(step, summary=summary.scalar(name, float(value.reshape(()))))

    def histogram(self, name: str, values: Any, step: int) -> None:
        """Write the distribution of values.

        Parameters
        ----------
        name : str
        values : array_like
            Of any shape; at least one, and all finite.
        step : int

        Raises
        ------
        MgpuError
            If there is no value, or one that is not finite.
        """
        if self._writes():
            values = np.asarray(values, 'float64')
            usable = np.abs(values) < BUCKETS[-1]
            if not values.size or not usable.all():
                raise MgpuError('histogram %s: %d of %d values are not a number, or not between -1e20 and 1e20; give '
                                'at least one value, and usable ones only, for example values[np.isfinite(values)]'
                                % (name, values.size - usable.sum(), values.size))
            from tensorboardX import summary
            self._write(step, summary=summary.histogram(name, values, BUCKETS))

    def image(self, name: str, array: np.ndarray, step: int, max_images: int = 6) -> None:
        """Write images, each under a name of its own: ``name/image/0``, ``name/image/1`` ...

        Parameters
        ----------
        name : str
        array : ndarray
            Shape (images, rows, columns) or (images, rows, columns, channels), with 1, 3 or 4 channels: grey, RGB,
            RGBA. Floats from 0 to 1; values outside are clipped, and any that is not a number is black. Or uint8.
        step : int
        max_images : int
            The number of images that are written; later ones are left out.

        Raises
        ------
        MgpuError
            If the array has another shape or dtype.
        """
        if self._writes():
            from tensorboardX import summary
            for i, image in enumerate(_pixels(name, np.asarray(array))[:max_images]):
                self._write(step, summary=summary.image('%s/image/%d' % (name, i), image, dataformats='HWC'))

    def graph(self, graph: Any, scopes: Sequence[tuple[str, Any]] = ()) -> None:
        """Write a Theano graph: its nodes with names, ops, dtypes, known shapes, and devices.

        Parameters
        ----------
        graph : theano.Variable, list of theano.Variable, or function
            Outputs of an expression; or what `theano.function`, `mgpu.function` or `mgpu.training_function` returned,
            which gives the optimised graph for each context.
        scopes : list of tuple
            Pairs of a str and a list of theano.Variable.
            Names of parts of an expression, with the outputs of each. TensorBoard draws a part as one box. A node is in
            the first part that needs it.
        """
        if self._writes():
            from .graph_def import graph_def
            self._write(0, graph_def=graph_def(graph, scopes).SerializeToString())

    def flush(self) -> None:
        """Write all events in memory to the file; any call does so ten seconds after the last time."""
        if self._writes():
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file; later calls of other methods are errors."""
        if self._file is not None and not self._closed:
            _open.discard(self._file)
            self._file.close()
        self._closed = True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _writes(self):
        if self._closed or os.getpid() != self._process:
            raise MgpuError('this Summary of the folder %s is %s: write within its with block, or make another one'
                            % (self.folder, 'closed' if self._closed else 'of the process %d' % self._process))
        return self._file is not None

    def _write(self, step, **content):
        from tensorboardX.proto.event_pb2 import Event
        self._file.write_event(Event(wall_time=time.time(), step=int(step), **content))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()


def _events_writer():
    try:
        from tensorboardX.event_file_writer import EventsWriter
    except ImportError as error:
        raise MgpuError("summaries for TensorBoard need tensorboardX, which cannot be imported (%s): "
                        "pip install 'theano_mgpu[tensorboard]', or pip install tensorboardX" % error) from error
    return EventsWriter


def _pixels(name, array):
    """Return images as uint8, of shape (images, rows, columns, channels)."""
    images = array[..., None] if array.ndim == 3 else array
    if images.ndim != 4 or images.shape[3] not in (1, 3, 4):
        raise MgpuError('image %s: an array of shape %s was given; give (images, rows, columns), or (images, rows, '
                        'columns, channels) with 1, 3 or 4 channels. np.moveaxis(array, 1, -1) moves the channels of '
                        'Theano to the end' % (name, array.shape))
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != 'f':
        raise MgpuError('image %s: an array of dtype %s was given; give floats from 0 to 1, or uint8'
                        % (name, array.dtype))
    return np.rint(np.clip(np.nan_to_num(images), 0, 1) * 255).astype('uint8')
