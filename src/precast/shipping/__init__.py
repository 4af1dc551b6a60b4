"""Models for serving with the policy built in: converted models, and exported programs."""
