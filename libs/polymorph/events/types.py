"""Every message of the contract, version 1. The AsyncAPI document and the golden files are made from here."""

from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.facts import (
    CandidateEvaluated,
    CandidateProposed,
    DriftDetected,
    HostLeased,
    PromotionAdvanced,
    PromotionCompleted,
    PromotionRolledBack,
    SearchClosed,
    SearchOpened,
    TrafficShapeObserved,
    WorkerKernelFaulted,
    WorkerLoaded,
    WorkerRefused,
)
from polymorph.events.orders import EvaluateCandidate
from polymorph.events.sightings import RequestFinished, RequestStarted, StepsCounted, TokensCounted

__all__ = [
    "COMMANDS",
    "EVENTS",
    "MESSAGES",
    "TELEMETRY",
    "CandidateEvaluated",
    "CandidateProposed",
    "DriftDetected",
    "EvaluateCandidate",
    "HostLeased",
    "PromotionAdvanced",
    "PromotionCompleted",
    "PromotionRolledBack",
    "RequestFinished",
    "RequestStarted",
    "SearchClosed",
    "SearchOpened",
    "StepsCounted",
    "TokensCounted",
    "TrafficShapeObserved",
    "WorkerKernelFaulted",
    "WorkerLoaded",
    "WorkerRefused",
]

EVENTS: tuple[type[Event], ...] = (
    TrafficShapeObserved,
    DriftDetected,
    SearchOpened,
    SearchClosed,
    CandidateProposed,
    CandidateEvaluated,
    PromotionAdvanced,
    PromotionCompleted,
    PromotionRolledBack,
    WorkerLoaded,
    WorkerRefused,
    WorkerKernelFaulted,
    HostLeased,
)
COMMANDS: tuple[type[Command], ...] = (EvaluateCandidate,)
TELEMETRY: tuple[type[Telemetry], ...] = (RequestStarted, RequestFinished, TokensCounted, StepsCounted)
MESSAGES: tuple[type[Message], ...] = (*EVENTS, *COMMANDS, *TELEMETRY)
