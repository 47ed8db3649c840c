"""How a step grows with the devices: trainings of 1, 2, 4 ..., the cost model fitted to them, and projections."""
