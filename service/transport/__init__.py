"""What stands around every call: ports, who calls, its message, status, health."""

import os

# gRPC's core writes to stderr by itself, a line for each connection that sends rubbish, which may hold what it sent. It
# looks at this when grpc is imported, which is below. Who wants its lines sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
