"""The built-in models, and building one of them or the user's own with portable first weights."""
