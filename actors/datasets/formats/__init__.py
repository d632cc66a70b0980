"""Row formats by name, one file each: which columns a record has, and how they become a row."""

from mobula.actors.datasets.formats import alpaca, lightrft, messages, question, sharegpt, verl
from mobula.actors.datasets.formats.base import RowFormat

FORMATS: dict[str, RowFormat] = {
    "question": question.FORMAT,
    "messages": messages.FORMAT,
    "verl": verl.FORMAT,
    "lightrft": lightrft.FORMAT,
    "alpaca": alpaca.FORMAT,
    "sharegpt": sharegpt.FORMAT,
}
