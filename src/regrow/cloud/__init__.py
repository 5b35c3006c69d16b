"""A Cloud TPU control plane for one machine: its model, its state machine, its server and hosts."""
