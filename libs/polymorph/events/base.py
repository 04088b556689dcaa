"""What every message has: a kind, a domain, a name, a version and the id that ends its subject."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from polymorph.events.subjects import Kind, subject


class Message(BaseModel):
    """A message of the contract. Readers ignore fields they do not know: a change that only adds stays in v1."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="null")

    KIND: ClassVar[Kind]
    DOMAIN: ClassVar[str]
    NAME: ClassVar[str]
    VERSION: ClassVar[int] = 1

    def subject_id(self) -> str:
        """The token that ends the subject: what a watcher filters by."""
        raise TypeError(f"{type(self).__name__} names no subject id")

    @classmethod
    def type_name(cls) -> str:
        """The CloudEvents type: the subject without its id."""
        return f"polymorph.{cls.KIND}.{cls.DOMAIN}.{cls.NAME}.v{cls.VERSION}"

    @classmethod
    def wildcard(cls) -> str:
        """The subject that matches this message for every id."""
        return subject(cls.KIND, cls.DOMAIN, cls.NAME, cls.VERSION, "*")

    def subject(self) -> str:
        """The subject that this message is published under."""
        return subject(self.KIND, self.DOMAIN, self.NAME, self.VERSION, self.subject_id())


class Event(Message):
    """A fact in the past tense, kept in the stream POLYMORPH_EVT."""

    KIND = "evt"


class Command(Message):
    """An order to do one piece of work, kept in the work queue POLYMORPH_JOBS until it is done."""

    KIND = "cmd"


class Telemetry(Message):
    """What was seen a moment ago; core NATS, allowed to be lost."""

    KIND = "tel"
