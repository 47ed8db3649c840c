"""Where a stage runs if not right here: in a container of Docker's, as a job of Slurm's, in pods of Kubernetes'."""
