"""Global switches in force, and the lines that set them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch import nn

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.operators.recorder import storage_of
from flatout.core.records.evidence import Evidence
from flatout.core.records.workload import Setting
from flatout.core.runtime.patches import Patches
from flatout.machine.measure.processor_load import cpu_quota

ENVIRONMENT: Final = (
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "LOCAL_WORLD_SIZE",
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_DEBUG"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_DISTRIBUTED_DEBUG"),
)
"""Environment variables that slow torch down, change its threads, or how its ranks talk."""


class GlobalSettings(Collector):
    """Notes the user's line at which each switch was thrown."""

    def __init__(self, observation: ObservationState) -> None:
        self.set_at: dict[str, int] = {}
        self.float64_arrays: dict[int, int] = {}
        self._observation = observation
        self._sites = observation.sites

    def install(self, patches: Patches) -> None:
        """Wrap the functions that throw switches; they are rare, so this costs nothing in a step."""
        for owner, name, setting in (
            (torch, "use_deterministic_algorithms", "deterministic_algorithms"),
            (torch, "set_default_dtype", "default_dtype"),
            (torch, "set_num_threads", "num_threads"),
            (torch, "set_float32_matmul_precision", "float32_matmul_precision"),
            (torch, "set_flush_denormal", "flush_denormal"),
        ):
            patches.set(owner, name, self._noting(getattr(owner, name), setting))
        patches.set(nn.Module, "double", self._noting(nn.Module.double, "module_dtype"))
        patches.set(nn.Module, "to", self._noting_float64(nn.Module.to))
        for name in ("from_numpy", "tensor", "as_tensor"):
            patches.set(torch, name, self._noting_tensors(getattr(torch, name)))
        patches.set(torch.Tensor, "double", self._noting_tensors(torch.Tensor.double))
        for kind in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
            patches.set(kind, "__init__", self._noting(kind.__init__, "detect_anomaly"))

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `float64_sources`, and to the workload its settings."""
        outside = self._observation.deep.outside_float64
        sites = {site for storage, site in self.float64_arrays.items() if storage in outside and site >= 0}
        return msgspec.structs.replace(
            evidence,
            workload=msgspec.structs.replace(evidence.workload, settings=self._settings(dict(os.environ))),
            float64_sources=tuple(sorted(sites)),
        )

    def _settings(self, environment: dict[str, str]) -> tuple[Setting, ...]:
        """The switches as they stand now."""
        values = {
            "detect_anomaly": torch.is_anomaly_enabled(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "num_interop_threads": torch.get_num_interop_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "flush_denormal": is_flushing_denormals(),
            "cpu_quota": cpu_quota() or "",
        }
        values.update({name: environment[name] for name in ENVIRONMENT if name in environment})
        if "module_dtype" in self.set_at:
            values["module_dtype"] = "float64"
        sources = self._sites.table()
        return tuple(
            Setting(name=name, value=str(value), source=sources[at] if (at := self.set_at.get(name, -1)) >= 0 else None)
            for name, value in values.items()
        )

    def _noting_float64(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note the line of `module.to(torch.float64)`, however it is spelt."""

        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.float64 in (*args, *kwargs.values()):
                self.set_at["module_dtype"] = self._sites.of_frame(sys._getframe(1))
            return original(module, *args, **kwargs)

        return to

    def _noting_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note the line that created a float64 tensor without naming the dtype, by the memory it lies in."""

        def making(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            if tensor.dtype == torch.float64:
                self.float64_arrays[storage_of(tensor)] = self._sites.of_frame(sys._getframe(1))
            return tensor

        return making

    def _noting(self, original: Callable[..., Any], setting: str) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            site = self._sites.of_frame(caller)
            if site >= 0 and not caller.f_globals.get("__name__", "").startswith("flatout."):  # a trial's own switch
                self.set_at[setting] = site
            return original(*args, **kwargs)

        return noting


def is_flushing_denormals() -> bool:
    """Whether this thread's arithmetic takes subnormal numbers for zero; torch can set the switch but not read it."""
    return sys.float_info.min / 2 == 0.0


COLLECTOR: Final = CollectorEntry(GlobalSettings)
