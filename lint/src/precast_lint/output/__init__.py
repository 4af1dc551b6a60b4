"""What a run prints: findings as text for people and programs, and a rule's page."""
