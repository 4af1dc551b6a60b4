"""Correct programs, the mistakes that the catalogue of rules names, and ways to write a program that change nothing."""
