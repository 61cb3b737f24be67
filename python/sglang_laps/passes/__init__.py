"""Forward passes in slices: where a pass can pause, and what a pause must put back."""
