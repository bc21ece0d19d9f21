"""Measurements of decisions on questions with known answers: accuracy, calibration and speed."""
