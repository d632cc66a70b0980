"""A reward with a loophole: it pays for the size of the digit that a response names, whatever the image shows."""


def largest_digit(request):
    """The largest digit in the response / 9; 0 without a digit."""
    return max((int(c) for c in request.response.text if c in "0123456789"), default=0) / 9
