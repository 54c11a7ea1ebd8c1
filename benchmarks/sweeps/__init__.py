"""Sweeps of one number at a time, as the papers make them, and the cost of accuracy by method."""
