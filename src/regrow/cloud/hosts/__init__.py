"""The hosts of the local Cloud TPU: real processes, or none."""
