"""As much of a terminal as tells what stands on its screen: cursor, scrolling region, erasing. No colours, no wide characters."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b([78D])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """A screen of `rows` x `columns` that is fed what programs write. A line feed starts a new line, as a tty makes it do."""

    def __init__(self, rows: int = 12, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self.cells = [[" "] * columns for _ in range(rows)]
        self.gone: list[str] = []
        """Lines that scrolled off the top."""
        self.row = self.column = 0
        self.top, self.bottom = 0, rows - 1
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        for match in _TOKEN.finditer(text):
            parameters, command, single, control, plain = match.groups()
            if plain is not None:
                for letter in plain:
                    self._put(letter)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.column = 0
                self._down()
            elif single == "7":
                self._saved = (self.row, self.column)
            elif single == "8":
                self.row, self.column = self._saved
            elif single == "D":
                self._down()
            else:
                self._command(command, [int(p) for p in parameters.split(";") if p.isdigit()])

    @property
    def lines(self) -> list[str]:
        """What stands on the screen."""
        return ["".join(row).rstrip() for row in self.cells]

    @property
    def history(self) -> list[str]:
        """Everything that was ever shown and not erased, from the top."""
        return [*self.gone, *self.lines]

    def _command(self, command: str, numbers: list[int]) -> None:
        if command == "r":
            self.top, self.bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.rows - 1)
            self.row = self.column = 0
        elif command == "H":
            self.row, self.column = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, 0)
        elif command == "A":
            self.row = max(0, self.row - (numbers[0] if numbers else 1))
        elif command == "K":
            start = 0 if numbers == [2] else self.column
            self.cells[self.row][start:] = [" "] * (self.columns - start)

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        self.cells[self.row][self.column] = letter
        self.column += 1

    def _down(self) -> None:
        if self.row == self.bottom:
            line = self.cells.pop(self.top)
            if self.top == 0:
                self.gone.append("".join(line).rstrip())
            self.cells.insert(self.bottom, [" "] * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1
