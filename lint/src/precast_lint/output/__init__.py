"""Output: findings as text for people and programs, and a rule's page."""
