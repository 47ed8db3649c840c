"""What a training needs of this host, this repository and the user's model, and what to do where it is missing."""
