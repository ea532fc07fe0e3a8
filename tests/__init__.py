"""The tests, in rooms by what they need and show; CONTRIBUTING.md says which is for what."""
