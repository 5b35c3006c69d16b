"""Several jobs on one set of slices: priorities, leases, spares, preemption.

priorities    priority classes, from Kubernetes' own YAML
model         events, instructions, policy
records       jobs and slices as they are
allocation    who gets which slice: one pass, from the records alone
manager       the state machine
"""
