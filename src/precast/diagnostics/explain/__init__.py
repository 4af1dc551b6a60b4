"""What a policy says of one operation, or of each module of a model."""
