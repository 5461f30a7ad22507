"""What tasks on a cluster say to the process that gave them, and the other way."""

from __future__ import annotations


class Mailbox:
    """An actor between the tasks and this process: progress and checkpoints one way, stop back."""

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._checkpoints: dict[int, bytes] = {}
        self._stop = False

    def tell(self, number: int, rounds: int) -> bool:
        """A task says how far it is; whether it should go on."""
        self._rounds[number] = rounds
        return not self._stop

    def keep(self, number: int, checkpoint: bytes) -> None:
        """A task leaves a checkpoint."""
        self._checkpoints[number] = checkpoint

    def stop(self) -> None:
        """All tasks should save and stop."""
        self._stop = True

    def empty(self) -> tuple[dict[int, int], dict[int, bytes]]:
        """What has come in since the last time."""
        found = self._rounds, self._checkpoints
        self._rounds, self._checkpoints = {}, {}
        return found
