"""The patches of this room: contexts of Theano, CUDA contexts of libgpuarray, and choices that devices share."""
from __future__ import annotations

import os
import re
import sys
from typing import Any

from ..compat import old_flags
from ..compat.patch import AFTER_THEANO, AS_FLAGS, BEFORE_THEANO, Patch, after
from ..errors import warn
from ..utils import command_line, mpi_environment
from . import chains, children, cuda_contexts, shared_variables, theano_contexts

WITH_CONTEXTS = 'after theano_mgpu.devices was imported'  # apply(open_context)
EACH_GPU = 'for each GPU context that is opened'          # apply(gpu_context)

COMMAND = command_line.own_command()  # which sys.argv does not show later
CHOOSES = re.search(r' --(contexts|gpus|processes)\b', ' '.join(sys.argv))
# theano-mgpu chooses contexts for itself, for processes that a script of `run` starts, and for the ranks of a job.
old_flags.contexts_are_chosen = lambda: \
    old_flags.FREE if COMMAND == 'run' and not CHOOSES and mpi_environment.size() == 1 else \
    COMMAND or mpi_environment.size() > 1 or mpi_environment.RUN in os.environ
ALGORITHMS = 'algo_fwd', 'algo_bwd_data', 'algo_bwd_filter'  # flags dnn.conv.*


def default_pocl_settings() -> None:
    """Choose two devices, no warnings, and a cache of kernels for each process, where the environment does not.

    PoCL shows one device by default, and prints "2 warnings generated." for kernels of pygpu.

    The processes of a job on one host build the same kernels at the same time. If they share a cache, one of them
    fails now and then with "clBuildProgram: Unknown error" (PoCL 3.1).
    """
    os.environ.setdefault('POCL_DEVICES', 'pthread pthread')
    os.environ.setdefault('POCL_EXTRA_BUILD_FLAGS', '-w')
    if mpi_environment.local_rank() > 0:
        cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
        folder = os.path.join(cache, 'pocl', 'kcache-rank%d' % mpi_environment.local_rank())
        os.environ.setdefault('POCL_CACHE_DIR', folder)


def choose_alike(gpu_context: Any) -> None:
    """Let several devices guess an algorithm, where a flag has each of them take the one that is fastest at the time.
    """
    from theano import config as theano_config
    from theano.gpuarray.type import list_contexts
    if gpu_context.kind != b'cuda' or len(list_contexts()) < 2 and mpi_environment.size() < 2:
        return
    for option in ALGORITHMS:
        value = getattr(theano_config.dnn.conv, option)
        if value.startswith('time_'):
            alike = value.replace('time_', 'guess_')
            setattr(theano_config.dnn.conv, option, alike)
            warn('dnn.conv.%s=%s would have each device choose by its own measurement, and devices would differ: %s is '
                 'used' % (option, value, alike))


PATCHES = [
    Patch('PoCL', '3.1', 'one device only; "2 warnings generated."; clBuildProgram: Unknown error, now and then',
          BEFORE_THEANO, default_pocl_settings, 'test_pocl_settings_of_the_user_are_left_alone'),
    Patch('Theano', '1.0.5', 'Theano opens the contexts, only logs errors, and loses the second name of a device',
          AS_FLAGS, theano_contexts.hide_contexts, 'test_theano_opens_no_context_by_itself'),
    Patch('Theano', '1.0.5', "theano.config.contexts is empty, since Theano is imported without the user's map",
          AFTER_THEANO, theano_contexts.show_contexts, 'test_theano_opens_no_context_by_itself'),
    Patch('Theano', '1.0.5 with device=cuda', 'each process of a job reserves memory of one device, beside its own',
          AS_FLAGS, theano_contexts.leave_default_device, 'test_processes_of_a_job_leave_the_default_device'),
    Patch('Theano', '1.0.5 with device=cuda', "child processes: You can't initialize the GPU in a subprocess",
          AFTER_THEANO, theano_contexts.let_children_open_gpus, 'test_a_child_process_opens_the_default_device'),
    Patch('Theano', '1.0.5', "shared(target='dev0'): no suitable constructor, as Theano was imported without contexts",
          WITH_CONTEXTS, theano_contexts.open_contexts_on_demand,
          'test_flags_alone_open_the_contexts_that_a_script_names'),
    Patch('Theano', '1.0.5', 'copies of a shared variable on other contexts become stale in silence',
          AFTER_THEANO, shared_variables.hook_shared_variables, 'test_without_the_hooks_values_are_stale'),
    Patch('Theano', '1.0.5', 'conv2d with filter_flip=True: Could not infer context from inputs',
          AFTER_THEANO, theano_contexts.infer_contexts_from_all_ancestors, 'test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'graphs without a default context: context name None not defined',
          AFTER_THEANO, theano_contexts.lift_graphs_to_named_contexts, 'test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'functions that draw random numbers log: Could not infer context from inputs',
          AFTER_THEANO, theano_contexts.keep_optimizers_from_host_nodes, 'test_a_plain_function_that_draws_is_quiet'),
    Patch('Theano', '1.0.5', 'replicas in threads write into the inner storage of one scan: wrong results',
          AFTER_THEANO, theano_contexts.give_each_thunk_its_inner_function,
          'test_replicas_in_threads_do_not_run_one_inner_function'),
    Patch('Python', 'all', 'os.wait() of a script waits for the processes of contexts, and finds them',
          BEFORE_THEANO, children.wait_for_others, 'test_parts_that_processes_compute'),
    Patch('PyMC3', '3.3 and later', 'a process of a chain has one device, also where there are more than chains',
          after('pymc3.parallel_sampling'), chains.share_devices, 'test_chains_share_all_devices'),
    Patch('libgpuarray', '0.7.0 to 0.7.6', 'two CUDA contexts: memory of the wrong device, CUDA_ERROR_INVALID_HANDLE',
          EACH_GPU, cuda_contexts.protect, 'test_a_kernel_that_is_made_twice_leaves_no_context_current'),
    Patch('libgpuarray', '0.7.0 to 0.7.6', 'with gpuarray.preallocate=-1, CUDA memory is never freed',
          EACH_GPU, cuda_contexts.free_within_context, 'test_freed_memory_is_given_back'),
    Patch('Theano', '1.0.5', 'devices that time algorithms of cuDNN choose different ones: replicas differ',
          EACH_GPU, choose_alike, 'test_several_devices_do_not_choose_by_time'),
]
