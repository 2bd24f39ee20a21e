"""Step-time models behind one interface: data-sheet roofline, measured here, or a file of timings."""

from specq.cost.base import CostModel, FreeDraft, Operating, cycle_time_draws, cycle_times, speedup

__all__ = ["CostModel", "FreeDraft", "Operating", "cycle_time_draws", "cycle_times", "speedup"]
