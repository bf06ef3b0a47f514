"""The attributes that this package sets on Theano's objects, and reads in other modules.

Of a `theano.function`:

- ``mgpu_divided``: the callable that takes the place of its call, and computes over contexts; None without one. It
  has a method ``copied(function, swap, delete_updates)``, which does the same for a copy.
- ``plain_call``: its call by Theano, with new values of shared variables noted; or, of several ranks, the callable
  that has rank 0's results count, with ``copied`` as above.
- ``unwatched_call``: Theano's own call, which notes nothing: of functions over copies of the package's own.
- ``mgpu_name``: its name for the user, such as in a summary.
- ``mgpu_seconds``: the time in which Theano has made it.
- ``mgpu_only_reads``: set where nobody writes to its borrowed outputs.

Of a function that the package has compiled for a context:

- ``mgpu_context``: the Context.
- ``mgpu_call``: the shortest way to call it, with values in the order of its inputs. On a CUDA device it is a
  `GraphCalls`.
- ``mgpu_takes``: for each input, whether it is taken on the device.
- ``mgpu_order``: the positions of its results among the outputs and the new values.
- ``mgpu_optimised``: its graph after Theano's optimiser, which `retarget` moves to another context; None if it cannot
  be moved.

Of other objects of Theano's:

- ``mgpu_place``: of the tag of a variable, the context that its op is placed on; None for one that has no place of
  its own.
- ``mgpu_pure``: of an op of the user's, that it gives the same results for the same inputs.
- ``mgpu_index``: of Theano's cache of compiled modules, its entries by their keys.
- ``mgpu_against_cudnn``, ``mgpu_tried_cudnn``: of a context of pygpu, why cuDNN cannot be used there, and whether
  that was tried.
- ``unwatched``: of the container of a shared variable, its value without the question whether a copy has a later one.
- ``tag.host_view``: of a shared variable on a GPU, a stand-in for graphs of the host; ``tag.stands_for`` of the
  stand-in is the variable.
- ``tag.private``: of a shared variable in place of a constant or of an expression of data sets, what keeps it up to
  date.
- ``tag.is_rng``, ``tag.target``, ``tag.trace``, ``tag.context_name``: Theano's own, for inputs and copies that it has
  not made.
"""
