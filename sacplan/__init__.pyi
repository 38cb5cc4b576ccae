"""What ``import sacplan`` offers: read by type checkers, and by the package itself (see ``__init__.py``)."""

from ._apply.apply import Handle, apply
from ._apply.compile_budget import CompileBudget, CompiledGraph, compile_budget
from ._classical.estimators import MemTracker, RuntimeEstimator, SACEstimator, aggregate_stats
from ._classical.fit import Fit, fit_tradeoff
from ._classical.graph import (
    Graph,
    ModuleInfo,
    ModuleStats,
    SACStats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from ._classical.policy import get_optimal_checkpointing_policy_per_module
from ._classical.sac_milp import SacMilpResult, sac_milp
from ._device.calibrate import calibrate
from ._device.device_memory import AllocatorPeaks, DeviceMemory
from ._device.devices import DeviceSpec, devices
from ._device.kernel_rates import KernelRates
from ._device.kernels import fake_device
from ._plan.limits import DEFAULT_HEADROOM
from ._plan.plan import Plan
from ._plan.planning import plan
from ._plan.policies import policy
from ._plan.value import UnitPlan
from ._profile.profile import Profile
from ._profile.tracing import profile
from ._questions.advise import Advice, Remedy, advise
from ._questions.batch_sizes import CapacityPoint
from ._questions.capacity import Capacity, max_batch, throughput
from ._questions.fit import fit
from ._questions.frontier import frontier
from ._questions.layouts import Layout, Layouts, layouts
from ._questions.parts import Part
from ._questions.verdict import FitRow, Verdict
from ._ranks.ranks import DDP, FSDP2
from ._report.alive import alive_at_peak
from ._report.blocked import blocked_ops
from ._report.chunks import chunk_table
from ._report.figures import frontier_figure, memory_figure, save_figures, tradeoff_figure
from ._report.losses import loss_table
from ._report.modules import module_table
from ._report.page import write_report
from ._report.snapshot import write_snapshot
from ._report.trace_events import write_memory_trace
from ._rotor.chain import Chain
from ._rotor.rotor import RotorResult, rotor
from ._rotor.sequences import Rotor
from ._shard.listing import Strategies, Strategy, strategies
from ._shard.process_groups import ranks
from ._shard.replicated import Replicated
from ._solve.greedy import Greedy
from ._solve.milp import Milp
from ._solve.uniform import Uniform
from ._verify.verify import Verification, verify
from .errors import (
    BudgetError,
    ChunkError,
    DataDependentError,
    DeviceError,
    InfeasibleBudget,
    OffloadError,
    PlanError,
    PlanMismatch,
    RecipeError,
    SacplanError,
    SacplanWarning,
    SolverError,
    SumOfOutputsWarning,
    TraceError,
    UnsupportedTorch,
)
from .integrations.peft import with_lora

__all__ = [
    "DDP",
    "DEFAULT_HEADROOM",
    "FSDP2",
    "Advice",
    "AllocatorPeaks",
    "BudgetError",
    "Capacity",
    "CapacityPoint",
    "Chain",
    "ChunkError",
    "CompileBudget",
    "CompiledGraph",
    "DataDependentError",
    "DeviceError",
    "DeviceMemory",
    "DeviceSpec",
    "Fit",
    "FitRow",
    "Graph",
    "Greedy",
    "Handle",
    "InfeasibleBudget",
    "KernelRates",
    "Layout",
    "Layouts",
    "MemTracker",
    "Milp",
    "ModuleInfo",
    "ModuleStats",
    "OffloadError",
    "Part",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "Profile",
    "RecipeError",
    "Remedy",
    "Replicated",
    "Rotor",
    "RotorResult",
    "RuntimeEstimator",
    "SACEstimator",
    "SACStats",
    "SacMilpResult",
    "SacplanError",
    "SacplanWarning",
    "SolverError",
    "Strategies",
    "Strategy",
    "SumOfOutputsWarning",
    "TraceError",
    "Uniform",
    "UnitPlan",
    "UnsupportedTorch",
    "Verdict",
    "Verification",
    "advise",
    "aggregate_stats",
    "alive_at_peak",
    "apply",
    "blocked_ops",
    "calibrate",
    "chunk_table",
    "compile_budget",
    "devices",
    "fake_device",
    "fit",
    "fit_tradeoff",
    "frontier",
    "frontier_figure",
    "get_optimal_checkpointing_policy_per_module",
    "get_peak_memory_runtime_baseline",
    "layouts",
    "loss_table",
    "max_batch",
    "memory_figure",
    "module_table",
    "parse_module_info",
    "plan",
    "policy",
    "profile",
    "ranks",
    "rotor",
    "sac_milp",
    "save_figures",
    "strategies",
    "throughput",
    "tradeoff_figure",
    "verify",
    "with_lora",
    "write_memory_trace",
    "write_report",
    "write_snapshot",
]
__version__: str
