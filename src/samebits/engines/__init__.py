"""Engines that run a stage elsewhere: a Docker container, a Slurm job, or Kubernetes pods."""
