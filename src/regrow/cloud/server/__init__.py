"""The REST server of the local Cloud TPU."""
