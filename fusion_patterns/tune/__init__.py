"""The optional tuner: the legal tiles of every distinct kernel on a device, and the fastest of them as a profile."""

from .measure import LocalMeasurer, Measurer
from .results import profile_text, render, tuned_profile
from .store import ResultsError, Store
from .tuner import KernelResult, TuneReport, tune

__all__ = [
    "KernelResult",
    "LocalMeasurer",
    "Measurer",
    "ResultsError",
    "Store",
    "TuneReport",
    "profile_text",
    "render",
    "tune",
    "tuned_profile",
]
