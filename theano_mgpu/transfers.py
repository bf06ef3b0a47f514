"""Arrays from the host to a device and back; on a ``cpu`` context nothing is copied."""
import numpy as np

from .contexts import gpu_context

SMALL = 1 << 15  # bytes of an array that is fetched together with others
TURNS = 2        # sets of buffers on a device: one is computed with while the next one is filled


class Sender:
    """Sends the arguments of one function to its device.

    Parameters
    ----------
    function : theano.compile.function_module.Function
        Compiled by `graph.compile_for`.
    """

    def __init__(self, function):
        self._context = function.mgpu_context
        self._takes = function.mgpu_takes
        self._buffers = [{} for _ in range(TURNS)]
        self._turn = 0
        self._flat = None

    @property
    def sends(self):
        """Whether anything is copied."""
        return any(self._takes)

    def send(self, arguments):
        """The arguments as the function takes them.

        Parameters
        ----------
        arguments : list of ndarray or pygpu.gpuarray.GpuArray
            Those that are on the device stay there, unless the function needs them on the host.

        Returns
        -------
        list of ndarray or pygpu.gpuarray.GpuArray
            Valid until the call after the next one, which uses the same memory.
        """
        if not self.sends:
            return arguments
        self._turn = (self._turn + 1) % TURNS
        return [self._on_device(i, value) if takes else fetch(value)
                for i, (value, takes) in enumerate(zip(arguments, self._takes))]

    def _on_device(self, i, value):
        if not isinstance(value, np.ndarray):
            return value
        from pygpu import gpuarray  # which nobody needs who has no GPU
        buffers = self._buffers[self._turn]
        found = buffers.get(i)
        if found is None or found.shape != value.shape:
            buffers[i] = found = gpuarray.array(value, dtype=value.dtype, order='C', context=gpu_context(self._context))
        else:
            found.write(np.ascontiguousarray(value))
        return found

    def send_flat(self, buffers, first=0):
        """Send arrays that are views of a few flat ones: one copy each, and views of that on the device.

        Parameters
        ----------
        buffers : FlatBuffers
        first : int
            The first view that is an argument; so are all that follow.

        Returns
        -------
        list of ndarray or pygpu.gpuarray.GpuArray
            Valid until the next call.
        """
        if not all(self._takes):
            return self.send(buffers.views[first:])
        if self._flat is None or self._flat.like != buffers.like:
            self._flat = FlatBuffers(buffers.like, self._context)
        for there, here in zip(self._flat.flat, buffers.flat):
            there.write(here)
        return self._flat.views[first:]


class FlatBuffers:
    """Arrays that are copied, or added over ranks, in one go: views of one flat array a dtype.

    Parameters
    ----------
    like : list of (shape, dtype)
        One a view, see `describe`.
    context : Context, optional
        Of a device; on the host by default.

    Attributes
    ----------
    flat : list of ndarray or pygpu.gpuarray.GpuArray
    views : list of ndarray or pygpu.gpuarray.GpuArray
        C-contiguous.
    """

    def __init__(self, like, context=None):
        self.like = like
        sizes, places = {}, []
        for shape, dtype in like:
            start = sizes.get(dtype, 0)
            sizes[dtype] = start + int(np.prod(shape, dtype='int64'))
            places.append((start, sizes[dtype]))
        flat = {dtype: _empty(size, dtype, context) for dtype, size in sizes.items()}
        self.flat = list(flat.values())
        self.views = [flat[dtype][start:stop].reshape(shape) for (shape, dtype), (start, stop) in zip(like, places)]


def _empty(size, dtype, context):
    if context is None or context.kind == 'cpu':
        return np.empty(size, dtype)
    from pygpu import gpuarray
    return gpuarray.empty((size,), dtype, context=gpu_context(context))


def describe(arrays):
    """Shapes and dtypes."""
    return [(tuple(array.shape), np.dtype(array.dtype)) for array in arrays]


class Fetcher:
    """Fetches arrays from one device, of the same shapes again and again.

    Small ones are put into one array on the device first, since each copy costs tens of microseconds, whatever its
    size; for large ones the further copy would cost more than it saves (`benchmarks/choices.py transfers`).

    Parameters
    ----------
    context : Context
    small : int
        Bytes of the largest array that counts as small.

    Attributes
    ----------
    flat : list of ndarray, or None
        The memory of all arrays that `fetch` has returned, one a dtype, if it put all of them together.
    """

    def __init__(self, context, small=SMALL):
        self._context, self._limit = context, small
        self._like = None
        self.flat = None

    def fetch(self, arrays):
        """The arrays on the host; valid until the next call.

        Parameters
        ----------
        arrays : list of ndarray or pygpu.gpuarray.GpuArray

        Returns
        -------
        list of ndarray
        """
        if self._context.kind == 'cpu':
            return arrays
        if self._like != describe(arrays):
            self._make_buffers(arrays)
        for i, view in zip(self._small, self._there.views):
            view[...] = arrays[i] if arrays[i].ndim else arrays[i].reshape((1,))  # pygpu indexes no scalars
        for there, here in zip(self._there.flat, self._here.flat):
            there.read(here)
        return [fetch(array, self._host[i]) if i in self._large else
                self._host.get(i, array) for i, array in enumerate(arrays)]

    def _make_buffers(self, arrays):
        self._like = describe(arrays)
        there = [i for i, array in enumerate(arrays) if not isinstance(array, np.ndarray)]
        small = [i for i in there if arrays[i].size * arrays[i].itemsize <= self._limit]
        self._small = small if len(small) > 1 else []
        self._large = set(there) - set(self._small)
        like = [self._like[i] for i in self._small]
        self._there = FlatBuffers([(shape or (1,), dtype) for shape, dtype in like], self._context)
        self._here = FlatBuffers(like)
        self._host = dict(zip(self._small, self._here.views))
        self._host.update((i, np.empty(*self._like[i])) for i in self._large)
        self.flat = self._here.flat if len(self._small) == len(arrays) else None


def wait(values):
    """Wait until a device has computed arrays; those on the host are there already."""
    for value in values:
        if not isinstance(value, np.ndarray):
            value.sync()


def fetch(value, out=None):
    """An array on the host: a device's array is read into `out` (C-contiguous) if given.

    Parameters
    ----------
    value : ndarray or pygpu.gpuarray.GpuArray
    out : ndarray, optional
        Of the value's shape and dtype.

    Returns
    -------
    ndarray
        `out`; without it, a host array is returned as it is.
    """
    if out is None:
        return np.asarray(value)
    if isinstance(value, np.ndarray) or not value.flags.c_contiguous:
        out[...] = np.asarray(value)
    else:
        value.read(out)
    return out
