"""Acceptance read from a running server: its counters, its log, a benchmark's result, or histograms per request."""
