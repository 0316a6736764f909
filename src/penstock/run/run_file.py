"""Where a run can be found, as it has noted it in its state folder for the other commands."""

from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.core.text import redact_address
from penstock.pipeline.config import Config
from penstock.supervise.folder import StateFolder, from_note, write_note


@dataclass(frozen=True)
class Running:
    pid: int
    pipeline: str
    status: str
    channels: str
    """Where they are, for people."""
    page: str | None
    redis: str | None
    file: str = ""
    """The pipeline's own file."""
    address: str = ""
    """That of its channels, whole: whoever asks need not have the settings that the run was started with."""

    FILE = "run.json"

    @classmethod
    def at(cls, state: Path) -> "Running | None":
        """The run that holds this state folder."""
        return from_note(cls, StateFolder(state).read_note(cls.FILE))

    @classmethod
    def crashed(cls, state: Path) -> bool:
        """Whether a run ended here without stopping in order: it removes its note when it stops."""
        return (state / cls.FILE).exists() and StateFolder(state).owner() is None

    @classmethod
    def find(cls, config: Config) -> "Running":
        """The run in this folder; Misconfigured when there is none."""
        if (found := cls.at(config.state)) is None:
            raise Misconfigured(
                str(config.folder.absolute()), "nothing runs here", "start it: penstock run FILE, or penstock demo"
            )
        return found

    @classmethod
    def file_in(cls, config: Config) -> Path:
        """The file of the pipeline that runs in this folder; Misconfigured when there is none."""
        if (found := cls.at(config.state)) is not None and found.file:
            return Path(found.file)
        problem = "nothing runs here" if found is None else "the run does not tell its file"
        raise Misconfigured(str(config.folder.absolute()), problem, "name the file of the pipeline: --pipeline FILE")

    def write(self, state: Path) -> None:
        """Addresses may hold passwords: nobody else can read it."""
        write_note(state / self.FILE, asdict(self))

    def to_json(self) -> dict[str, object]:
        """For the eyes of others: no address tells a password."""
        told = asdict(self)
        del told["address"]
        return {**told, "redis": self.redis and redact_address(self.redis)}
