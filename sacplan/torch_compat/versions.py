"""The versions of torch that sacplan was tried with, and one clear error where another one lacks what sacplan needs.

sacplan uses private names of torch: no public ones see an op below autograd, or tell what autograd saves. They can go
in any release. ``NEEDED`` lists them, so that a torch without one is refused when sacplan is imported, by name, and not
by an ``AttributeError`` in the middle of a training step. Names in modules that torch itself imports late are looked up
when they are used, inside ``torch_names()``, or are ``LATE``. ``docs/versions.md`` says what was run with each version.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sacplan.errors import SacplanWarning, UnsupportedTorch

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last release that was tried, as (major, minor)."""

NEEDED: tuple[str, ...] = (
    "torch.Tensor._dtensor__new__",
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C.DispatchKey.AutocastCPU",
    "torch._C.DispatchKey.CompositeExplicitAutograd",
    "torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C.DispatchKeySet",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._DisableAutocast",
    "torch._C._DisableTorchDispatch",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._profiler_enabled",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_keys",
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._dispatch_tls_set_dispatch_key_excluded",
    "torch._C._dynamo.eval_frame",
    "torch._C._functorch.is_batchedtensor",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_fp32_precision_getter",
    "torch._C._get_sdp_priority_order",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._profiler._ExperimentalConfig",
    "torch._C._set_fp32_precision_setter",
    "torch._C._set_grad_enabled",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._set_warn_deprecated_on_mutable_data_ptr",
    "torch._C._will_engine_execute_node",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._prims_common.suggest_memory_format",
    "torch._subclasses.fake_impls",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.autograd.Variable._execution_engine",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.graph._engine_run_backward",
    "torch.compiler._is_exporting_flag",
    "torch.nn.Module._call_impl",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.ops.aten._efficientzerotensor.default",
    "torch.ops.aten._foreach_norm.Scalar",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._native_batch_norm_legit.default",
    "torch.ops.aten._native_batch_norm_legit.no_stats",
    "torch.ops.aten._unsafe_view.default",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode_temporarily",
    "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
)
"""Private names that sacplan uses, other than those of modules that torch imports late."""

LATE: tuple[str, ...] = (
    "torch._C._distributed_c10d.FakeWork",
    "torch.distributed._composable.replicate.replicate",
    "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPCommContext",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext",
    "torch.distributed.fsdp._fully_shard._fully_shard._get_post_forward_mesh_info",
    "torch._dynamo.comptime.comptime",
    "torch._dynamo.backends.debugging.boxed_nop",
    "torch._dynamo.device_interface.CudaInterface.Worker",
    "torch._dynamo.exc.BackendCompilerFailed",
    "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
    "torch._dynamo.utils.counters",
    "torch._functorch.config",
    "torch._functorch.partitioners._remove_symbols_without_guarding",
    "torch._functorch.partitioners._size_of",
    "torch._functorch.partitioners.choose_saved_values_set",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._guards.TracingContext.try_get",
    "torch._inductor.async_compile.AsyncCompile.cpp_pybinding",
    "torch._inductor.async_compile.AsyncCompile.triton",
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.write_get_raw_stream_header",
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.write_triton_header_once",
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._inductor.compile_fx.partition_fn",
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value",
    "torch._inductor.graph.GraphLowering._update_scheduler",
    "torch._inductor.memory.estimate_peak_memory_allocfree",
    "torch._inductor.memory.prepare_planning_info",
    "torch._inductor.scheduler.has_triton",
    "torch._prims.rng_prims.run_and_save_rng_state",
    "torch._prims.rng_prims.run_with_rng_state",
)
"""Private names that only code inside ``torch.compile``, or around it, looks up, or that a build may lack.

They cannot be checked before: to import Dynamo takes seconds, and what Dynamo traces must look names up plainly.
"""

_SPAN = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
_INSTALL = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def check_torch() -> None:
    """Warn of a torch that was not tried.

    Raises:
        UnsupportedTorch: names of ``NEEDED`` are missing.
    """
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        raise _unsupported(missing)
    if not OLDEST <= torch_release() <= NEWEST:
        warnings.warn(
            f"sacplan was tried with torch {_SPAN}, and this is {torch.__version__}: check peaks and plans with "
            f"sacplan.verify, or use {_INSTALL}.",
            SacplanWarning,
            stacklevel=2,
        )


@contextmanager
def torch_names() -> Iterator[None]:
    """Inside, names of torch are imported or looked up; one that is missing is an ``UnsupportedTorch``."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _unsupported([str(error)]) from error


def torch_release() -> tuple[int, int]:
    """Return the major and minor version of the torch that runs."""
    # The third part may hold letters, as in 2.13.0a0+git or 2.13.0+cu130.
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _is_there(name: str) -> bool:
    # Every name begins with "torch", so the walk begins at its second part.
    parts = name.split(".")
    found: Any = torch
    for i, part in enumerate(parts[1:], 2):
        # A module that is imported need not be an attribute of its package.
        found = getattr(found, part, sys.modules.get(".".join(parts[:i])))
        if found is None:
            return False
    return True


def _unsupported(missing: Iterable[str]) -> UnsupportedTorch:
    return UnsupportedTorch(
        f"torch {torch.__version__} lacks what sacplan needs of it: {', '.join(missing)}. sacplan was tried with "
        f"torch {_SPAN}: {_INSTALL}."
    )
