"""`penstock demo`: the RSVP analyzer."""

from pathlib import Path

from penstock.cli.options import Profile
from penstock.cli.run import supervised


def demo(profile: Profile = None) -> None:
    """Run the RSVP analyzer: a simulated feed of meetup answers, Kafka, Spark, Redis, a lake, and a live page.

    State lies in .penstock of the present folder. The pipeline itself is a file to read and to copy.
    """
    import penstock.demo

    supervised(Path(penstock.demo.__file__).with_name("pipeline.py"), Path(), profile)
