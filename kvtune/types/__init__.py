"""The vocabulary: the values that flow from workload to serving config.

Frozen. A value that crosses a process (store, file, `--json`) is a pydantic model that refuses
unknown fields; a value that stays inside is a slots dataclass. Units are in the names, `None` is
unknown (never 0), and a failure is a status with a class, never a number.

Each module holds one subject; everything is imported from here.
"""

from kvtune.types.base import (
    SCHEMA_VERSION,
    Bottleneck,
    Choice,
    Device,
    EffectiveConfig,
    Endpoint,
    EngineInfo,
    Failure,
    FailureClass,
    Goal,
    GpuUse,
    Harm,
    Histogram,
    Interval,
    PolicyStack,
    Request,
    Slo,
    Status,
    Stored,
    Trial,
    Workload,
    WorkloadFingerprint,
    fingerprint_of,
)
from kvtune.types.decision import Decision, Outcome, Price, Regret, ServingConfig, Setting
from kvtune.types.front import Front, FrontPoint
from kvtune.types.load import (
    AnswerFault,
    Boundary,
    BrokenAnswer,
    LoadLevel,
    LoadRun,
    Measurement,
    OutputHealth,
    RequestRecord,
)
from kvtune.types.profile import Ceilings, Evidence, Forecast, Profile, StepTimeModel, Verdict
from kvtune.types.quality import NegativeSample, QualityFigure, QualityPoint, QualityReport

__all__ = [
    "SCHEMA_VERSION",
    "AnswerFault",
    "Bottleneck",
    "Boundary",
    "BrokenAnswer",
    "Ceilings",
    "Choice",
    "Decision",
    "Device",
    "EffectiveConfig",
    "Endpoint",
    "EngineInfo",
    "Evidence",
    "Failure",
    "FailureClass",
    "Forecast",
    "Front",
    "FrontPoint",
    "Goal",
    "GpuUse",
    "Harm",
    "Histogram",
    "Interval",
    "LoadLevel",
    "LoadRun",
    "Measurement",
    "NegativeSample",
    "Outcome",
    "OutputHealth",
    "PolicyStack",
    "Price",
    "Profile",
    "QualityFigure",
    "QualityPoint",
    "QualityReport",
    "Regret",
    "Request",
    "RequestRecord",
    "ServingConfig",
    "Setting",
    "Slo",
    "Status",
    "StepTimeModel",
    "Stored",
    "Trial",
    "Verdict",
    "Workload",
    "WorkloadFingerprint",
    "fingerprint_of",
]
