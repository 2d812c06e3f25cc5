"""What a game engine leaves in /dev/shm when it is killed, and how it is found again."""

from pathlib import Path

MARKER = 'engine-'
_SHARED_MEMORY = Path('/dev/shm')


def remove_engine_leftovers(scratch: str) -> int:
  """Unlinks the shared-memory files of every engine that is marked below `scratch`.

  An engine's environment puts a file `engine-<instance id>` into its scratch folder for as long
  as the engine lives.

  Returns:
    How many files were removed.
  """
  removed = 0
  for marker in Path(scratch).rglob(f'{MARKER}*'):
    for file in _SHARED_MEMORY.glob(f'ViZDoom*{marker.name.removeprefix(MARKER)}'):
      file.unlink(missing_ok=True)
      removed += 1
    marker.unlink(missing_ok=True)
  return removed
