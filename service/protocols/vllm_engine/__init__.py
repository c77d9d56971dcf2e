"""Implements vllm.grpc.engine, the protocol between gateways and vLLM. Ids in, ids out; see docs/protocols.md."""
