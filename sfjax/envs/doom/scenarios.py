"""The Doom scenarios: which files of the ViZDoom wheel, which actions, which time limit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
  """One task."""

  config: str  # File among the wheel's scenarios.
  buttons: tuple[str, ...]
  actions: tuple[tuple[str, ...], ...]  # Buttons held by each discrete action.
  time_limit_tics: int  # Counted from the first observation, 35 a second.


def _one_button_each(*buttons: str) -> tuple[tuple[str, ...], ...]:
  return ((), *((button,) for button in buttons))


_MOVE_AND_ATTACK = ('MOVE_LEFT', 'MOVE_RIGHT', 'ATTACK')
_TURN_AND_ATTACK = ('TURN_LEFT', 'TURN_RIGHT', 'ATTACK')
_TURN_AND_WALK = ('TURN_LEFT', 'TURN_RIGHT', 'MOVE_FORWARD')

SCENARIOS = {
  # A monster at a random place on the other side of a room. Kill +106, shot -5, tic -1; the kill
  # ends the episode. A random policy gets about -150; an expert about 85.
  'basic': Scenario(
    config='basic.cfg',
    buttons=_MOVE_AND_ATTACK,
    actions=_one_button_each(*_MOVE_AND_ATTACK),
    time_limit_tics=300,
  ),
  # Monsters come from all sides, 26 rounds of ammunition. Kill +1, death -1. Best: 25.
  'defend_the_center': Scenario(
    config='defend_the_center.cfg',
    buttons=_TURN_AND_ATTACK,
    actions=_one_button_each(*_TURN_AND_ATTACK),
    time_limit_tics=2100,
  ),
  # The floor burns and medikits heal. Tic alive +1, death -100. Best: 2,100.
  'health_gathering': Scenario(
    config='health_gathering.cfg',
    buttons=_TURN_AND_WALK,
    actions=_one_button_each(*_TURN_AND_WALK),
    time_limit_tics=2100,
  ),
}
