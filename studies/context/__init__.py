"""Shift, alpha, KL and top-1 agreement against context length, and what high acceptance does not say."""
