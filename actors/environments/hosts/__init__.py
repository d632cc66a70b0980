"""Where environments run: in this process, or in processes of their own that can be killed."""
