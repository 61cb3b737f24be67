"""What is compared with what, each with a command of its own beside this folder."""
