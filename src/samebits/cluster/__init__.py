"""A training on other machines: handed to Slurm, waited for, and ended with; or written down for Kubernetes."""
