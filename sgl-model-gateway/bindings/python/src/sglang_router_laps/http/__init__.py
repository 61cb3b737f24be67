"""The application that clients speak to, and the reading of what they send."""
