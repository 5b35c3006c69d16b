"""Manifests for Kubernetes: JobSets whose slices can be swapped, and what they need.

nodes     what the pods of a slice are scheduled on: TPU, GPU or CPU nodes
pods      the containers of each kind of pod
jobset    the documents
"""
