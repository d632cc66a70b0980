"""One module for each stage, with `run(context) -> Figures`; a failed assertion or any other error is a failed row."""
