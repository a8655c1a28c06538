"""The suite that `blink certify` runs, and pytest alike: `pytest --rig local --model M verification/suite`."""
