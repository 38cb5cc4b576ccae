"""What ``import sacplan`` offers: read by type checkers, and by the package itself (see ``__init__.py``)."""

from . import errors as errors
from .classic.estimators import MemTracker, RuntimeEstimator, SACEstimator, aggregate_stats
from .classic.fit import Fit, fit_tradeoff
from .classic.graph import (
    Graph,
    ModuleInfo,
    ModuleStats,
    SACStats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from .classic.policy import get_optimal_checkpointing_policy_per_module
from .classic.sac_milp import SacMilpResult, sac_milp
from .device.device_memory import AllocatorPeaks, DeviceMemory
from .device.devices import DeviceSpec, devices
from .device.kernels import fake_device
from .distributed.ranks.ranks import DDP, FSDP2
from .distributed.sharding.listing import Strategies, Strategy, strategies
from .distributed.sharding.process_groups import ranks
from .distributed.sharding.replicated import Replicated
from .errors import (
    InfeasibleBudget,
    SacplanError,
    SacplanWarning,
)
from .integrations.peft import with_lora
from .planning.plan import Plan
from .planning.planning import plan
from .planning.policies import policy
from .planning.value import UnitPlan
from .profiling.profile import Profile
from .profiling.tracing import profile
from .questions.batch_sizes import CapacityPoint
from .questions.capacity import Capacity, max_batch, throughput
from .questions.certificate import BatchAt, Certificate, ShapePlan, WholeRun
from .questions.certify import certify
from .questions.fit import fit
from .questions.frontier import frontier
from .questions.layouts import Layout, Layouts, layouts
from .questions.verdict import FitRow, Verdict
from .report.report import Report
from .running.apply import Handle, apply
from .running.verify import Verification, verify
from .solvers.greedy import Greedy
from .solvers.milp import Milp
from .solvers.rotor.chain import Chain
from .solvers.rotor.rotor import RotorResult, rotor
from .solvers.rotor.sequences import Rotor

__all__ = [
    "DDP",
    "FSDP2",
    "AllocatorPeaks",
    "BatchAt",
    "Capacity",
    "CapacityPoint",
    "Certificate",
    "Chain",
    "DeviceMemory",
    "DeviceSpec",
    "Fit",
    "FitRow",
    "Graph",
    "Greedy",
    "Handle",
    "InfeasibleBudget",
    "Layout",
    "Layouts",
    "MemTracker",
    "Milp",
    "ModuleInfo",
    "ModuleStats",
    "Plan",
    "Profile",
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
    "ShapePlan",
    "Strategies",
    "Strategy",
    "UnitPlan",
    "Verdict",
    "Verification",
    "WholeRun",
    "aggregate_stats",
    "apply",
    "certify",
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
