"""The stages of the pipeline, each a module of its name, and the repository that they run in."""
