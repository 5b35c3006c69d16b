"""What head and worker say to each other: frames, a link that survives breaks, shared memory.

Imports nothing of JAX. `head_end` and `worker_end` tell how the two ends are used, `arena` how tensors
cross without a copy.
"""
