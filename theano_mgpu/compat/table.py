"""The table of patches: for each its symptom, the time when it is applied, and the test that fails without it.

`theano_mgpu.compat` applies them. To add one, write a function in the module of its subject, a test, and a row here.
The function takes no arguments, or those that its `when` names.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from . import (
    cuda_contexts,
    cudnn,
    keras_imports,
    keras_loops,
    keras_models,
    keras_saving,
    keras_tensorboard,
    named_contexts,
    numpy2,
    opencl_programs,
    placement_tags,
    pocl,
    pymc3,
    removed_modules,
    removed_names,
    shared_variables,
    theano_cache,
    theano_compilation,
    theano_contexts,
    theano_flags,
    theano_functions,
    theano_gpu,
    theano_imports,
    theano_loops,
    vector_math,
)


class AfterImport(NamedTuple):
    """The time of a patch whose ``apply(module)`` is called each time that one of these modules is executed."""

    modules: Sequence[str]


class DuringImport(NamedTuple):
    """The time of a patch whose ``apply()``, a context manager, is entered while one of these modules is executed."""

    modules: Sequence[str]


class BeforeImport(NamedTuple):
    """The time of a patch whose ``apply()`` is called once, before one of these modules is imported."""

    modules: Sequence[str]


class Patch(NamedTuple):
    """One patch of a library.

    Attributes
    ----------
    library, versions : str
    symptom : str
        The behaviour without the patch.
    when : str, AfterImport, DuringImport or BeforeImport
        One of the constants below.
    apply : callable
    test : str
        A test that fails without the patch.
    """

    library: str
    versions: str
    symptom: str
    when: Any
    apply: Callable[..., Any]
    test: str


BEFORE_THEANO = 'before Theano is imported'
AS_FLAGS = 'as flags that Theano is imported with'    # apply(flags), see theano_flags.py
DURING_IMPORT = DuringImport(['theano'])              # apply() is a context manager
AFTER_THEANO = 'after Theano was imported'
WITH_CONTEXTS = 'after theano_mgpu.devices was imported'  # apply(open_context)
WITH_CUDNN = 'before Theano is imported, which may open a context'  # apply(find_cudnn)
AT_ENABLE = 'at the first enable()'                   # or multi_gpu_model; both call the function themselves
FIRST_PLACEMENT = 'at the first mgpu.device() or mgpu.place()'  # apply(tags), see graph/placement/tags.py
FIRST_OPENCL = 'before an OpenCL context is opened'
EACH_GPU = 'for each GPU context that is opened'      # apply(gpu_context)

# In the order in which they are applied.
PATCHES = [
    Patch('NumPy', '1.24 and later', "import theano: module 'numpy' has no attribute 'bool'",
          BEFORE_THEANO, removed_names.restore_numpy_aliases,
          'tests/compat/test_compat.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', "a product in Python: module 'numpy' has no attribute 'product'",
          BEFORE_THEANO, numpy2.restore_names,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', "import theano: 'PyInt_FromLong' was not declared in this scope",
          AfterImport(['theano.gof.cmodule']), numpy2.compile_for_its_interface,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'theano.tensor.fourier.fft of float32 has the type complex64, and not complex128',
          AfterImport(['theano.tensor.fft', 'theano.tensor.fourier']), numpy2.transform_in_double_precision,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'a random draw in Python: Python integer 4294967295 out of bounds for int32',
          AfterImport(['theano.sandbox.rng_mrg']), numpy2.mask_draws_in_64_bits,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', 'all on Python 3.12 and later', "import theano: No module named 'numpy.distutils'",
          BEFORE_THEANO, removed_modules.restore_numpy_distutils,
          'tests/compat/test_removed_modules.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Python', '3.12 and later', "import theano: No module named 'distutils'",
          DuringImport(['theano.configdefaults', 'theano.gof.cmodule']), removed_modules.replace_distutils,
          'tests/compat/test_removed_modules.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Python', '3.12 and later', "import theano.gpuarray: No module named 'imp'",
          DuringImport(['theano.tests.breakpoint']), removed_modules.replace_imp,
          'tests/compat/test_removed_modules.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Python', '3.8 and later', 'the first import of Theano and Keras prints a screen of SyntaxWarnings',
          BEFORE_THEANO, theano_imports.ignore_syntax_warnings,
          'tests/compat/test_compat.py::test_the_first_import_of_theano_is_quiet'),
    Patch('setuptools', '82 and later, or none', "import theano.gpuarray: No module named 'pkg_resources'",
          DuringImport(['theano.gpuarray.linalg']), removed_modules.replace_pkg_resources,
          'tests/compat/test_removed_modules.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Python', '3.10 and later', "import keras: cannot import name 'Iterable' from 'collections'",
          BEFORE_THEANO, removed_names.restore_collections_abcs,
          'tests/compat/test_compat.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Theano', '1.0.5 on Python 3.9 and later', 'the first scan ends in an error of the C compiler',
          BEFORE_THEANO, theano_imports.disable_scan_extension,
          'tests/compat/test_compat.py::test_without_a_fix_its_symptom_is_back'),
    Patch('Keras', '2.3.1', "import keras: No module named 'tensorflow'",
          BEFORE_THEANO, keras_imports.default_keras_backend,
          'tests/compat/test_compat.py::test_theano_and_keras_import_and_keras_runs_on_theano'),
    Patch('PoCL', '3.1', 'one device only; "2 warnings generated."; clBuildProgram: Unknown error, now and then',
          BEFORE_THEANO, pocl.default_pocl_settings,
          'tests/compat/test_compat.py::test_pocl_settings_of_the_user_are_left_alone'),
    Patch('Python', 'all', 'processes that a script starts import Theano without these patches',
          BEFORE_THEANO, theano_imports.have_child_processes_patched,
          'tests/bugs/test_child_processes.py::test_processes_that_a_script_starts_can_import_keras'),
    Patch('Theano', '1.0.5', "import theano.sandbox.cuda: No module named 'nose'",
          BEFORE_THEANO, named_contexts.name_what_replaced_old_gpu_code,
          'tests/bugs/test_library_versions.py::test_the_old_gpu_back_end_is_named_with_what_replaced_it'),
    Patch('Theano', '1.0.5', 'compiled code of a GPU: "the same cache key is associated to different modules"',
          AfterImport(['theano.gpuarray.type']), theano_gpu.name_the_type_of_contexts,
          'tests/bugs/test_compilation.py::test_c_code_of_a_gpu_is_the_same_in_each_process'),
    Patch('Theano', '1.0.5', 'each import of theano.gpuarray runs g++ to look for cuDNN, before a context is opened',
          AfterImport(['theano.gpuarray.cudnn_defs']), cudnn.postpone_the_check,
          'tests/compat/test_cudnn.py::test_an_import_does_not_look_for_cudnn'),
    Patch('Keras', '2.3.1', "weights of one name: No conversion path for dtype('<U12')",
          AfterImport(['keras.engine.saving']), keras_saving.give_equal_names_as_bytes,
          'tests/compat/test_keras_saving.py::test_weights_of_one_name_come_back'),
    Patch('h5py', '3 and later, with Keras 2.3.1', "load_model: 'str' object has no attribute 'decode'",
          AfterImport(['keras.engine.saving']), keras_saving.read_attributes_as_bytes,
          'tests/compat/test_keras_saving.py::test_attributes_of_either_h5py_are_read'),
    Patch('h5py', '3 and later, with Keras 2.3.1', 'model.save to a stream: unable to open file',
          AfterImport(['keras.engine.saving']), keras_saving.save_to_streams,
          'tests/compat/test_keras_saving.py::test_a_model_is_saved_to_a_stream'),
    Patch('Keras', '2.3.1', 'fit sends a batch to the devices only after the step before it',
          AfterImport(['keras.engine.training_arrays']), keras_loops.report_slices,
          'tests/keras_addon/test_look_ahead.py::test_the_same_with_and_without'),
    Patch('Keras', '2.3.1', 'fit_generator sends a batch to the devices only after the step before it',
          AfterImport(['keras.utils.data_utils']), keras_loops.report_queues,
          'tests/keras_addon/test_look_ahead.py::test_batches_of_a_generator_are_sent_ahead_once_they_are_there'),
    Patch('Keras', '2.3.1', 'callbacks.TensorBoard: You need the TensorFlow (v1) module installed',
          AfterImport(['keras.callbacks.tensorboard_v1']), keras_tensorboard.write_without_tensorflow,
          'tests/keras_addon/test_tensorboard.py::test_plain_keras'),
    Patch('NumPy', '1.24 and later', 'imdb.load_data(): setting an array element ... inhomogeneous shape',
          AfterImport(['keras.datasets.imdb', 'keras.datasets.reuters']), keras_imports.keep_ragged_arrays,
          'tests/bugs/test_library_versions.py::test_keras_data_sets_of_texts_are_loaded'),
    Patch('NumPy', '2', 'Keras adds up the losses of an epoch in single precision',
          AfterImport(['keras.callbacks.callbacks']), numpy2.average_in_double_precision,
          'tests/compat/test_numpy2.py::test_losses_of_an_epoch_are_added_up_in_double_precision'),
    Patch('NumPy', '1.23 and later', 'pm.Minibatch: IndexError: only integers, slices ... are valid indices',
          AfterImport(['pymc3.data']), pymc3.index_by_tuples,
          'tests/compat/test_compat.py::test_minibatches_of_pymc3_cut_their_data'),

    Patch('Theano', '1.0.5', "device=gpu0: an error that does not say how several devices are named",
          AS_FLAGS, theano_flags.refuse_old_devices,
          'tests/bugs/test_library_versions.py::test_devices_of_the_old_back_end_are_named_with_their_new_names'),
    Patch('Theano', '1.0.5', "Theano warns that it does not recognise theano_mgpu's own flags",
          AS_FLAGS, theano_flags.hide_own_flags,
          'tests/compat/test_compat.py::test_theano_does_not_warn_of_our_flags'),
    Patch('Theano', '1.0.5', 'Theano opens the contexts, only logs errors, and loses the second name of a device',
          AS_FLAGS, theano_flags.hide_contexts,
          'tests/compat/test_compat.py::test_theano_opens_no_context_by_itself'),
    Patch('NumPy', '1.22 and later', "import theano: no attribute 'blas_opt_info' of numpy.distutils.__config__",
          AS_FLAGS, theano_flags.default_blas_flags,
          'tests/compat/test_compat.py::test_blas_flags_are_the_users_or_ones_that_link'),
    Patch('Theano', '1.0.5', 'gradients of convolutions by cuDNN differ from run to run, in the last bits',
          AS_FLAGS, cudnn.default_to_deterministic_algorithms,
          'tests/compat/test_cudnn.py::test_algorithms_are_deterministic_by_default'),
    Patch('Theano', '1.0.5', "without Python's headers, import theano: Python.h: No such file",
          AS_FLAGS, theano_flags.do_without_python_headers,
          'tests/compat/test_compat.py::test_missing_python_headers_are_said_and_theano_imports_all_the_same'),
    Patch('Theano', '1.0.5', 'import theano starts MPI, or ends with: cannot load MPI library',
          DURING_IMPORT, theano_imports.hidden_mpi,
          'tests/compat/test_compat.py::test_an_mpi4py_without_mpi_does_not_end_the_import'),
    Patch('Theano', '1.0.5', 'import theano imports scipy.stats, for one op: a quarter of a second',
          DURING_IMPORT, theano_imports.scipy_stats_left_out,
          'tests/compat/test_compat.py::test_scipy_stats_is_imported_by_the_op_that_needs_it'),
    Patch('Theano', '1.0.5 with SciPy 1.8 and later', 'import theano imports scipy.signal in vain: a tenth of a second',
          DURING_IMPORT, theano_imports.scipy_signal_left_out,
          'tests/compat/test_compat.py::test_scipy_signal_is_left_to_those_who_need_it'),

    Patch('NumPy', '2', "C code with complex numbers: 'struct theano_complex64' has no member named 'real'",
          AFTER_THEANO, numpy2.give_complex_numbers_fields,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', "the gradient of an embedding: 'PyArrayMapIterObject' has not been declared",
          AFTER_THEANO, numpy2.add_rows_without_map_iterators,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'the maximum of a vector: axis 64 is out of bounds for array of dimension 1',
          AFTER_THEANO, numpy2.name_all_axes,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'uint8 + 300 has the type uint64; Python integer 300 out of bounds for uint8',
          AFTER_THEANO, numpy2.wrap_integers,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'float64 * 0.1 multiplies by 0.10000000149011612',
          AFTER_THEANO, numpy2.compare_constants_exactly,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'the inverse of a float64 has the precision of float32 in Python',
          AFTER_THEANO, numpy2.compute_in_the_type_of_numbers,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'batch normalisation of float32 has the type float64 in Python',
          AFTER_THEANO, numpy2.combine_numbers_with_arrays,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'fill_diagonal_offset of a matrix with 100 columns writes to wrong places',
          AFTER_THEANO, numpy2.count_in_64_bits,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'the gradient of a softmax is added up in single precision in Python',
          AFTER_THEANO, numpy2.add_up_gradients_of_softmax,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),
    Patch('NumPy', '2', 'the places of unique elements of a matrix are a matrix, and not a vector',
          AFTER_THEANO, numpy2.flatten_places_of_unique_elements,
          'tests/compat/test_numpy2.py::test_without_a_fix_its_symptom_is_back'),

    Patch('Theano', '1.0.5', 'processes that compile at the same time wait for each other for minutes',
          AFTER_THEANO, theano_cache.wait_briefly_for_compile_lock,
          'tests/compat/test_compat.py::test_waiting_for_compiled_code_is_short_and_draws_no_numbers_of_the_user'),
    Patch('Theano', '1.0.5', 'one process compiles at a time, whatever the others need',
          AFTER_THEANO, theano_compilation.compile_outside_the_lock,
          'tests/compat/test_compilation.py::test_two_processes_compile_at_the_same_time'),
    Patch('Theano', '1.0.5', "one core compiles a function's modules one after the other",
          AFTER_THEANO, theano_compilation.compile_ahead,
          'tests/compat/test_compilation.py::test_modules_of_a_function_are_compiled_at_the_same_time'),
    Patch('Theano', '1.0.5', 'a process that starts may delete compiled code that another one has just written',
          AFTER_THEANO, theano_cache.write_keys_whole,
          'tests/bugs/test_compilation.py::test_compiled_code_stays_while_another_process_starts'),
    Patch('Theano', '1.0.5', 'reading the keys of compiled code takes half a second in each process',
          AFTER_THEANO, theano_cache.read_keys_without_the_collector,
          'tests/compat/test_compilation.py::test_the_collector_rests_while_keys_are_read'),
    Patch('Theano', '1.0.5', 'reading the keys of compiled code makes and optimises the graph of each fused op',
          AFTER_THEANO, theano_cache.read_keys_without_graphs,
          'tests/compat/test_compilation.py::test_keys_are_read_without_the_graphs_of_fused_ops'),
    Patch('Theano', '1.0.5', 'reading the keys of compiled code opens devices that the process does not use',
          AfterImport(['theano.gpuarray.type']), theano_cache.read_keys_without_devices,
          'tests/compat/test_compilation.py::test_keys_are_read_without_devices'),
    Patch('Theano', '1.0.5', 'each process runs g++ four times to find the flags of its processor: 0.3 seconds',
          AFTER_THEANO, theano_cache.keep_flags_of_the_processor,
          'tests/compat/test_compilation.py::test_flags_of_the_processor_are_found_once'),
    Patch('Theano', '1.0.5', "Python's collector takes a third of the time that compiling a function takes",
          AFTER_THEANO, theano_functions.compile_without_the_collector,
          'tests/compat/test_compilation.py::test_the_collector_rests_while_a_function_is_compiled'),
    Patch('Theano', '1.0.5', "theano.config has none of theano_mgpu's own flags",
          AFTER_THEANO, theano_flags.register_own_flags,
          'tests/compat/test_compat.py::test_the_environment_is_as_before_after_the_import'),
    Patch('Theano', '1.0.5', "theano.config.contexts is empty, since Theano is imported without the user's map",
          AFTER_THEANO, theano_flags.show_contexts,
          'tests/compat/test_compat.py::test_theano_opens_no_context_by_itself'),
    Patch('Theano', '1.0.5', "module 'theano.gpuarray' has no attribute 'shared_constructor', and the like",
          AFTER_THEANO, named_contexts.name_what_replaced_old_gpu_names,
          'tests/bugs/test_library_versions.py::test_old_names_of_gpu_code_are_named_with_what_replaced_them'),
    Patch('Theano', '1.0.5', "shared(target='dev0'): no suitable constructor, as Theano was imported without contexts",
          WITH_CONTEXTS, named_contexts.open_contexts_on_demand,
          'tests/bugs/test_devices.py::test_flags_alone_open_the_contexts_that_a_script_names'),
    Patch('Theano', '1.0.5', 'cuDNN 8 and 9: the first convolution ends in an error of g++; none from a wheel',
          WITH_CUDNN, cudnn.use_any_version,
          'tests/devices/test_cuda_cudnn.py::test_a_cnn_of_keras_trains_on_cudnn'),
    Patch('Theano', '1.0.5', 'copies of a shared variable on other contexts become stale in silence',
          AFTER_THEANO, shared_variables.hook_shared_variables,
          'tests/runtime/test_replicate.py::test_without_the_hooks_values_are_stale'),
    Patch('Theano', '1.0.5', 'each process compiles matrix products, softmax and random draws again',
          AFTER_THEANO, theano_cache.keep_code_of_ops_without_props,
          'tests/compat/test_compat.py::test_what_was_compiled_once_is_not_compiled_again'),
    Patch('Theano', '1.0.5', 'each process compiles DimShuffle again',
          AFTER_THEANO, theano_cache.give_source_a_lasting_version,
          'tests/compat/test_compat.py::test_what_was_compiled_once_is_not_compiled_again'),
    Patch('Theano', '0.9 and later', "import lasagne: cannot import name 'downsample'",
          AFTER_THEANO, theano_imports.restore_downsample,
          'tests/bugs/test_library_versions.py::test_pooling_by_its_old_name'),
    Patch('Theano', '1.0.5, with PyMC3 3.11', "'TheanoConfigParser' object has no attribute 'gcc__cxxflags'",
          AFTER_THEANO, pymc3.spell_flags_as_theano_pymc,
          'tests/compat/test_compat.py::test_flags_have_the_names_of_theano_pymc'),
    Patch('Theano', '1.0.5, with PyMC3 3.11', "import pymc3: No module named 'theano.graph'",
          BeforeImport(['pymc3']), pymc3.add_modules_of_theano_pymc,
          'tests/compat/test_compat.py::test_pymc3_finds_the_modules_of_theano_pymc_and_nobody_else_does'),
    Patch('Theano', '1.0.5', 'random draws: context name None not defined',
          AFTER_THEANO, theano_gpu.give_mrg_its_context,
          'tests/graph/test_graph.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'the transposed convolution to a shape of Python integers has a senseless shape',
          AFTER_THEANO, theano_gpu.cast_conv_shapes,
          'tests/graph/test_graph.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'nnet.conv.conv2d on a GPU: ConvOp does not work with the gpuarray backend',
          AFTER_THEANO, theano_gpu.replace_legacy_convolutions,
          'tests/graph/test_graph.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'a kernel that cannot be made, for lack of memory, say, ends the process',
          AFTER_THEANO, theano_gpu.report_kernels_that_cannot_be_made,
          'tests/graph/test_graph.py::test_a_kernel_that_cannot_be_made_is_an_error'),
    Patch('Theano', '1.0.5 on OpenCL', 'maximum, minimum, round, // and a float as a condition end the process',
          AFTER_THEANO, theano_gpu.spell_for_opencl,
          'tests/bugs/test_devices.py::test_kernels_that_ended_the_process_on_opencl_build'),
    Patch('Theano', '1.0.5 on OpenCL', 'a product of matrix and vector is NaN where its memory held NaN',
          AFTER_THEANO, theano_gpu.clear_before_gemv,
          'tests/bugs/test_devices.py::test_a_product_into_memory_that_holds_nan_is_not_nan'),
    Patch('Theano', '1.0.5 with cuDNN', 'a scale that is a view: wrong gradients of batch normalisation',
          AFTER_THEANO, cudnn.give_contiguous_parameters,
          'tests/cuda_on_cpu/test_cudnn.py::test_cudnn_and_cpu_agree'),
    Patch('Theano', '1.0.5', 'conv2d with filter_flip=True: Could not infer context from inputs',
          AFTER_THEANO, theano_contexts.infer_contexts_from_all_ancestors,
          'tests/graph/test_graph.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'graphs without a default context: context name None not defined',
          AFTER_THEANO, theano_contexts.lift_graphs_to_named_contexts,
          'tests/graph/test_graph.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'functions that draw random numbers log: Could not infer context from inputs',
          AFTER_THEANO, theano_contexts.keep_optimizers_from_host_nodes,
          'tests/devices/test_contexts.py::test_a_plain_function_that_draws_is_quiet'),
    Patch('Theano', '1.0.5', 'loops call libm for one element at a time: tanh takes ten times as long as it needs',
          AFTER_THEANO, vector_math.vectorize_functions,
          'tests/compat/test_vector_math.py::test_loops_call_vector_functions'),
    Patch('Theano', '1.0.5', 'g++ does not vectorise elementwise loops: updates take twice the time of their memory',
          AFTER_THEANO, theano_loops.vectorize_loops,
          'tests/compat/test_theano_loops.py::test_a_loop_is_vectorised'),
    Patch('Theano', '1.0.5', 'half the time of the gradient of max pooling is branches that no processor predicts',
          AFTER_THEANO, theano_loops.unbranch_max_pooling,
          'tests/compat/test_theano_loops.py::test_max_pooling_has_no_branch_on_the_maximum'),
    Patch('Theano', '1.0.5', 'sums over the first axes skip through memory: they take four times as long as they need',
          AFTER_THEANO, theano_loops.sum_rows_in_the_order_of_memory,
          'tests/compat/test_theano_loops.py::test_sums_of_rows_are_vectorised'),
    Patch('Theano', '1.0.5', 'replicas in threads write into the inner storage of one scan: wrong results',
          AFTER_THEANO, theano_contexts.give_each_thunk_its_inner_function,
          'tests/bugs/test_threads_and_signals.py::test_replicas_in_threads_do_not_run_one_inner_function'),

    Patch('Theano', '1.0.5', 'theano.function makes functions for one device only',
          AT_ENABLE, theano_functions.after_each_function,
          'tests/auto/test_every_function.py::test_scripts_give_the_figures_of_plain_theano'),
    Patch('Theano', '1.0.5', 'a copy of a function runs on one device only',
          AT_ENABLE, theano_functions.divide_copies,
          'tests/auto/test_calls.py::test_a_copy_is_divided'),
    Patch('Keras', '2.3.1', 'models are trained on one device only',
          AT_ENABLE, keras_models.switch_keras_methods,
          'tests/keras_addon/test_enable.py::test_sequential_training'),
    Patch('Keras', '2.3.1', 'multi_gpu_model is only available with the TensorFlow backend',
          AT_ENABLE, keras_models.replace_multi_gpu_model,
          'tests/keras_addon/test_enable_report.py::test_the_add_ons_own_models_and_keras_own_function'),

    Patch('Theano', '1.0.5', 'variables do not know the device() block that they were made in',
          FIRST_PLACEMENT, placement_tags.tag_new_nodes,
          'tests/graph/test_placement_tags.py::test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'gradients are not on the device of their forward op',
          FIRST_PLACEMENT, placement_tags.place_gradients,
          'tests/graph/test_placement_tags.py::test_each_patch_is_needed'),

    Patch('OpenCL', 'all drivers', 'the same kernels are built again for each function, device and process',
          FIRST_OPENCL, opencl_programs.share_programs,
          'tests/compat/test_opencl_programs.py::test_a_program_is_built_once'),
    Patch('libgpuarray', '0.7.0 to 0.7.6', 'two CUDA contexts: memory of the wrong device, CUDA_ERROR_INVALID_HANDLE',
          EACH_GPU, cuda_contexts.protect,
          'tests/devices/test_cuda.py::test_a_kernel_that_is_made_twice_leaves_no_context_current'),
    Patch('libgpuarray', '0.7.0 to 0.7.6', 'with gpuarray.preallocate=-1, CUDA memory is never freed',
          EACH_GPU, cuda_contexts.free_within_context,
          'tests/runtime/test_memory.py::test_freed_memory_is_given_back'),
    Patch('Theano', '1.0.5', 'devices that time algorithms of cuDNN choose different ones: replicas differ',
          EACH_GPU, cudnn.choose_alike,
          'tests/compat/test_cudnn.py::test_several_devices_do_not_choose_by_time'),
]
