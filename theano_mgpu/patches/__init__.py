"""Fixes and hooks in libraries that get no more releases."""
import os

from .import_hooks import after_import, before_import
from .keras_imports import default_keras_backend, keep_ragged_arrays
from .keras_loops import mend_keras_queues, mend_keras_slicing
from .keras_saving import mend_keras_saving
from .pocl import default_pocl_settings
from .pymc3 import add_modules_of_theano_pymc, index_by_tuples, spell_flags_as_theano_pymc
from .removed_names import restore_collections_abcs, restore_numpy_aliases
from .shared_variables import _wrap_accessors, _wrap_function_call
from .theano_cache import give_source_a_lasting_version, keep_code_of_ops_without_props
from .theano_gpu import cast_conv_shape, give_mrg_its_context
from .theano_imports import (
    IMPORTED,
    disable_scan_extension,
    name_what_replaced_old_gpu_code,
    restore_downsample,
)
from .theano_opencl import clear_before_gemv, spell_for_opencl


def install():
    """Apply the fixes that must come before Theano and Keras are imported."""
    restore_numpy_aliases()
    restore_collections_abcs()
    disable_scan_extension()
    default_keras_backend()
    default_pocl_settings()
    os.environ[IMPORTED] = '1'
    after_import('keras.engine.saving', mend_keras_saving)
    after_import('keras.engine.training_arrays', mend_keras_slicing)
    after_import('keras.utils.data_utils', mend_keras_queues)
    for name in ('keras.datasets.imdb', 'keras.datasets.reuters'):
        after_import(name, keep_ragged_arrays)
    after_import('pymc3.data', index_by_tuples)
    name_what_replaced_old_gpu_code()


def mend_theano():
    """Patch the imported Theano: the hooks that `watch` needs, and the GPU ops; once a process."""
    from theano.compile.function_module import Function
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.cc import CLinker
    from theano.gof.op import COp
    from theano.gpuarray import blas, elemwise, rng_mrg
    from theano.gpuarray.type import GpuArraySharedVariable
    if hasattr(Function, 'unwatched_call'):
        return
    _wrap_accessors(SharedVariable)
    _wrap_accessors(GpuArraySharedVariable)
    _wrap_function_call(Function)
    keep_code_of_ops_without_props(CLinker)
    give_source_a_lasting_version(COp)
    restore_downsample()
    spell_flags_as_theano_pymc()
    before_import('pymc3', add_modules_of_theano_pymc)
    give_mrg_its_context(rng_mrg.GPUA_mrg_uniform)
    spell_for_opencl(elemwise.GpuElemwise)
    clear_before_gemv(blas.GpuGemv)
    for op_class in (blas.GpuCorrMM_gradInputs, blas.GpuCorrMM_gradWeights,
                     blas.GpuCorr3dMM_gradInputs, blas.GpuCorr3dMM_gradWeights):
        cast_conv_shape(op_class)
