"""Keys and passwords of one embedded instance, made at its first start and kept for the next."""

from polymorph.bus.credentials import Credentials
from polymorph.embedded.folder import DataFolder
from polymorph.kernels.signing import Role, Signer, Trust

EVALUATOR_KEY = "evaluator.key"
PROMOTER_KEY = "promoter.key"
TRUST = "trust.json"
CREDENTIALS = "nats.json"


def ensure(folder: DataFolder) -> Credentials:
    """Makes what is missing; what exists is kept, so that yesterday's signatures still verify."""
    trust = Trust()
    trust.add(Signer.load_or_generate(folder.keys / EVALUATOR_KEY).public, Role.EVALUATOR)
    trust.add(Signer.load_or_generate(folder.keys / PROMOTER_KEY).public, Role.PROMOTER)
    trust.save(folder.keys / TRUST)
    return Credentials.load_or_generate(folder.keys / CREDENTIALS)
