"""What ``import sacplan`` offers: read by type checkers, and by the package itself (see ``__init__.py``)."""

from . import errors as errors
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
from ._report.report import Report
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
    InfeasibleBudget,
    SacplanError,
    SacplanWarning,
)
from .integrations.peft import with_lora

__all__ = [
    "DDP",
    "DEFAULT_HEADROOM",
    "FSDP2",
    "Advice",
    "AllocatorPeaks",
    "Capacity",
    "CapacityPoint",
    "Chain",
    "CompileBudget",
    "CompiledGraph",
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
    "Part",
    "Plan",
    "Profile",
    "Remedy",
    "Replicated",
    "Report",
    "Rotor",
    "RotorResult",
    "RuntimeEstimator",
    "SACEstimator",
    "SACStats",
    "SacMilpResult",
    "SacplanError",
    "SacplanWarning",
    "Strategies",
    "Strategy",
    "Uniform",
    "UnitPlan",
    "Verdict",
    "Verification",
    "advise",
    "aggregate_stats",
    "apply",
    "calibrate",
    "compile_budget",
    "devices",
    "errors",
    "fake_device",
    "fit",
    "fit_tradeoff",
    "frontier",
    "get_optimal_checkpointing_policy_per_module",
    "get_peak_memory_runtime_baseline",
    "layouts",
    "max_batch",
    "parse_module_info",
    "plan",
    "policy",
    "profile",
    "ranks",
    "rotor",
    "sac_milp",
    "strategies",
    "throughput",
    "verify",
    "with_lora",
]
__version__: str
