"""Streamed pieces: read where they are asked for, or ahead of that by a thread, and unmapped after use.

The thread maps and reads, and no more. The thread that computes gives the orders, takes what was read, and unmaps; what is
not wanted after all is given up first, so that nothing is unmapped while it is read.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import BinaryIO

from engine.quantization import Weight
from engine.shards.mapping import Mapping
from engine.shards.pieces import Cut, Part, Piece
from engine.timings import LayerTimings

Cost = tuple[float, int]
"""Of reading a part: seconds, and bytes that came from storage and not from the page cache."""


class Reading:
    """One piece on its way into memory, part after part, by whoever asks for it.

    Attributes
    ----------
    read_bytes : int
        Bytes of the parts taken that came from storage.
    has_failed : bool
        Whether the thread met an error. It may be over: where the piece was read too early, it is read again.
    is_in_use : bool
        Whether arithmetic goes on with it, or ended in an error: then its views live as long as the traceback.
    """

    def __init__(self, piece: Piece, opened: BinaryIO) -> None:
        self.piece = piece
        self.has_failed = False
        self.is_in_use = False
        self.read_bytes = 0
        self._opened = opened
        self._mapping: Mapping | None = None
        self._n_taken = 0

    def take(self, number: int, asked: float, timings: LayerTimings) -> dict[str, Weight]:
        """The weights of part `number`, once it and those before it are read; what that took is added to `timings`.

        Parameters
        ----------
        asked : float
            When it was asked for, by time.perf_counter: since then it is waited for.

        Raises
        ------
        ModelError
            As `Mapping` and `Mapping.read`.
        """
        while self._n_taken <= number:
            part = self.piece.parts[self._n_taken]
            load_seconds, read_bytes = self._cost(part, timings)
            ready = time.perf_counter()
            timings.add_load(*part.key, load_seconds, part.passes)
            timings.add_wait(*part.key, ready - asked, part.passes)
            asked = ready
            timings.shard_read_bytes += read_bytes
            self.read_bytes += read_bytes
            if self._n_taken == 0:
                timings.add_shard(self.piece.n_bytes)
            self._n_taken += 1
        return self._mapped().weights(self.piece.parts[number])

    def give_up(self) -> None:
        """Nobody will ask for it."""

    def unmap(self, is_uncached: bool = False) -> None:
        """Unmap it, and drop it from the page cache if `is_uncached`; BufferError where a view is still held."""
        if self._mapping is not None:
            self._mapping.unmap()
            if is_uncached:
                self._mapping.uncache()

    def _mapped(self) -> Mapping:
        if self._mapping is None:
            self._mapping = Mapping(self._opened, self.piece)
        return self._mapping

    def _cost(self, part: Part, timings: LayerTimings) -> Cost:
        """Have `part` read, and say what it took."""
        return self._read(part, lambda: True)

    def _read(self, part: Part, is_wanted: Callable[[], bool]) -> Cost:
        started, before = time.perf_counter(), _read_bytes()
        self._mapped().read(part, is_wanted)
        return time.perf_counter() - started, _read_bytes() - before


class ReadingAhead(Reading):
    """One piece that the thread reads."""

    def __init__(self, piece: Piece, opened: BinaryIO) -> None:
        super().__init__(piece, opened)
        self._is_wanted = True
        self._is_over = threading.Event()
        self._results: SimpleQueue[Cost | BaseException] = SimpleQueue()

    def read_all(self) -> None:
        """What the thread does: what each part cost, or an error, goes where the computing thread finds it."""
        try:
            for part in self.piece.parts:
                if self._is_wanted:
                    self._results.put(self._read(part, lambda: self._is_wanted))
        except BaseException as error:  # it is raised where the piece is asked for
            self.has_failed = True
            self._results.put(error)
        finally:
            self._is_over.set()

    def _cost(self, part: Part, timings: LayerTimings) -> Cost:
        try:
            result = self._results.get_nowait()
            timings.prefetch_hits += 1
        except Empty:
            result = self._results.get()
            timings.prefetch_waits += 1
        if isinstance(result, BaseException):
            raise result
        return result

    def give_up(self) -> None:
        self._is_wanted = False

    def unmap(self, is_uncached: bool = False) -> None:
        self.give_up()
        self._is_over.wait()
        super().unmap(is_uncached)


Orders = SimpleQueue[ReadingAhead | None]
"""To the thread: what to read, in turn; None ends it. A SimpleQueue may be put to where an object is collected."""


class Stream:
    """The streamed pieces: at most `slots` of them are mapped, one in use and those that come next.

    Their pages are left to the page cache: where it has room for all of them, storage is read once. Where it has not, it would
    drop each piece just before its next use, having made room for the others. So a piece that was left there, and is
    not there when it is needed again, is dropped at once from then on: the others stay, and so does what else is cached.

    Parameters
    ----------
    opened : callable
        The open file that a piece is cut from.
    """

    def __init__(self, cut: Cut, slots: int, opened: Callable[[Piece], BinaryIO]) -> None:
        self._order, self._token_begin = cut.order, cut.token_begin
        self._slots = slots
        self._opened = opened
        self._held: deque[tuple[int, Reading]] = deque()  # with their numbers in the order
        self._left: list[Reading] = []  # in use when an error ended the work
        self._newest = -1  # number of the piece that was asked for last
        self._used: set[Piece] = set()  # and left to the page cache
        self._uncached: set[Piece] = set()  # not found there again
        self._thread: threading.Thread | None = None
        self.orders: Orders = SimpleQueue()

    def ask(self, piece: Piece) -> Reading:
        """The reading of `piece`; those that come after it are begun, those that should have come before it given up."""
        while self._left:
            self._left.pop().unmap()
        found = [i for i, (_, reading) in enumerate(self._held) if reading.piece is piece and not reading.has_failed]
        self._drop(found[0] if found else len(self._held))
        if not found:
            self._begin(self._next_number(piece))
        if self._held[0][0] < self._token_begin <= self._newest:
            self._forget_uses()  # the encoder's pieces have been where the decoder's were
        self._newest = self._held[0][0]
        self._read_ahead()
        return self._held[0][1]

    def release(self, reading: Reading) -> None:
        """Unmap what `ask` gave, and go on reading."""
        if self._held and self._held[0][1] is reading:
            piece = reading.piece
            if piece in self._used and reading.read_bytes > piece.n_bytes // 2:
                self._uncached.add(piece)
            self._used.add(piece)
            self._held.popleft()
            reading.unmap(piece in self._uncached)
            self._read_ahead()

    def stop(self) -> None:
        """Read no further, end the thread and unmap all but what is in use, which goes when the next piece is asked for."""
        self._left += [reading for _, reading in self._held if reading.is_in_use]
        self._held = deque((number, reading) for number, reading in self._held if not reading.is_in_use)
        for reading in self._left:
            reading.give_up()
        self._drop(len(self._held))
        self._forget_uses()
        self._newest = -1
        if self._thread is not None:
            self.orders.put(None)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Stop, and unmap what is in use too; BufferError where a view is still held."""
        self.stop()
        while self._left:
            self._left.pop().unmap()

    def _forget_uses(self) -> None:
        self._used.clear()
        self._uncached.clear()

    def _drop(self, n_pieces: int) -> None:
        """Unmap the first of those held."""
        for _, reading in list(self._held)[:n_pieces]:
            reading.give_up()
        for _ in range(n_pieces):
            self._held.popleft()[1].unmap()

    def _read_ahead(self) -> None:
        """Begin what comes next, as far as there are slots."""
        while 1 < self._slots > len(self._held):
            number = (self._held[-1][0] if self._held else self._newest) + 1
            number = number if number < len(self._order) else self._token_begin
            if any(reading.piece is self._order[number] for _, reading in self._held):
                return
            self._begin(number)

    def _begin(self, number: int) -> None:
        piece = self._order[number]
        opened = self._opened(piece)
        if self._slots == 1:
            self._held.append((number, Reading(piece, opened)))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_read, args=(self.orders,), daemon=True, name="prefetch")
            self._thread.start()
        reading = ReadingAhead(piece, opened)
        self._held.append((number, reading))
        self.orders.put(reading)

    def _next_number(self, piece: Piece) -> int:
        """Where in the order `piece` comes next: further on, in the next token, in the next window."""
        for begin in (self._newest + 1, self._token_begin, 0):
            for number in range(begin, len(self._order)):
                if self._order[number] is piece:
                    return number
        raise ValueError("the piece is not one of those streamed")


def _read(orders: Orders) -> None:
    while (reading := orders.get()) is not None:
        reading.read_all()


def _read_bytes() -> int:
    """Bytes that this thread has had read from storage; 0 where the kernel does not count them by thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock * 512
