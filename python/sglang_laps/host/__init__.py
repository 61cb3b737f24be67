"""What the host platform adds to SGLang on a CPU: attention, and corrections of code that takes a GPU for granted."""
