"""Evaluation: tasks, answers, per-example records."""
