"""The Doom scenarios as data: which files of the ViZDoom package, which actions, which limit."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, frozen=True)
class Scenario:
  """One Doom task."""

  cfg: str  # File in `vizdoom.scenarios_path`; it names the map and sets skill and rewards.
  iwad: str  # Base game in the package, for textures, monsters and weapons.
  actions: tuple[tuple[str, ...], ...]  # Of each flat action, the buttons it holds down.
  time_limit: int  # Tics (35 a second) after which an episode is truncated.
  rewards: str  # What pays and what costs, for people.

  @property
  def buttons(self) -> tuple[str, ...]:
    """The buttons that any action uses, in a fixed order."""
    return tuple(dict.fromkeys(button for action in self.actions for button in action))

  @property
  def button_vectors(self) -> tuple[list[float], ...]:
    """Each flat action as the engine takes it: 1 for a button that is held down, else 0."""
    return tuple([float(button in action) for button in self.buttons] for action in self.actions)


FREEDOOM2 = 'freedoom2.wad'

SCENARIOS: dict[str, Scenario] = {
  'basic': Scenario(
    cfg='basic.cfg',
    iwad=FREEDOOM2,
    actions=((), ('MOVE_LEFT',), ('MOVE_RIGHT',), ('ATTACK',)),
    time_limit=300,
    rewards='kill +106 (ends the episode), shot -5, tic -1',
  ),
  'defend_the_center': Scenario(
    cfg='defend_the_center.cfg',
    iwad=FREEDOOM2,
    actions=((), ('TURN_LEFT',), ('TURN_RIGHT',), ('ATTACK',)),
    time_limit=2100,
    rewards='kill +1, death -1; 26 bullets',
  ),
  'health_gathering': Scenario(
    cfg='health_gathering.cfg',
    iwad=FREEDOOM2,
    actions=((), ('TURN_LEFT',), ('TURN_RIGHT',), ('MOVE_FORWARD',)),
    time_limit=2100,
    rewards='tic +1, death -100',
  ),
}
