"""gRPC in, tokens out. No torch here."""

import os

# gRPC writes to stderr by itself: a line for each connection that sends rubbish, which may hold what it sent, and
# beside the one line in which a command says what went wrong. It looks at this when grpc is imported, which is below.
# Who wants its lines sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
