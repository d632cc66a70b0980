"""MiniWoB++ tasks in a real Chromium."""
