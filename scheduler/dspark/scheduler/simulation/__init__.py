"""A cluster in simulated time, run by the planner, routing, joint plan and store that serve.

`read_config` reads a TOML file; `sweep` simulates all that it asks for; `anchors` compares a preset
of the paper's with the paper.
"""

from dspark.scheduler.simulation.anchors import Anchor, anchors
from dspark.scheduler.simulation.config import Arm, SimulationConfig
from dspark.scheduler.simulation.figures import Costs, Figures
from dspark.scheduler.simulation.planning import Guide, MakeGuide
from dspark.scheduler.simulation.presets import PAPER, preset_names
from dspark.scheduler.simulation.reading import config_of, read_config
from dspark.scheduler.simulation.run import Simulation
from dspark.scheduler.simulation.sweep import Point, Progress, by_arm, enough_drafters, sweep

__all__ = [
    "PAPER",
    "Anchor",
    "Arm",
    "Costs",
    "Figures",
    "Guide",
    "MakeGuide",
    "Point",
    "Progress",
    "Simulation",
    "SimulationConfig",
    "anchors",
    "by_arm",
    "config_of",
    "enough_drafters",
    "preset_names",
    "read_config",
    "sweep",
]
